"""The attempts at a site in front of a server: pending here, where they can be released, or sent."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from site_engine.core.request import Request, Timings
from site_engine.core.request_queue import STARVING_AFTER_S, STARVING_EVERY
from site_engine.errors import NotServed
from site_engine.remote.pooling import PoolingResponse
from site_engine.remote.quirks import Change
from site_engine.remote.request import HttpRequest
from site_engine.remote.stream import ResponseStream


@dataclass(slots=True, eq=False)
class RemoteRequest:
    """One attempt: one HTTP request, whatever the number of its choices."""

    choices: tuple[Request, ...]
    http: HttpRequest
    prompt_tokens: int  # a guess, until the server has counted
    arrived_s: float
    reply: Callable[[NotServed | None], None]
    stream: ResponseStream | PoolingResponse = field(init=False)
    charged: float = 0.0  # to its tenant, in tokens, when it was sent
    sent_s: float | None = None
    first_s: float | None = None
    task: asyncio.Task[None] | None = None
    changes: list[Change] = field(default_factory=list)  # that refusals of the server asked for

    def __post_init__(self) -> None:
        if self.http.pooling is not None:
            self.stream = PoolingResponse(self.first.id, self.http.pooling)
        else:
            self.stream = ResponseStream([each.id for each in self.choices], self.http.delivered)

    @property
    def first(self) -> Request:
        """The first choice; all choices share its sampling, tenant, lane, priority and deadline."""
        return self.choices[0]

    @property
    def level(self) -> tuple[int, int]:
        return (self.first.lane, self.first.priority)

    @property
    def tokens(self) -> int:
        """Tokens in the server's memory, as far as is known."""
        return self.prompt_tokens + self.stream.tokens

    @property
    def is_spent(self) -> bool:
        """True if the client has all tokens it asked for: none, or a site was lost just before the end."""
        max_tokens = self.first.sampling.max_tokens
        return self.http.pooling is None and max_tokens is not None and max_tokens <= self.http.delivered

    def expected_remaining(self) -> float:
        return sum(self._capped(index, each.remaining.expected) for index, each in enumerate(self.choices))

    def p90_remaining(self) -> float:
        return sum(self._capped(index, each.remaining.p90) for index, each in enumerate(self.choices))

    def timings(self, now: float) -> Timings:
        sent = now if self.sent_s is None else self.sent_s
        first = now if self.first_s is None else self.first_s
        cached = self.stream.cached_tokens
        return Timings(
            sent - self.arrived_s, first - sent, now - first, cached or 0, 0, cached_unknown=cached is None
        )

    def _capped(self, index: int, curve: Callable[[int], float]) -> float:
        done, max_tokens = self.stream.tokens_of(index), self.first.sampling.max_tokens
        expected = float(curve(done))
        return expected if max_tokens is None else max(1.0, min(expected, float(max_tokens - done)))


class RemoteQueue:
    """Tenants take turns by tokens: start-time fair queuing (Goyal et al., 1996).

    A tenant is charged for the expected tokens of an attempt when it is sent, and for the actual ones when it
    has ended.
    """

    def __init__(self) -> None:
        self.pending: list[RemoteRequest] = []  # by lane and priority, then in order of arrival
        self.sent: set[RemoteRequest] = set()
        self._by_id: dict[str, RemoteRequest] = {}  # by the id of each choice
        self._clocks: dict[str, float] = {}  # the virtual time of each tenant, in tokens
        self._begun = 0
        self._now = 0.0  # the virtual time at which the last tenant was served

    def __len__(self) -> int:
        return len(self.pending) + len(self.sent)

    def __contains__(self, request: RemoteRequest) -> bool:
        return request.first.id in self._by_id

    @property
    def sent_tokens(self) -> int:
        return sum(each.tokens for each in self.sent)

    def add(self, request: RemoteRequest) -> None:
        insort(self.pending, request, key=lambda each: (each.level, each.arrived_s))
        self._by_id.update((each.id, request) for each in request.choices)

    def peek(self, now_s: float) -> RemoteRequest:
        """Return the pending request to send next: the first arrival of the tenant furthest behind.

        A starving request of lower priority takes turns with its betters of the same lane.
        """
        best = self.pending[0]
        of_tenant: dict[str, RemoteRequest] = {}
        starving: dict[str, RemoteRequest] = {}
        for each in takewhile(lambda each: each.first.lane == best.first.lane, self.pending):
            if each.level == best.level:
                of_tenant.setdefault(each.first.tenant, each)
            elif self._begun % STARVING_EVERY == 0 and now_s - each.arrived_s > STARVING_AFTER_S:
                starving.setdefault(each.first.tenant, each)
        turns = of_tenant | starving
        return turns[min(turns, key=self._clock)]

    def pop(self, now_s: float) -> RemoteRequest:
        """Move the next pending request to those sent, and charge its tenant."""
        request = self.peek(now_s)
        self.pending.remove(request)
        self.sent.add(request)
        self._begun += 1
        self._now = max(self._now, self._clock(request.first.tenant))
        request.charged = request.tokens + request.expected_remaining()
        self._charge(request.first.tenant, request.charged)
        return request

    def pending_of(self, tenant: str) -> int:
        return sum(each.first.tenant == tenant for each in self.pending)

    def remove(self, request: RemoteRequest) -> None:
        """Forget a request, pending or sent; settle the charge of one that was sent."""
        if request in self.sent:
            self.sent.remove(request)
            self._charge(request.first.tenant, request.tokens - request.charged)
        elif request in self:
            self.pending.remove(request)
        for each in request.choices:
            self._by_id.pop(each.id, None)

    def find(self, request_ids: Iterable[str]) -> list[RemoteRequest]:
        """Return each request once, in order; unknown ones have ended."""
        found = (self._by_id.get(each) for each in request_ids)
        return list(dict.fromkeys(each for each in found if each is not None))

    def all(self) -> list[RemoteRequest]:
        return [*self.pending, *self.sent]

    def _clock(self, tenant: str) -> float:
        return max(self._clocks.get(tenant, self._now), self._now)

    def _charge(self, tenant: str, tokens: float) -> None:
        """Advance a tenant's clock; drop clocks that are not ahead, which need not be kept."""
        self._clocks[tenant] = self._clock(tenant) + tokens
        self._clocks = {each: clock for each, clock in self._clocks.items() if clock > self._now}
