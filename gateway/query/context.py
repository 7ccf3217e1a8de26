"""The parts that one answer needs, and the set of queries that are being answered."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from gateway.domain import Outcome, Query, Status
from gateway.federation.attempt import LiveAttempt
from gateway.federation.directory import Directory
from gateway.federation.server import Federation
from gateway.ids import hex_ids
from gateway.query.forecasting import Forecasts
from gateway.query.state import Story
from gateway.quotas.book import Quotas
from gateway.routing.candidates import Policy
from gateway.routing.demand import Demand
from gateway.routing.policies import POLICIES
from gateway.routing.window import GATHER_S, Gathered, Window
from gateway.telemetry.logs import note

log = logging.getLogger(__name__)

LAST_COUNT_WITHIN_S = 5.0
"""How long a cancelled attempt may take to say what it used, before what is known is recorded."""


async def _nobody_to_ask() -> None:
    """Where there is one replica, or no quota."""


@dataclass(slots=True)
class Gateway:
    """`record` must not block; `has_room` says whether it could take more.

    `stories` is what is being answered now: every count of it is its size. `lease_more` asks other replicas
    for more of the quotas that are short here, for a bounded time.
    """

    directory: Directory
    federation: Federation
    forecasts: Forecasts
    record: Callable[[Outcome], None]
    has_room: Callable[[], bool] = lambda: True
    policy_name: str = "mico"
    most_live: int = 10_000
    most_tries: int = 4
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    stories: dict[str, Story] = field(default_factory=dict)
    turns: itertools.count[int] = field(default_factory=itertools.count)
    window: Window = field(default_factory=Window)
    quotas: Quotas = field(default_factory=Quotas)
    lease_more: Callable[[], Awaitable[None]] = _nobody_to_ask
    complete_s: float = float("-inf")  # on `clock`: by then every site has had the time to join
    ending: bool = False
    new_id: Callable[[], str] = field(default_factory=hex_ids)
    traced: Callable[[Query, str], Query] = lambda query, _: query
    """The query as an attempt's site is told of it: with the span of that attempt, where there are traces."""
    _settling: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _of_tenants: dict[str, set[str]] = field(default_factory=dict, init=False)

    @property
    def policy(self) -> Policy:
        return POLICIES[self.policy_name]

    @property
    def live(self) -> int:
        return len(self.stories)

    def live_of(self, tenant: str) -> int:
        return len(self._of_tenants.get(tenant, ()))

    async def gathered(self, demand: Demand) -> str | None:
        """The site that the demand is assigned to with others, when its window closes."""
        loop = asyncio.get_running_loop()
        site: asyncio.Future[str | None] = loop.create_future()

        def place(name: str | None) -> None:
            if not site.done():  # nobody waits for it any more
                site.set_result(name)

        if self.window.add(Gathered(demand, place)):
            loop.call_later(GATHER_S, lambda: self.window.close(self.directory.fleet, self.clock()))
        return await site

    def tell(self, query: Query) -> Story:
        return Story(query, self.clock, self.wall_clock())

    @property
    def complete(self) -> bool:
        return self.clock() >= self.complete_s

    def end(self) -> None:
        """Wait for no answer any longer: each query ends now with an error that its client can read."""
        self.ending = True
        for story in self.stories.values():
            story.hurry()

    def begin(self, story: Story) -> None:
        """It was admitted, and is one of those that are answered now until it settles."""
        query = story.query
        self.stories[query.id] = story
        self._of_tenants.setdefault(query.caller.tenant, set()).add(query.id)

    def settle(self, story: Story) -> None:
        """End the query: nothing of it runs on, and its outcome is recorded once its last count is known."""
        story.end()
        self._leave(story.query)
        attempt = story.current
        if attempt is None or attempt.ended.is_set():
            self._record(story)
            return
        attempt.cancel()
        task = asyncio.create_task(self._record_when_ended(story, attempt), name=f"settle {story.query.id}")
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    def _leave(self, query: Query) -> None:
        tenant = query.caller.tenant
        if self.stories.pop(query.id, None) is not None:
            self._of_tenants[tenant].discard(query.id)
            if not self._of_tenants[tenant]:
                del self._of_tenants[tenant]

    async def settled(self) -> None:
        """Wait until every query that ended is recorded."""
        while self._settling:
            await asyncio.gather(*self._settling)

    async def _record_when_ended(self, story: Story, attempt: LiveAttempt) -> None:
        try:
            await asyncio.wait_for(attempt.ended.wait(), LAST_COUNT_WITHIN_S)
        except TimeoutError:
            log.warning("site %s did not say that attempt %s ended", attempt.site.name, attempt.id)
            if link := self.federation.links.get(attempt.site.name):
                link.forget(attempt)
        self._record(story)

    def _record(self, story: Story) -> None:
        outcome = story.outcome()
        tokens = outcome.prompt_tokens + outcome.completion_tokens
        self.quotas.settle(story.hold, tokens, refused=outcome.status is Status.REFUSED)
        self.record(outcome)
        if log.isEnabledFor(logging.INFO):
            say(outcome)


def say(outcome: Outcome) -> None:
    """In the line of its request, or in one of its own where that is written or there is none."""
    fields: dict[str, object] = {
        "outcome": outcome.status.value,
        "model": outcome.model,
        "site": outcome.site,
        "attempts": len(outcome.attempts),
        "prompt_tokens": outcome.prompt_tokens,
        "completion_tokens": outcome.completion_tokens,
        "total_s": round(outcome.total_s, 4),
        "error": outcome.error,
    }
    if not note(fields):
        own = {"request_id": outcome.request_id, "query_id": outcome.query_id, **fields}
        log.info("query %s %s", outcome.query_id, outcome.status.value, extra=own)
