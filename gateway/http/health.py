"""Serves /health, /ready, /version and / without a key; details to operators only, on their own port."""

from __future__ import annotations

from litestar import Response, get
from litestar.handlers import HTTPRouteHandler

from gateway.errors import NoSite
from gateway.http.backend import Backend


def health_routes(backend: Backend, *, details: bool = False) -> list[HTTPRouteHandler]:
    """`details`: include in /ready the reason why the gateway is ready or not."""

    @get("/health")
    async def health() -> Response[bytes]:
        return Response(b"", media_type="text/plain")

    @get("/ready")
    async def ready() -> dict[str, str]:
        state = backend.ready()
        if not state.ready:
            raise NoSite(state.reason if details else "no site can serve now")
        return {"status": "ready", "reason": state.reason} if details else {"status": "ready"}

    @get("/version")
    async def version() -> dict[str, str]:
        return {"version": backend.version}

    @get("/")
    async def index() -> dict[str, str]:
        return {"name": "mico", "version": backend.version, "api": "/v1"}

    return [health, ready, version, index]
