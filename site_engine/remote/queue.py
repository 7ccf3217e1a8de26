"""The attempts that this site holds: pending here, where they can be released, or sent to the server."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from site_engine.core.request import Admission, Request, Timings
from site_engine.core.request_queue import STARVING_AFTER_S, STARVING_EVERY
from site_engine.errors import NotServed
from site_engine.remote.request import Asking
from site_engine.remote.stream import Stream


@dataclass(slots=True, eq=False)
class Held:
    """One attempt: one HTTP request, whatever the number of its choices."""

    requests: tuple[Request, ...]
    asking: Asking
    prompt_tokens: int  # a guess, until the server has counted
    arrived_s: float
    reply: Callable[[Admission | NotServed], None]
    stream: Stream = field(init=False)
    charged: float = 0.0  # its tenant was, in tokens, when it was sent
    sent_s: float | None = None
    first_s: float | None = None
    task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.stream = Stream([each.id for each in self.requests], self.asking.delivered)

    @property
    def request(self) -> Request:
        return self.requests[0]

    @property
    def level(self) -> tuple[int, int]:
        return (self.request.lane, self.request.priority)

    @property
    def tokens(self) -> int:
        """In the server's memory, as far as is known."""
        return self.prompt_tokens + self.stream.tokens

    @property
    def is_spent(self) -> bool:
        """Whether the client has all the tokens it asked for: a site was lost just before the end."""
        most = self.request.sampling.max_tokens
        return most is not None and 0 < most <= self.asking.delivered

    def expected_remaining(self) -> float:
        return sum(self._capped(index, each.remaining.expected) for index, each in enumerate(self.requests))

    def p90_remaining(self) -> float:
        return sum(self._capped(index, each.remaining.p90) for index, each in enumerate(self.requests))

    def timings(self, now: float) -> Timings:
        sent = now if self.sent_s is None else self.sent_s
        first = now if self.first_s is None else self.first_s
        return Timings(sent - self.arrived_s, first - sent, now - first, self.stream.cached_tokens, 0)

    def _capped(self, index: int, curve: Callable[[int], float]) -> float:
        done, most = self.stream.tokens_of(index), self.request.sampling.max_tokens
        expected = float(curve(done))
        return expected if most is None else max(1.0, min(expected, float(most - done)))


class Holding:
    """Tenants take turns by tokens: start-time fair queuing. One is charged for what is expected of an
    attempt when it is sent, and for what it got when it has ended.
    """

    def __init__(self) -> None:
        self.pending: list[Held] = []  # by lane and priority, then as they came
        self.sent: set[Held] = set()
        self._by_request: dict[str, Held] = {}
        self._clocks: dict[str, float] = {}  # the virtual time of each tenant, in tokens
        self._begun = 0
        self._now = 0.0  # that of the tenant that was served last, when it was

    def __len__(self) -> int:
        return len(self.pending) + len(self.sent)

    def __contains__(self, held: Held) -> bool:
        return held.request.id in self._by_request

    def add(self, held: Held) -> int:
        """How many came before it that may go before it."""
        insort(self.pending, held, key=lambda each: (each.level, each.arrived_s))
        self._by_request.update((each.id, held) for each in held.requests)
        return self.pending.index(held)

    def first(self, now_s: float) -> Held:
        """Who of those pending is sent next: of the tenant furthest behind, the one that came first. One of
        lower priority that starves takes turns with its betters of the same lane.
        """
        best = self.pending[0]
        of_tenant: dict[str, Held] = {}
        starving: dict[str, Held] = {}
        for held in takewhile(lambda each: each.request.lane == best.request.lane, self.pending):
            if held.level == best.level:
                of_tenant.setdefault(held.request.tenant, held)
            elif self._begun % STARVING_EVERY == 0 and now_s - held.arrived_s > STARVING_AFTER_S:
                starving.setdefault(held.request.tenant, held)
        turns = of_tenant | starving
        return turns[min(turns, key=self._clock)]

    def begin(self, now_s: float) -> Held:
        """The first of those pending is sent now."""
        held = self.first(now_s)
        self.pending.remove(held)
        self.sent.add(held)
        self._begun += 1
        self._now = max(self._now, self._clock(held.request.tenant))
        held.charged = held.tokens + held.expected_remaining()
        self._charge(held.request.tenant, held.charged)
        return held

    def pending_of(self, tenant: str) -> int:
        return sum(held.request.tenant == tenant for held in self.pending)

    def drop(self, held: Held) -> None:
        if held in self.sent:
            self.sent.remove(held)
            self._charge(held.request.tenant, held.tokens - held.charged)
        elif held in self:
            self.pending.remove(held)
        for each in held.requests:
            self._by_request.pop(each.id, None)

    def of(self, request_ids: Iterable[str]) -> list[Held]:
        """Each once, in order; unknown requests have ended."""
        found = (self._by_request.get(each) for each in request_ids)
        return list(dict.fromkeys(each for each in found if each is not None))

    def all(self) -> list[Held]:
        return [*self.pending, *self.sent]

    def _clock(self, tenant: str) -> float:
        return max(self._clocks.get(tenant, self._now), self._now)

    def _charge(self, tenant: str, tokens: float) -> None:
        """Clocks that are not ahead need not be kept."""
        self._clocks[tenant] = self._clock(tenant) + tokens
        self._clocks = {each: clock for each, clock in self._clocks.items() if clock > self._now}
