"""Serve `/admin/api/sites`: every site as this replica knows it, and operators' acts on a site."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec
from litestar import get, post
from litestar.handlers import HTTPRouteHandler

from gateway.admin.access import Access, AnyRequest
from gateway.admin.order_service import OrderService
from gateway.domain import Site
from gateway.errors import BadRequest
from gateway.federation.directory import Directory
from gateway.http.backend import Backend
from gateway.http.body import decode_as
from gateway.http.exchange import path_after
from gateway.operator_orders import SERVICE, Action, Order, Verb, clean_reason
from gateway.prices import prices_of
from gateway.routing.fleet import kv_tokens
from gateway.telemetry.metrics import capacity_tokens, outstanding_tokens
from gateway.telemetry.snapshot import shown_state

MAX_ORDER_S = 30 * 86_400.0


class ActRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of an act. With `dry_run`, the preview is returned and nothing changes."""

    reason: str = ""
    weight: float | None = None
    model: str = ""
    for_s: float = 0.0
    within_s: float = 60.0
    dry_run: bool = False


def site_routes(
    access: Access, backend: Backend, directory: Directory, order_service: OrderService
) -> list[HTTPRouteHandler]:
    @get("/admin/api/sites")
    async def list_sites(request: AnyRequest) -> dict[str, Any]:
        await access.operator(request)
        now_s, orders = backend.clock(), order_service.orders
        return {"sites": [describe(site, now_s, orders) for site in directory.sites]}

    @post("/admin/api/sites/{place:path}", status_code=200)
    async def act(request: AnyRequest) -> dict[str, Any]:
        """Act on a site: `place` is its name, which may have slashes, then "/" and a verb."""
        operator = await access.acting_operator(request)
        name, _, verb = path_after(request, "/admin/api/sites/").rpartition("/")
        body = decode_as(await request.body() or b"{}", ActRequest, "the body of an act is not understood")
        action = action_of(name, verb, body)
        if body.dry_run:
            return {"done": False, "preview": msgspec.to_builtins(order_service.preview(action))}
        if not action.reason:
            raise BadRequest("Say why: the reason is shown to everyone and kept.", param="reason")
        return {"done": True, "preview": msgspec.to_builtins(await order_service.act(action, operator.who))}

    return [list_sites, act]


def action_of(name: str, verb: str, body: ActRequest) -> Action:
    """Convert a request to an action. Raises BadRequest that names the field."""
    if verb not in tuple(Verb):
        raise BadRequest(f"{verb!r} is no act; there are: {', '.join(Verb)}", param="verb")
    if verb == Verb.WEIGHT and body.weight is None:
        raise BadRequest("weight: how much of the site's usual part, from 0 to 100?", param="weight")
    weight = 100.0 if body.weight is None else body.weight
    if not 0 <= weight <= 100:
        raise BadRequest("a weight is a percentage from 0 to 100", param="weight")
    for field in ("for_s", "within_s"):
        if not 0 <= getattr(body, field) <= MAX_ORDER_S:
            raise BadRequest(f"{field} is from 0 to {MAX_ORDER_S:.0f} seconds", param=field)
    return Action(Verb(verb), name, clean_reason(body.reason), weight, body.model, body.for_s, body.within_s)


def describe(site: Site, now_s: float, orders: list[Order]) -> dict[str, Any]:
    """Describe a site as JSON: prices in USD per million tokens, the weight as a percentage."""
    identity, load = site.identity, site.load
    prices = prices_of(identity, load)
    return {
        "name": site.name,
        "cloud": identity.cloud,
        "region": identity.region,
        "state": shown_state(site, now_s).value,
        "models": sorted(identity.models),
        "pinned_off": sorted(site.pinned_off),
        "engine": identity.engine,
        "version": identity.version,
        "slots": identity.slots,
        "running": load.running,
        "pending": load.pending,
        "assigned": site.credit.requests,
        "token_load": round(outstanding_tokens(site)),
        "capacity_tokens": round(capacity_tokens(site)),
        "kv_free_tokens": load.kv_free_tokens,
        "kv_capacity_tokens": kv_tokens(site),
        "kv_reserved_tokens": load.kv_reserved_tokens,
        "tokens_per_s": round(load.tokens_per_s, 2),
        "tokens_total": load.tokens_total,
        "prompt_tokens_total": load.prompt_tokens_total,
        "rtt_s": round(site.rtt_s, 6),
        "clock_ahead_s": None if site.clock_ahead_s is None else round(site.clock_ahead_s, 3),
        "load_age_s": round(now_s - load.received_s, 3),
        "weight": round(site.weight * 100, 1),
        "input_usd_per_mtok": prices.input_usd_per_mtok,
        "cached_usd_per_mtok": prices.cached_usd_per_mtok,
        "output_usd_per_mtok": prices.output_usd_per_mtok,
        "usd_per_hour": identity.usd_per_hour,
        "devices": [asdict(each) for each in load.devices],
        "orders": [order_dict(order) for order in orders if order.site == site.name],
    }


def order_dict(order: Order) -> dict[str, Any]:
    """Describe an order as JSON. `what` is the act in the command line's words."""
    what = order.value if order.subject == SERVICE else f"{order.subject} {order.value}"
    return {
        "what": what,
        "who": order.who,
        "reason": order.reason,
        "given_at": order.given_at,
        "until_at": order.until_at,
        "move_at": order.move_at,
    }
