"""The services that all queries share, and the set of live queries."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from gateway.domain import Query
from gateway.federation.attempt import LiveAttempt
from gateway.federation.directory import Directory
from gateway.federation.server import Federation
from gateway.ids import hex_ids
from gateway.outcome import Outcome, Status
from gateway.prices import NANO_USD
from gateway.query.admission import NOTHING_LIVE, Live
from gateway.query.forecasting import ForecastService
from gateway.query.state import QueryState
from gateway.quotas.ledger import QuotaLedger
from gateway.routing.candidates import Policy
from gateway.routing.decide import NO_EXCLUSIONS, Placement, decide
from gateway.routing.demand import Demand
from gateway.routing.failover import Try
from gateway.routing.model_routes import ModelRoute
from gateway.routing.policies import POLICIES
from gateway.routing.prefixes import PrefixIndex
from gateway.routing.traffic import Traffic
from gateway.routing.window import WINDOW_S, AssignmentWindow, WindowEntry
from gateway.telemetry.logs import add_request_fields

log = logging.getLogger(__name__)

MAX_PROMPT_BYTES = 2**30
"""Memory for the prompts of all live queries: 100 kB each for 10,000 queries."""
LAST_COUNT_WITHIN_S = 5.0
"""Time for the site of a cancelled attempt to report its last token count. After it, the count received so
far is recorded.
"""


async def _no_lease() -> bool:
    """The default of `lease_more`: there is one replica, or no quota."""
    return False


@dataclass(slots=True)
class QueryContext:
    """The services and the state that all queries of a gateway share.

    `record` must not block; `has_room` returns whether it can take another outcome. `live_queries` holds the
    queries in progress, by id. `lease_more` waits for one round of leasing quotas, and returns False if the
    database can't be reached or there is nothing to lease. `routes` returns the routes by name. `ended` is
    called with each query and its outcome once the outcome is recorded. `trace_query` takes a query and an
    attempt id, and returns the query to send to the site: with the attempt's span if tracing is enabled.
    """

    directory: Directory
    federation: Federation
    forecasts: ForecastService
    record: Callable[[Outcome], None]
    has_room: Callable[[], bool] = lambda: True
    policy_name: str = "mico"
    max_live: int = 10_000
    max_prompt_bytes: int = MAX_PROMPT_BYTES
    max_tries: int = 4
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    live_queries: dict[str, QueryState] = field(default_factory=dict)
    prompt_bytes: int = field(default=0, init=False)  # of the live queries
    turns: itertools.count[int] = field(default_factory=itertools.count)
    window: AssignmentWindow = field(default_factory=AssignmentWindow)
    traffic: Traffic = field(default_factory=Traffic)
    quotas: QuotaLedger = field(default_factory=QuotaLedger)
    lease_more: Callable[[], Awaitable[bool]] = _no_lease
    routes: Callable[[], Mapping[str, ModelRoute]] = dict
    ended: Callable[[Query, Outcome], None] = lambda query, outcome: None
    fleet_complete_s: float = float("-inf")  # on `clock`: when every known site has had time to join
    shutting_down: bool = False
    new_id: Callable[[], str] = field(default_factory=hex_ids)
    trace_query: Callable[[Query, str], Query] = lambda query, _: query
    _settling: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _of_tenants: dict[str, Live] = field(default_factory=dict, init=False)

    @property
    def policy(self) -> Policy:
        return POLICIES[self.policy_name]

    @property
    def prefixes(self) -> PrefixIndex:
        return self.directory.prefixes

    @property
    def live(self) -> int:
        return len(self.live_queries)

    def live_of(self, tenant: str) -> Live:
        return self._of_tenants.get(tenant, NOTHING_LIVE)

    def place(
        self,
        demand: Demand,
        planned: Try,
        excluded: Mapping[str, str] = NO_EXCLUSIONS,
        *,
        keep_estimates: bool = True,
    ) -> Placement:
        """Choose the site for a try by the sites' current figures, with `routing.decide.decide`."""
        return decide(
            demand,
            self.directory.fleet,
            self.policy,
            now_s=self.clock(),
            turn=next(self.turns),
            tried=planned.tried,
            is_retry=planned.failures > 0,
            excluded=excluded,
            preferred_site=planned.preferred_site,
            preference_reason=planned.preference_reason,
            keep_estimates=keep_estimates,
            gateways=self.quotas.replicas,
        )

    async def assign_in_window(self, demand: Demand) -> str | None:
        """Wait until the window closes. Return the site that joint assignment chose, or None if the query is
        to be decided alone.
        """
        loop = asyncio.get_running_loop()
        site: asyncio.Future[str | None] = loop.create_future()

        def place(name: str | None) -> None:
            if not site.done():  # cancelled if the query stopped waiting
                site.set_result(name)

        if self.window.add(WindowEntry(demand, place)):
            loop.call_later(WINDOW_S, lambda: self.window.close(self.directory.fleet, self.clock()))
        return await site

    def new_state(self, query: Query) -> QueryState:
        return QueryState(query, self.clock, self.wall_clock())

    @property
    def fleet_complete(self) -> bool:
        """Return whether every site that an earlier process knew has had time to join again."""
        return self.clock() >= self.fleet_complete_s

    def shut_down(self) -> None:
        """Expire the waits of all live queries, so that each ends now with ShuttingDown for its client."""
        self.shutting_down = True
        for state in self.live_queries.values():
            state.expire()

    def register(self, state: QueryState) -> None:
        """Count an admitted query as live until it settles."""
        self.live_queries[state.query.id] = state
        self._count(state.query.caller.tenant, Live(1, state.prompt_bytes))

    def settle(self, state: QueryState) -> None:
        """End the query: cancel its running attempt, and record its outcome once the last token count is
        known, after LAST_COUNT_WITHIN_S at the latest.
        """
        state.end()
        self._unregister(state)
        attempt = state.current
        if attempt is None or attempt.ended.is_set():
            self._record(state)
            return
        attempt.cancel()
        task = asyncio.create_task(self._record_when_ended(state, attempt), name=f"settle {state.query.id}")
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    def _unregister(self, state: QueryState) -> None:
        if self.live_queries.pop(state.query.id, None) is not None:
            self._count(state.query.caller.tenant, Live(-1, -state.prompt_bytes))

    def _count(self, tenant: str, change: Live) -> None:
        self.prompt_bytes += change.prompt_bytes
        before = self.live_of(tenant)
        now = Live(before.queries + change.queries, before.prompt_bytes + change.prompt_bytes)
        if now.queries:
            self._of_tenants[tenant] = now
        else:
            del self._of_tenants[tenant]

    async def wait_settled(self) -> None:
        """Wait until the outcome of every ended query is recorded."""
        while self._settling:
            await asyncio.gather(*self._settling)

    async def _record_when_ended(self, state: QueryState, attempt: LiveAttempt) -> None:
        try:
            await asyncio.wait_for(attempt.ended.wait(), LAST_COUNT_WITHIN_S)
        except TimeoutError:
            log.warning("site %s did not say that attempt %s ended", attempt.site.name, attempt.id)
            if link := self.federation.links.get(attempt.site.name):
                link.forget(attempt)
        self._record(state)

    def _record(self, state: QueryState) -> None:
        outcome = state.outcome(self.directory.prices_of)
        tokens = outcome.prompt_tokens + outcome.completion_tokens
        nano_usd = outcome.nano_usd if tokens else 0  # an error instead of an answer is not charged
        self.quotas.settle(state.reservation, tokens, nano_usd, refused=outcome.status is Status.REFUSED)
        self.record(outcome)
        self.ended(state.query, outcome)
        if log.isEnabledFor(logging.INFO):
            log_outcome(outcome)


def log_outcome(outcome: Outcome) -> None:
    """Add the outcome to the request's log line, or log a separate line if there is none to add to."""
    fields: dict[str, object] = {
        "outcome": outcome.status.value,
        "model": outcome.model,
        "asked_model": outcome.asked_model or outcome.model,
        "site": outcome.site,
        "attempts": len(outcome.attempts),
        "prompt_tokens": outcome.prompt_tokens,
        "completion_tokens": outcome.completion_tokens,
        "total_s": round(outcome.total_s, 4),
        "usd": outcome.nano_usd / NANO_USD,
        "error": outcome.error,
    }
    if not add_request_fields(fields):
        own = {"request_id": outcome.request_id, "query_id": outcome.query_id, **fields}
        log.info("query %s %s", outcome.query_id, outcome.status.value, extra={"fields": own})
