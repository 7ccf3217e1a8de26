"""Counts the tokens of prompts at sites: admit → decide → request; if a site fails, the next one.

A count is side work: it takes no slot, spends no quota and records no outcome. The number of concurrent
counts is bounded, here and at each site.
"""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from gateway.domain import Query
from gateway.errors import DeadlinePassed, Overloaded, ShuttingDown
from gateway.failure import AttemptFailure
from gateway.federation.attempt import AttemptFailed
from gateway.memory_budget import TENANT_PARTS
from gateway.query.admission import RETRY_AFTER_S, check_model
from gateway.query.context import QueryContext
from gateway.query.refusals import refusal_of
from gateway.query.targets import targets_of
from gateway.routing.demand import Demand
from gateway.routing.failover import FailedTry, Try, final_error, tries
from gateway.routing.model_routes import ModelRoute

MAX_COUNTS = 64
COUNT = frozenset({"count"})
WITHIN_S = 30.0
SITE_WITHIN_S = 10.0
"""Timeout of one site, after which another is tried."""


class TokenCounter:
    """Counts for all callers. A tenant has at most `TENANT_PARTS` times as many counts as are free."""

    def __init__(self, context: QueryContext) -> None:
        self._context = context
        self._counting: list[str] = []  # the tenants of the counts in progress

    async def count(self, query: Query) -> int:
        """Return the number of tokens of the prompt, chat template included. Raises MicoError.

        For a route, the first target that can count now counts, as the target of the query is drawn later.
        """
        if route := self._context.routes().get(query.model):
            query = replace(query, model=self._target(query, route))
        self._admit(query)
        tenant = query.caller.tenant
        self._counting.append(tenant)
        try:
            async with asyncio.timeout(WITHIN_S):
                return await self._count(query)
        except TimeoutError as exc:
            raise DeadlinePassed(f"no site counted the prompt within {WITHIN_S:.0f} s") from exc
        finally:
            self._counting.remove(tenant)

    def _target(self, query: Query, route: ModelRoute) -> str:
        """Return the model of a route's first target that can count now, or else of the first whose sites,
        ready or not, list the feature.
        """
        context = self._context
        complete, served = context.fleet_complete, context.directory.served
        able = targets_of(query, route, context.directory.models, 0.0, needs=COUNT, fleet_complete=complete)
        now = [each.model for each in able if each.model in served and served[each.model].features >= COUNT]
        return now[0] if now else able[0].model

    def _admit(self, query: Query) -> None:
        context = self._context
        if context.shutting_down:
            raise ShuttingDown("this gateway is shutting down; send the request again")
        check_model(query, models=context.directory.models, fleet_complete=context.fleet_complete)
        free = MAX_COUNTS - len(self._counting)
        if self._counting.count(query.caller.tenant) >= TENANT_PARTS * free:
            message = f"{len(self._counting)} prompts are being counted, and there is little room left"
            raise Overloaded(message, retry_after_s=RETRY_AFTER_S)

    async def _count(self, query: Query) -> int:
        context = self._context
        plan = tries(query.sampling, context.max_tries)
        planned, failure = next(plan), None
        while True:
            site = self._decide(query, planned, failure)
            try:
                return await context.federation.links[site].counts.count(
                    query, context.new_id(), SITE_WITHIN_S
                )
            except AttemptFailed as failed:
                failure = failed.failure
                planned = plan.send(FailedTry(failure, None))

    def _decide(self, query: Query, planned: Try, failure: AttemptFailure | None) -> str:
        """Return the name of a site. Raises the error for the client if there is none."""
        demand = Demand(
            model=query.model,
            prompt_tokens=0,
            response_tokens=0.0,
            kv_tokens=0,
            needs=query.needs | COUNT,
            regions=query.caller.regions,
        )
        context = self._context
        placed = context.place(demand, planned, keep_estimates=False)
        if placed.site is not None:
            return placed.site.name
        refusal = None
        if context.fleet_complete:
            refusal = refusal_of(query, demand, demand.needs, context.directory.sites, context.clock())
        raise refusal or final_error(failure, None, placed.reason)
