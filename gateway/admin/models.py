"""Serve `/admin/api/models`: the models of a site, and orders to add, remove, put to sleep or wake one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import get, post
from litestar.handlers import HTTPRouteHandler

from gateway.admin.access import Access, AnyRequest
from gateway.admin.tenancy import act, body_of, translated_errors
from gateway.blocks import Shared, memory, sharing
from gateway.domain import Model, ModelState, Site, SiteState
from gateway.errors import BadRequest, MicoError, NotFound
from gateway.federation.directory import Directory
from gateway.federation.link import Link
from gateway.federation.model_orders import ModelOrder
from gateway.store.audit import Act
from gateway.store.orders import OrderTable

ADD_WITHIN_S = 600.0
"""Seconds for a site to read the folder, compare the variant with transformers and then serve it."""
REMOVE_WITHIN_S = 30.0
AFTER = {"remove": "removed", "sleep": "asleep", "wake": "awake"}
"""The audit's `after` value for orders that name no folder."""


class Addition(msgspec.Struct, forbid_unknown_fields=True):
    """`adapter` or `folder` is a folder at the site, below one that its `models_from` names."""

    site: str
    model: str
    adapter: str = ""
    folder: str = ""
    reason: str = ""


class Change(msgspec.Struct, forbid_unknown_fields=True):
    """The body of an order to remove a model, put it to sleep or wake it."""

    site: str
    model: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SiteModels:
    """The sites' models and the orders that change them. `table` keeps the audit."""

    directory: Directory
    links: Mapping[str, Link]
    table: OrderTable
    unix_time: Callable[[], float] = time.time

    def site(self, name: str) -> Site:
        """Return the site of this name. Raises NotFound."""
        found = next((site for site in self.directory.sites if site.name == name), None)
        if found is None:
            names = ", ".join(site.name for site in self.directory.sites) or "none"
            raise NotFound(f"there is no site {name!r}; sites now: {names}")
        return found

    async def order(self, site: str, order: ModelOrder, operator: Act) -> None:
        """Have a site carry out an order. The audit records the order before, and a failure after.

        Raises NotFound, BadRequest with the site's reason, or Overloaded.
        """
        identity, link = self.site(site).identity, self.links.get(site)
        if not identity.takes_orders:
            raise BadRequest(f"{site} takes no orders for models: a server or an older site decides itself")
        if link is None:
            raise BadRequest(f"{site} is not linked to this gateway now")
        if order.kind == "add":
            self._check_name(site, order.model)
        elif order.model not in identity.models:
            raise NotFound(f"{site} does not serve {order.model!r}")
        action = f"{order.kind} model {order.model}"
        after = order.adapter or order.folder or AFTER[order.kind]
        async with translated_errors():
            await self.table.record(site, operator, action=action, after=after, now=self.unix_time())
        within_s = ADD_WITHIN_S if order.kind in ("add", "wake") else REMOVE_WITHIN_S
        try:
            await link.orders.carry_out(order, within_s)
        except MicoError as exc:
            async with translated_errors():
                await self.table.record(
                    site, operator, action=f"{action}: refused", after=str(exc), now=self.unix_time()
                )
            raise

    def _check_name(self, site: str, model: str) -> None:
        """Raise BadRequest for a name that would then stand for two different models."""
        own = self.site(site).identity.models
        if model in own:
            raise BadRequest(f"{site} serves {model} already; remove it first", param="model")
        bases = {each.id for each in own.values() if not each.parent}
        for other in self.directory.sites:
            served = other.identity.models.get(model)
            if served is not None and other.state is not SiteState.DOWN and served.parent not in bases:
                what = f"a variant of {served.parent}" if served.parent else "a base"
                raise BadRequest(f"{other.name} serves {model} as {what}; choose another name", param="model")


def site_model_routes(access: Access, models: SiteModels) -> list[HTTPRouteHandler]:
    @get("/admin/api/models")
    async def list_models(request: AnyRequest) -> dict[str, Any]:
        await access.operator(request)
        site = models.site(str(request.query_params.get("site", "")))
        served = site.identity.models
        shared = sharing({each.id: each.blocks for each in served.values()})
        awake = [each.blocks for each in served.values() if each.state is not ModelState.SLEEPING]
        return {
            "models": [_describe(model, shared[model.id]) for model in served.values()],
            "memory": memory(awake)._asdict(),
        }

    @post("/admin/api/models/add", status_code=200)
    async def add(request: AnyRequest) -> dict[str, Any]:
        who = (await access.acting_operator(request)).who
        body = await body_of(request, Addition)
        if bool(body.adapter) == bool(body.folder):
            raise BadRequest("name one folder at the site: of an adapter or of a model", param="adapter")
        order = ModelOrder("add", body.model, body.adapter, body.folder)
        await models.order(body.site, order, act(who, body.reason))
        return {"done": True}

    def changing(kind: str) -> HTTPRouteHandler:
        @post(f"/admin/api/models/{kind}", status_code=200, operation_id=f"{kind}_model")
        async def change(request: AnyRequest) -> dict[str, Any]:
            who = (await access.acting_operator(request)).who
            body = await body_of(request, Change)
            await models.order(body.site, ModelOrder(kind, body.model), act(who, body.reason))
            return {"done": True}

        return change

    return [list_models, add, *map(changing, AFTER)]


def _describe(model: Model, shared: Shared) -> dict[str, Any]:
    return {
        "id": model.id,
        "parent": model.parent or None,
        "revision": model.revision,
        "own_bytes": model.own_bytes,
        "in_host": any(each.in_host for each in model.blocks),
        "shared_bytes": shared.bytes,
        "sharing_models": shared.models,
        "shared_with": shared.names,
        "state": model.state.value,
        "wake_s": model.wake_s,
        "context_tokens": model.context_tokens,
        "created": model.created_s,
    }
