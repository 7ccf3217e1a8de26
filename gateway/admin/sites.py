"""`GET /admin/api/sites`: every site as this replica knows it. Needs an admin key."""

from __future__ import annotations

from typing import Any

from litestar import Request, get
from litestar.datastructures import State
from litestar.handlers import HTTPRouteHandler

from gateway.api.auth import caller_of
from gateway.api.backend import Backend
from gateway.domain import Site
from gateway.errors import Forbidden
from gateway.federation.directory import Directory


def admin_routes(backend: Backend, directory: Directory) -> list[HTTPRouteHandler]:
    @get("/admin/api/sites")
    async def list_sites(request: Request[Any, Any, State]) -> dict[str, Any]:
        if not (await caller_of(request.scope, backend)).admin:
            raise Forbidden("This needs an admin key: mico keys create NAME --admin")
        return {"sites": [_describe(site, backend.clock()) for site in directory.sites]}

    return [list_sites]


def _describe(site: Site, now_s: float) -> dict[str, Any]:
    """Tokens in tokens, times in seconds, prices in USD per million tokens."""
    identity, load = site.identity, site.load
    return {
        "name": site.name,
        "cloud": identity.cloud,
        "region": identity.region,
        "state": site.state.value,
        "models": sorted(identity.models),
        "engine": identity.engine,
        "version": identity.version,
        "slots": identity.slots,
        "running": load.running,
        "pending": load.pending,
        "assigned": site.credit.requests,
        "token_load": round(load.token_load + site.credit.prompt_tokens + site.credit.response_tokens),
        "kv_free_tokens": load.kv_free_tokens,
        "kv_capacity_tokens": identity.kv_capacity_tokens,
        "kv_reserved_tokens": load.kv_reserved_tokens,
        "tokens_per_s": round(load.tokens_per_s, 2),
        "tokens_total": load.tokens_total,
        "prompt_tokens_total": load.prompt_tokens_total,
        "rtt_s": round(site.rtt_s, 6),
        "load_age_s": round(now_s - load.received_s, 3),
        "weight": site.weight,
        "input_usd_per_mtok": identity.input_usd_per_mtok,
        "output_usd_per_mtok": identity.output_usd_per_mtok,
    }
