"""Keeps tuned models served: has a site fetch each that no site serves, and drops those that were deleted."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import Final

from gateway.domain import Site, SiteState
from gateway.errors import MicoError
from gateway.federation.link import Link
from gateway.federation.model_orders import ModelOrder
from gateway.tasks import cancel
from gateway.tuning.context import TuningContext
from gateway.tuning.values import TunedModel
from wire import federation_pb2 as pb

log = logging.getLogger(__name__)

ADD_WITHIN_S: Final = 600.0
"""A site fetches the adapter, compares it with transformers and then serves it."""
REMOVE_WITHIN_S: Final = 30.0
MAX_ORDERS: Final = 4
"""Orders of this replica that sites carry out at a time."""
AGAIN_S: Final = 60.0
"""After a refusal a site is asked no sooner."""


class Serving:
    """Has the adapters of jobs that succeeded served: the last of each, and its checkpoints."""

    def __init__(self, context: TuningContext) -> None:
        self._context = context
        self._orders: dict[tuple[str, str], asyncio.Task[None]] = {}  # by site and model
        self._again_s: dict[tuple[str, str], float] = {}

    async def settle(self) -> None:
        """Begin the orders that bring what sites serve in line with what there is."""
        context, now_s = self._context, self._context.clock()
        self._again_s = {key: at_s for key, at_s in self._again_s.items() if at_s > now_s}
        unfinished = await context.contents.unfinished()  # first: what ends meanwhile is among the models
        models = {model.name: model for model in await context.contents.tuned()}
        known = {*models, *unfinished}
        sites, served = list[Site](), set[str]()
        for site in context.sites():
            is_down = site.state is SiteState.DOWN
            tuned = {each.id for each in site.identity.models.values() if each.tenant}
            for name in tuned - known:
                if is_down:
                    context.forget_model(site.name, name)
                else:
                    self._begin(site.name, ModelOrder("remove", name), REMOVE_WITHIN_S)
            if not is_down:
                sites.append(site)
                served |= tuned
        for name, model in models.items():
            if name not in served:
                self._add(model, sites)

    async def close(self) -> None:
        await cancel(*self._orders.values())

    def _add(self, model: TunedModel, sites: list[Site]) -> None:
        """Order one of the sites that can fetch adapters and serve the base: each replica takes the same.

        It is in the regions of the key that had the adapter trained, while that key is known.
        """
        if any(name == model.name for _, name in self._orders):
            return
        caller = self._context.caller(model.key_id)
        able = [
            site.name
            for site in (sites if caller is None else caller.sites_of(sites))
            if site.identity.trains is not None
            and model.base in site.identity.models
            and (site.name, model.name) not in self._again_s
        ]
        if able:
            site = max(able, key=lambda each: hashlib.sha256(f"{each} {model.name}".encode()).digest())
            fetched = pb.Content(sha256=bytes.fromhex(model.sha256), bytes=model.bytes)
            order = ModelOrder("add", model.name, content=fetched, tenant=model.tenant, parent=model.base)
            self._begin(site, order, ADD_WITHIN_S)

    def _begin(self, site: str, order: ModelOrder, within_s: float) -> None:
        key, link = (site, order.model), self._context.links().get(site)
        if link is None or key in self._orders or key in self._again_s or len(self._orders) >= MAX_ORDERS:
            return
        task = asyncio.create_task(self._carry_out(link, order, within_s), name=f"{order.kind} {order.model}")
        self._orders[key] = task
        task.add_done_callback(lambda _: self._orders.pop(key, None))

    async def _carry_out(self, link: Link, order: ModelOrder, within_s: float) -> None:
        try:
            await link.orders.carry_out(order, within_s)
        except MicoError as exc:
            self._again_s[link.name, order.model] = self._context.clock() + AGAIN_S
            log.warning("%s did not %s the tuned model %s: %s", link.name, order.kind, order.model, exc)
