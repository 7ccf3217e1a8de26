"""Who runs next: lane, then priority, then tenants fairly, then by work: chats the least for its weight, with
ageing, the lines of batches the most.

Does not decide whether there is room; the scheduler does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import exp, log

from site_engine.core.request import Lane, Request

Score = Callable[[Request, float], float]
"""(request, the ageing clock at its arrival) → place in the queue; the least goes first."""

PROMPT_TOKEN_WORK = 0.02
"""What computing a prompt token takes of a site beside a response token, which shares its iteration."""
AGEING_SHARE = 0.5
"""Of the time that the queue has lately taken to pass, so much waiting outweighs a factor of e in work times
length. With a fixed time a short queue is by length alone, and a long one first come first served.
"""
LEAST_AGEING_S = 2.0
PASSES_FADE_S = 60.0
GAP_SHARE = 0.05
"""What each start adds to the running mean of the time between two."""
STARVING_AFTER_S = 60.0
STARVING_EVERY = 4
"""Of so many starts one is of who has waited longest, once that starves. Were it all of them, any overload in
which nearly all starve would be first come first served.
"""
TENANT_PARTS = 4
FAIR_WITHIN_TOKENS = 32_768
"""Tenants whose shares differ by less count as served alike, so that the shortest of all of them goes first.
With turns at every request p99 latency per token is up to twice as long (docs/decisions/site-order.md).
"""
FLOOD_TIMES = 4.0
"""What a tenant has waiting beyond so many times what the others have on average is a flood."""


class Ageing:
    """A clock that runs the slower the longer a queue takes to pass. All who wait age alike by it, so that no
    two swap places and a score can be computed once, at arrival.
    """

    def __init__(self) -> None:
        self._aged = 0.0
        self._read_s = 0.0
        self._gap_s = 0.0  # between two starts while others wait
        self._started_s = 0.0
        self._passes_s = 0.0  # the longest time lately that a newcomer would wait, first come first served

    def arrived(self, now_s: float, waiting: int) -> float:
        """The clock's reading for one who comes when so many wait."""
        if not waiting:
            self._started_s = now_s
        self._look(now_s, waiting)
        return self._aged

    def started(self, now_s: float, waiting: int) -> None:
        self._gap_s += GAP_SHARE * (max(0.0, now_s - self._started_s) - self._gap_s)
        self._started_s = now_s
        self._look(now_s, waiting)

    def _look(self, now_s: float, waiting: int) -> None:
        passed_s = max(0.0, now_s - self._read_s)
        self._aged += passed_s / max(LEAST_AGEING_S, AGEING_SHARE * self._passes_s)
        self._passes_s = max(waiting * self._gap_s, self._passes_s * exp(-passed_s / PASSES_FADE_S))
        self._read_s = max(now_s, self._read_s)


def least_work(request: Request, aged: float) -> float:
    """Least latency per token: by Smith's rule (1956) work over weight goes first, and a second of waiting
    weighs by one over the length of the answer. Waiting ages it by factors.

    A line of a batch nobody waits for, only the batch: the longest goes first, so that no few long ones run
    on at the end while most of the device is idle (Graham 1969). Who starves still has its turn.
    """
    if request.lane is Lane.BATCH:
        return -request.expected_remaining() - _prompt_work(request)
    length = request.typical_length()
    work = min(length, request.expected_remaining()) + _prompt_work(request)
    return log(work * length) + aged


def _prompt_work(request: Request) -> float:
    return PROMPT_TOKEN_WORK * len(request.tokens)


def first_come(request: Request, _aged: float) -> float:
    return request.arrived_s


def shortest_prompt(request: Request, _aged: float) -> float:
    """The order of MICO's own engine (section 3.4): the shortest prompt pads the running batch least."""
    return float(request.prompt_len)


@dataclass(frozen=True, slots=True)
class Policy:
    """How the queue is ordered, how many tokens of a response are set aside for it, and when it may start."""

    score: Score = least_work
    reserved_tokens: Callable[[Request], int] = Request.p90_remaining
    static: bool = False  # a batch starts when the one before has ended as a whole


def whole_limit(request: Request) -> int:
    """The worst case: the response may be as long as it is allowed to be."""
    return max(1, request.max_tokens - request.generated)


DEFAULT_POLICY = Policy()
POLICIES = {
    "forecast": DEFAULT_POLICY,
    "fcfs": Policy(score=first_come),
    "shortest_prompt": Policy(score=shortest_prompt),
    "worst_case": Policy(score=first_come, reserved_tokens=whole_limit),
    "static": Policy(score=first_come, reserved_tokens=whole_limit, static=True),
}


def has_place(of_tenant: int, waiting: int, most: int) -> bool:
    """Whether one more may wait: a tenant may have `TENANT_PARTS` times the places that are free, so that no
    flood of one fills the queue (Choudhury and Hahne, Dynamic queue length thresholds, 1998).
    """
    return waiting < most and of_tenant <= TENANT_PARTS * (most - waiting)


class _Tenants:
    """The waiting requests of one lane and priority, shared out between tenants by start-time fair queuing:
    each tenant has a virtual clock that runs by the tokens it was given. Who is ahead of the one furthest
    behind by more than `FAIR_WITHIN_TOKENS` waits for it, at once where so much of its own waits beyond what
    the others have: a flood. Were it whatever waits, in overload who asks for a little more than the others
    would be shut out, for more of it waits the longer it is.
    """

    def __init__(self) -> None:
        self.heaps: dict[str, list[tuple[float, int, Request]]] = {}
        self.work: dict[str, float] = {}  # that waits, in tokens

    def behind(self, clocks: dict[str, float], floor: float) -> float:
        """The virtual time of the tenant furthest behind."""
        return min(max(clocks.get(name, floor), floor) for name in self.heaps)

    def first(self, clocks: dict[str, float], floor: float) -> Request:
        behind = self.behind(clocks, floor)
        total, times = sum(self.work.values()), FLOOD_TIMES / max(1, len(self.work) - 1)

        def place(name: str) -> tuple[int, float, int]:
            clock, own = max(clocks.get(name, floor), floor), self.work[name]
            flood = min(max(0.0, own - times * (total - own)), FAIR_WITHIN_TOKENS)
            return int((clock - behind + flood) / FAIR_WITHIN_TOKENS), *self.heaps[name][0][:2]

        return self.heaps[min(self.heaps, key=place)][0][2]


class AdmissionQueue:
    """The requests that wait. `first` names the next one, `take` removes it and charges its tenant."""

    def __init__(self, score: Score = least_work, starving_after_s: float = STARVING_AFTER_S) -> None:
        self._score = score
        self._ageing = Ageing()
        self._now_s = 0.0  # when the next one was asked for last
        self._starving_after_s = starving_after_s
        self._waiting: dict[str, Request] = {}  # in order of arrival
        self._levels: dict[tuple[int, int], _Tenants] = {}
        self._clocks: dict[str, float] = {}
        self._floor = 0.0  # virtual time: the clock of whoever was furthest behind when one was served
        self._sequence = 0
        self._taken = 0
        self.prompt_tokens = 0
        self.response_tokens = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting.values())

    def push(self, request: Request) -> None:
        level = self._levels.setdefault((request.lane, request.priority), _Tenants())
        self._sequence += 1
        score = self._score(request, self._ageing.arrived(request.arrived_s, len(self._waiting)))
        heappush(level.heaps.setdefault(request.tenant, []), (score, self._sequence, request))
        work = request.expected_remaining() + _prompt_work(request)
        level.work[request.tenant] = level.work.get(request.tenant, 0.0) + work
        self._waiting[request.id] = request
        self.prompt_tokens += len(request.tokens)
        self.response_tokens += request.expected_remaining()

    def first(self, now: float) -> Request | None:
        """The request that runs next, or None. One that starves takes turns with its betters of the same lane
        and tenant, and brings a tenant of lower priority into its turn; it does not make a flood go first.
        """
        self._now_s = now
        if not self._waiting:
            return None
        level = self._levels[min(self._levels)]
        request = level.first(self._clocks, self._floor)
        starving = self._starving(request.lane, now) if self._taken % STARVING_EVERY == 0 else {}
        if not starving:
            return request
        below = [tenant for tenant in starving if tenant not in level.heaps]
        tenant = min([*below, request.tenant], key=self._clock)
        return starving.get(tenant, request)

    def waiting_of(self, tenant: str) -> int:
        return sum(len(level.heaps.get(tenant, ())) for level in self._levels.values())

    def _starving(self, lane: int, now: float) -> dict[str, Request]:
        """Of each tenant the oldest that has waited too long, the oldest tenant first."""
        found: dict[str, Request] = {}
        for request in self._waiting.values():
            if now - request.arrived_s <= self._starving_after_s:
                break
            if request.lane == lane:
                found.setdefault(request.tenant, request)
        return found

    def _clock(self, tenant: str) -> float:
        return max(self._clocks.get(tenant, self._floor), self._floor)

    def take(self, request: Request) -> None:
        """Remove a request that starts, and charge its tenant for what it is expected to cost."""
        level = self._levels[request.lane, request.priority]
        start = self._clock(request.tenant)
        self._floor = level.behind(self._clocks, self._floor)
        self._taken += 1
        self.remove(request.id)
        self._ageing.started(self._now_s, len(self._waiting))
        request.charged = request.generated + request.expected_remaining()
        self._clocks[request.tenant] = start + request.expected_remaining() + _prompt_work(request)
        self._clocks = {tenant: clock for tenant, clock in self._clocks.items() if clock > self._floor}

    def settle(self, request: Request) -> None:
        """It has ended: its tenant is charged for what it got, not for what was expected."""
        owed = self._clock(request.tenant) + request.generated - request.charged
        request.charged = request.generated
        if owed > self._floor:
            self._clocks[request.tenant] = owed
        else:
            self._clocks.pop(request.tenant, None)

    def remove(self, request_id: str) -> Request | None:
        """Remove one that was cancelled or given up; None if it does not wait here."""
        request = self._waiting.pop(request_id, None)
        if request is None:
            return None
        self.prompt_tokens -= len(request.tokens)
        self.response_tokens -= request.expected_remaining()
        if not self._waiting:
            self.response_tokens = 0.0  # no drift from rounding
        self._unlist(request)
        return request

    def _unlist(self, request: Request) -> None:
        key = (request.lane, request.priority)
        heaps, work = self._levels[key].heaps, self._levels[key].work
        work[request.tenant] -= request.expected_remaining() + _prompt_work(request)
        heap = heaps[request.tenant]
        if heap[0][2] is request:
            heappop(heap)
        else:
            heap[:] = [entry for entry in heap if entry[2] is not request]
            heapify(heap)
        if not heap:
            del heaps[request.tenant], work[request.tenant]
        if not heaps:
            del self._levels[key]
