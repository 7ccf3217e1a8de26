"""Copy a share of the answered queries of a route to another model, whose answers nobody sees.

A copy starts after the user's answer has ended, so that it can't delay the answer. It runs in the batch lane,
and only at a site that is at most half busy. The number of concurrent copies is bounded, and no query waits
to be copied. Copies are recorded for the tenant SHADOW_TENANT, so that they spend no user's quota.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from contextvars import Context
from typing import Final

from msgspec.structs import replace

from gateway.domain import SHADOW_TENANT, Caller, Lane, Query, Site
from gateway.errors import MicoError
from gateway.outcome import Outcome, Status
from gateway.query.admission import exists_for
from gateway.query.answer import answer
from gateway.query.context import QueryContext
from gateway.query.forecasting import NO_ANSWER
from gateway.routing.decide import decide
from gateway.routing.demand import Demand
from gateway.routing.model_routes import Shadow, is_shadowed
from gateway.tasks import cancel
from gateway.telemetry.route_figures import Copied

log = logging.getLogger(__name__)

MAX_COPIES: Final = 8
"""The limit of copies in flight at this gateway; further queries are not copied."""
WITHIN_S: Final = 300.0


class Shadows:
    """Starts and observes the copies. `observe` is called with each copy that has ended or was skipped."""

    def __init__(self, context: QueryContext, observe: Callable[[Copied], None]) -> None:
        self._context = context
        self._observe = observe
        self._running: dict[str, tuple[asyncio.Task[None], Outcome]] = {}  # by copy id: task, user's outcome

    def ended(self, query: Query, outcome: Outcome) -> None:
        """Copy an answered query if it is drawn. If `query` is a copy itself, observe its end."""
        if query.id in self._running:
            self._take_note(outcome)
        elif query.asked_model and outcome.status is Status.ANSWERED:
            route = self._context.routes().get(query.asked_model)
            shadow = route.shadow if route is not None else None
            if shadow is not None and self._is_copied(shadow, query, outcome):
                # Later, so that the end of the user's answer is sent first; in an empty Context, so that the
                # copy is not a part of the user's request.
                loop = asyncio.get_running_loop()
                loop.call_soon(self._copy, query, shadow, outcome, context=Context())

    async def close(self) -> None:
        await cancel(*(task for task, _ in self._running.values()))

    def _is_copied(self, shadow: Shadow, query: Query, outcome: Outcome) -> bool:
        caller, model = query.caller, self._context.directory.models.get(shadow.model)
        return (
            shadow.model != outcome.model
            and caller.may_use(shadow.model)
            and (model is None or exists_for(caller, model))
            and is_shadowed(shadow, query.id)
        )

    def _copy(self, query: Query, shadow: Shadow, outcome: Outcome) -> None:
        context = self._context
        site = (
            None
            if len(self._running) >= MAX_COPIES or context.shutting_down
            else self._site(query, shadow.model, outcome)
        )
        if site is None:
            self._observe(Copied(context.clock(), query.asked_model, shadow.model, "skipped"))
            return
        now_s = context.clock()
        copy = replace(
            query,
            id=context.new_id(),
            model=shadow.model,
            caller=Caller("", SHADOW_TENANT, frozenset({shadow.model}), regions=query.caller.regions),
            received_s=now_s,
            deadline_s=now_s + WITHIN_S,
            lane=Lane.BATCH,
            priority=0,
            preferred_site=site,
            traceparent="",
        )
        self._running[copy.id] = asyncio.create_task(self._run(copy)), outcome

    def _site(self, query: Query, model: str, outcome: Outcome) -> str | None:
        """Return a site that is at most half busy and expected to start the copy at once, or None."""
        context = self._context
        demand = Demand.of(
            model,
            outcome.prompt_tokens,
            outcome.forecast or NO_ANSWER,
            query.sampling,
            lane=Lane.BATCH,
            needs=query.needs,
            regions=query.caller.regions,
            limits=query.limits,
        )
        fleet = context.directory.fleet
        busy = {site.name: "more than half busy" for site in fleet.sites if is_busy(site)}
        placed = decide(demand, fleet, context.policy, now_s=context.clock(), turn=0, excluded=busy)
        starts_at_once = placed.site is not None and any(
            each.site == placed.site.name and each.wait_s == 0.0 for each in placed.estimates
        )
        return placed.site.name if placed.site is not None and starts_at_once else None

    async def _run(self, copy: Query) -> None:
        try:
            async with aclosing(answer(self._context, copy)) as pieces:
                async for _ in pieces:
                    pass
        except MicoError as error:
            log.info("a copy for %s failed: %s", copy.model, error.message)
        except Exception:
            log.exception("a copy for %s failed in an unforeseen way", copy.model)

    def _take_note(self, copy: Outcome) -> None:
        _, user = self._running.pop(copy.query_id)
        copied = Copied(
            self._context.clock(),
            copy.asked_model,
            copy.model,
            "answered" if copy.status is Status.ANSWERED else "failed",
            copy.completion_tokens,
            copy.total_s,
            user.completion_tokens,
            user.total_s,
        )
        self._observe(copied)


def is_busy(site: Site) -> bool:
    """Return whether more than half of the site's slots would be in use with one more request."""
    in_use = site.load.running + site.load.pending + site.credit.requests
    return 2 * (in_use + 1) > site.identity.slots
