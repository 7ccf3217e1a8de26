"""What probes and people ask a gateway without a key: is it alive, can it serve, which version is it."""

from __future__ import annotations

from litestar import Response, route
from litestar.handlers import HTTPRouteHandler

from gateway.errors import NoSite
from gateway.http.backend import Backend


def look(path: str) -> HTTPRouteHandler:
    """Answers GET, and HEAD alike: of it the server sends no body. Load balancers ask so."""
    return route(path, http_method=["GET", "HEAD"], status_code=200)


def health_routes(backend: Backend) -> list[HTTPRouteHandler]:
    @look("/health")
    async def health() -> Response[bytes]:
        return Response(b"", media_type="text/plain")

    @look("/ready")
    async def ready() -> dict[str, str]:
        state = backend.ready()
        if not state.ready:
            raise NoSite(state.reason)
        return {"status": "ready", "reason": state.reason}

    @look("/version")
    async def version() -> dict[str, str]:
        return {"version": backend.version}

    @look("/")
    async def front_door() -> dict[str, str]:
        return {"name": "mico", "version": backend.version, "api": "/v1"}

    return [health, ready, version, front_door]
