"""The attempts that this site holds: pending here, where they can be released, or sent to the server."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from site_engine.errors import NotServed
from site_engine.remote.asking import Asking
from site_engine.remote.stream import Stream
from site_engine.request import Admission, Request, Timings


@dataclass(slots=True, eq=False)
class Held:
    """One attempt: one HTTP request, whatever the number of its choices."""

    requests: tuple[Request, ...]
    asking: Asking
    prompt_tokens: int  # a guess, until the server has counted
    arrived_s: float
    reply: Callable[[Admission | NotServed], None]
    stream: Stream = field(init=False)
    turn: float = 0.0  # its tenant's virtual time, in tokens, when it is this one's turn
    sent_s: float | None = None
    first_s: float | None = None
    task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.stream = Stream([each.id for each in self.requests], self.asking.delivered)

    @property
    def request(self) -> Request:
        return self.requests[0]

    @property
    def order(self) -> tuple[int, int, float, float]:
        return (self.request.lane, self.request.priority, self.turn, self.arrived_s)

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
    """Tenants take turns by tokens: start-time fair queuing, with each attempt's turn known as it arrives."""

    def __init__(self) -> None:
        self.pending: list[Held] = []  # in the order in which they are to be sent
        self.sent: set[Held] = set()
        self._by_request: dict[str, Held] = {}
        self._turns: dict[str, float] = {}  # of each tenant the turn of its next attempt
        self._now = 0.0  # the turn of the attempt that was sent last

    def __len__(self) -> int:
        return len(self.pending) + len(self.sent)

    def __contains__(self, held: Held) -> bool:
        return held.request.id in self._by_request

    def add(self, held: Held) -> int:
        """How many are to be sent before it."""
        tenant = held.request.tenant
        held.turn = max(self._now, self._turns.get(tenant, 0.0))
        self._turns[tenant] = held.turn + held.prompt_tokens + held.expected_remaining()
        insort(self.pending, held, key=lambda each: each.order)
        self._by_request.update((each.id, held) for each in held.requests)
        return self.pending.index(held)

    def begin(self) -> Held:
        """The first of those pending is sent now."""
        held = self.pending.pop(0)
        self._now = max(self._now, held.turn)
        self._turns = {tenant: turn for tenant, turn in self._turns.items() if turn > self._now}
        self.sent.add(held)
        return held

    def pending_of(self, tenant: str) -> int:
        return sum(held.request.tenant == tenant for held in self.pending)

    def drop(self, held: Held) -> None:
        if held in self.sent:
            self.sent.remove(held)
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
