"""What probes and people ask a gateway without a key: is it alive, can it serve, which version is it."""

from __future__ import annotations

from litestar import Response, get, route
from litestar.handlers import HTTPRouteHandler

from gateway.api.backend import Backend
from gateway.errors import NoSite


def health_routes(backend: Backend) -> list[HTTPRouteHandler]:
    @route("/health", http_method=["GET", "HEAD"], status_code=200)
    async def health() -> Response[bytes]:
        return Response(b"", media_type="text/plain")

    @get("/ready")
    async def ready() -> dict[str, str]:
        state = backend.ready()
        if not state.ready:
            raise NoSite(state.reason)
        return {"status": "ready", "reason": state.reason}

    @get("/version")
    async def version() -> dict[str, str]:
        return {"version": backend.version}

    @get("/")
    async def front_door() -> dict[str, str]:
        return {"name": "mico", "version": backend.version, "api": "/v1"}

    return [health, ready, version, front_door]
