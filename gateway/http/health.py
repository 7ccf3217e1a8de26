"""Serves /health, /ready, /version and / without a key; details to operators only, on their own port."""

from __future__ import annotations

from litestar import Response, route
from litestar.handlers import HTTPRouteHandler

from gateway.errors import NoSite
from gateway.http.backend import Backend


def get_or_head(path: str) -> HTTPRouteHandler:
    """Serve GET and HEAD, which load balancers use; the server sends no body for HEAD."""
    return route(path, http_method=["GET", "HEAD"], status_code=200)


def health_routes(backend: Backend, *, details: bool = False) -> list[HTTPRouteHandler]:
    """`details`: name the sites that are ready, and what is amiss."""

    @get_or_head("/health")
    async def health() -> Response[bytes]:
        return Response(b"", media_type="text/plain")

    @get_or_head("/ready")
    async def ready() -> dict[str, str]:
        state = backend.ready()
        if not state.ready:
            raise NoSite(state.reason if details else "no site can serve now")
        return {"status": "ready", "reason": state.reason} if details else {"status": "ready"}

    @get_or_head("/version")
    async def version() -> dict[str, str]:
        return {"version": backend.version}

    @get_or_head("/")
    async def index() -> dict[str, str]:
        return {"name": "mico", "version": backend.version, "api": "/v1"}

    return [health, ready, version, index]
