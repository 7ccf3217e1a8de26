"""Order the waiting requests: by lane, by priority, fairly between tenants, then by expected work.

Chats run in order of least weighted work, with ageing. Batch lines run in order of arrival, since the gateway
has ordered them; prefill-heavy lines go last. The scheduler, not the queue, decides whether a request fits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import exp, inf, log
from typing import TypeAlias

from site_engine.core.remaining_curve import likely_lengths
from site_engine.core.request import Lane, Request
from site_engine.core.reserve import Remaining

Score = Callable[[Request, float], float]
"""(request, reading of the ageing clock at its arrival) -> score; the lowest score goes first."""

PROMPT_TOKEN_WORK = 0.02
"""Cost of a prompt token relative to a response token."""
AGEING_SHARE = 0.5
"""Waiting this share of the queue's recent passage time outweighs a factor of e in work times length.

With a fixed time, a short queue would be ordered by length alone and a long one first come, first served.
"""
MIN_AGEING_S = 2.0
PASSAGE_FADE_S = 60.0
GAP_SHARE = 0.05
"""Weight of the newest value in the running mean of the time between two starts."""
STARVING_AFTER_S = 60.0
STARVING_EVERY = 4
"""One start in this many goes to the oldest starving request of the tenant whose turn it is, if any.

If every start did, an overload in which nearly all requests starve would be served first come, first served.
"""
TENANT_PARTS = 4
FAIR_WITHIN_TOKENS = 32_768
"""Tenants whose service differs by less count as equally served: the shortest of their requests goes first.

Alternating tenants at every request makes p99 latency per token up to twice as long
(docs/decisions/site-order.md).
"""
FLOOD_TIMES = 4.0
"""A tenant's waiting work beyond this multiple of the other tenants' average counts as a flood."""


class Ageing:
    """A clock that runs slower the longer requests take to pass through the queue.

    All waiting requests age at the same rate, so their order never changes and each score is computed once,
    at arrival.
    """

    def __init__(self) -> None:
        self._aged = 0.0
        self._read_s = 0.0
        self._gap_s = 0.0  # between two starts while others wait
        self._started_s = 0.0
        self._passage_s = 0.0  # recent maximum of a new request's wait if served first come, first served

    def arrived(self, now_s: float, waiting: int, waited_s: float = 0.0) -> float:
        """Return the clock's reading at the arrival of a request while `waiting` others wait.

        `waited_s` is the time that a moved request has waited at another engine; it counts at the current
        ageing rate.
        """
        if not waiting:
            self._started_s = now_s
        self._advance(now_s, waiting)
        return self._aged - waited_s / self._period_s

    def started(self, now_s: float, waiting: int) -> None:
        self._gap_s += GAP_SHARE * (max(0.0, now_s - self._started_s) - self._gap_s)
        self._started_s = now_s
        self._advance(now_s, waiting)

    @property
    def _period_s(self) -> float:
        return max(MIN_AGEING_S, AGEING_SHARE * self._passage_s)

    def _advance(self, now_s: float, waiting: int) -> None:
        passed_s = max(0.0, now_s - self._read_s)
        self._aged += passed_s / self._period_s
        self._passage_s = max(waiting * self._gap_s, self._passage_s * exp(-passed_s / PASSAGE_FADE_S))
        self._read_s = max(now_s, self._read_s)


def least_work(request: Request, aged: float) -> float:
    """Score for the least mean latency per token.

    A chat's weight is one over the length of its response; by Smith's rule (1956) the least work over weight
    goes first. The score is the logarithm of that ratio plus the ageing clock at arrival. Batch lines keep
    their order of arrival, prefill-heavy ones last: the gateway, which knows all lines of a batch, has
    ordered them. A resumed answer goes before all others, since its client waits in the middle of a stream.
    """
    if request.resumed:
        return -inf
    if request.lane is Lane.BATCH:
        return float(request.prefill_heavy)
    length = request.typical_length()
    work = min(length, request.expected_remaining()) + _prompt_work(request)
    return log(work * length) + aged


def _prompt_work(request: Request) -> float:
    return PROMPT_TOKEN_WORK * len(request.tokens)


def first_come(request: Request, _aged: float) -> float:
    return request.arrived_s


def shortest_prompt(request: Request, _aged: float) -> float:
    """Score by prompt length, as the engine of the MICO paper does (section 3.4): shorter prompts need less
    padding in the running batch.
    """
    return float(request.prompt_len)


def forecast(request: Request) -> list[float]:
    """Return the likely numbers of remaining tokens, from the likely lengths that are not reached yet."""
    generated, limit, likely = request.generated, request.max_tokens, likely_lengths(request.remaining)
    if request.length_factor != 1.0:
        likely = tuple([each * request.length_factor for each in likely])
    still = likely[bisect_right(likely, generated) :]
    left = [(each if each < limit else limit) - generated for each in still]
    return left or [request.expected_remaining()]


def whole_limit(request: Request) -> list[float]:
    """Return the tokens left up to the request's limit: the worst case."""
    return [max(1, request.max_tokens - request.generated)]


@dataclass(frozen=True, slots=True)
class Policy:
    """The order of the queue, the forecast of remaining tokens, and whether batching is static."""

    score: Score = least_work
    remaining: Remaining = forecast
    static: bool = False  # start the next batch only when the whole previous batch has ended


DEFAULT_POLICY = Policy()
POLICIES = {
    "forecast": DEFAULT_POLICY,
    "fcfs": Policy(score=first_come),
    "shortest_prompt": Policy(score=shortest_prompt),
    "worst_case": Policy(score=first_come, remaining=whole_limit),
    "static": Policy(score=first_come, remaining=whole_limit, static=True),
}


def has_place(of_tenant: int, waiting: int, max_waiting: int) -> bool:
    """Return whether one more request of a tenant may wait.

    A tenant may hold `TENANT_PARTS` times the free places, so that no single tenant fills the queue
    (Choudhury and Hahne, Dynamic queue length thresholds, 1998).
    """
    return waiting < max_waiting and of_tenant <= TENANT_PARTS * (max_waiting - waiting)


Entry: TypeAlias = tuple[float, int, Request]
"""(score, sequence number, request) of a waiting request: the lowest goes first."""


class _Tenants:
    """The waiting requests of one lane and priority, shared between tenants by start-time fair queuing.

    Each tenant has a virtual clock that advances by the tokens it was served. A tenant that is more than
    `FAIR_WITHIN_TOKENS` ahead of the tenant furthest behind yields to it. Only waiting work beyond
    FLOOD_TIMES the others' average counts as being ahead. If all waiting work counted, a tenant that requests
    slightly more than the others under overload would be shut out as its backlog grows.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, list[Entry]] = {}  # by tenant, sorted: found by bisection
        self.work: dict[str, float] = {}  # waiting work by tenant, in tokens

    def behind(self, clocks: dict[str, float], floor: float) -> float:
        """Return the virtual time of the tenant furthest behind."""
        return min(max(clocks.get(name, floor), floor) for name in self.waiting)

    def first(self, clocks: dict[str, float], floor: float) -> Request:
        behind = self.behind(clocks, floor)
        total, times = sum(self.work.values()), FLOOD_TIMES / max(1, len(self.work) - 1)

        def place(name: str) -> tuple[int, float, int]:
            clock, own = max(clocks.get(name, floor), floor), self.work[name]
            flood = min(max(0.0, own - times * (total - own)), FAIR_WITHIN_TOKENS)
            return int((clock - behind + flood) / FAIR_WITHIN_TOKENS), *self.waiting[name][0][:2]

        return self.waiting[min(self.waiting, key=place)][0][2]


class AdmissionQueue:
    """The waiting requests. `first` returns the next one; `take` removes it and charges its tenant."""

    def __init__(self, score: Score = least_work, starving_after_s: float = STARVING_AFTER_S) -> None:
        self._score = score
        self._ageing = Ageing()
        self._now_s = 0.0  # when `first` was last called
        self._starving_after_s = starving_after_s
        self._waiting: dict[str, Entry] = {}  # in order of arrival where `_in_order`
        self._in_order = True  # until a moved request with an earlier arrival is pushed
        self._levels: dict[tuple[int, int], _Tenants] = {}
        self._clocks: dict[str, float] = {}
        self._floor = 0.0  # virtual time of the tenant furthest behind at the last start
        self._sequence = 0
        self._taken = 0
        self._overtaking: tuple[Request | None, list[Request]] = (None, [])  # until the next change
        self.prompt_tokens = 0
        self.response_tokens = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests in order of arrival."""
        if not self._in_order:
            self._waiting = dict(sorted(self._waiting.items(), key=lambda each: each[1][2].arrived_s))
            self._in_order = True
        return (request for _, _, request in self._waiting.values())

    def has_lane(self, lane: Lane) -> bool:
        return any(each == lane for each, _ in self._levels)

    def push(self, request: Request, now_s: float | None = None) -> None:
        """Add a request. `now_s` is the current time if the request arrived earlier, at another engine."""
        now_s = request.arrived_s if now_s is None else now_s
        level = self._levels.setdefault((request.lane, request.priority), _Tenants())
        self._sequence += 1
        self._overtaking = (None, [])
        aged = self._ageing.arrived(now_s, len(self._waiting), now_s - request.arrived_s)
        newest = next(reversed(self._waiting.values()), None)
        entry = self._waiting[request.id] = self._score(request, aged), self._sequence, request
        if newest is not None and request.arrived_s < newest[2].arrived_s:
            self._in_order = False
        insort(level.waiting.setdefault(request.tenant, []), entry)
        work = request.expected_remaining() + _prompt_work(request)
        level.work[request.tenant] = level.work.get(request.tenant, 0.0) + work
        self.prompt_tokens += len(request.tokens)
        self.response_tokens += request.expected_remaining()

    def first(self, now: float) -> Request | None:
        """Return the request to start next, or None if none waits.

        At one start in STARVING_EVERY, starving requests are considered too: they may precede requests of
        their lane and tenant with better scores, and compete from lower priorities. Turns between tenants
        still hold, so that a starving flood does not go first.
        """
        self._now_s = now
        if not self._waiting:
            return None
        level = self._levels[min(self._levels)]
        request = level.first(self._clocks, self._floor)
        starving = self._starving(request.lane, now) if self._taken % STARVING_EVERY == 0 else {}
        if not starving:
            return request
        below = [tenant for tenant in starving if tenant not in level.waiting]
        tenant = min([*below, request.tenant], key=self._clock)
        return starving.get(tenant, request)

    def first_of(self, wanted: Callable[[Request], bool]) -> Request | None:
        """Return the next request for which `wanted` is true, or None."""
        for key in sorted(self._levels):
            best = {
                tenant: found
                for tenant, entries in self._levels[key].waiting.items()
                if (found := next((one for _, _, one in entries if wanted(one)), None)) is not None
            }
            if best:
                return best[min(best, key=self._clock)]
        return None

    def overtaking(self, request: Request) -> list[Request]:
        """Return the waiting `any_order` lines that may overtake a request, prefill-heavy ones last.

        Resumed lines are left out, since they come first in the queue anyway.
        """
        if self._overtaking[0] is not request:
            level = self._levels.get((request.lane, request.priority))
            waiting = level.waiting.get(request.tenant, ()) if level and request.any_order else ()
            lines = [each for _, _, each in waiting if each.any_order and not each.resumed]
            found = [each for each in lines if each is not request]
            self._overtaking = request, found
        return self._overtaking[1]

    def waiting_of(self, tenant: str) -> int:
        return sum(len(level.waiting.get(tenant, ())) for level in self._levels.values())

    def _starving(self, lane: int, now: float) -> dict[str, Request]:
        """Return the oldest starving request of each tenant in a lane, oldest first."""
        found: dict[str, Request] = {}
        left = {each for key, level in self._levels.items() if key[0] == lane for each in level.waiting}
        for request in self:
            if not left or now - request.arrived_s <= self._starving_after_s:
                break
            if request.lane == lane and request.tenant in left:
                found[request.tenant] = request
                left.remove(request.tenant)
        return found

    def _clock(self, tenant: str) -> float:
        return max(self._clocks.get(tenant, self._floor), self._floor)

    def take(self, request: Request) -> None:
        """Remove a request that starts, and charge its tenant the expected work in tokens."""
        level = self._levels[request.lane, request.priority]
        self._floor = level.behind(self._clocks, self._floor)
        self._taken += 1
        self.remove(request.id)
        self._ageing.started(self._now_s, len(self._waiting))
        self.charge(request, _prompt_work(request))
        self._clocks = {tenant: clock for tenant, clock in self._clocks.items() if clock > self._floor}

    def charge(self, request: Request, prompt_work: float = 0.0) -> None:
        """Charge the tenant for the tokens that a request is expected to generate, until `settle`."""
        request.charged = request.generated + request.expected_remaining()
        start = self._clock(request.tenant)
        self._clocks[request.tenant] = start + request.expected_remaining() + prompt_work

    def settle(self, request: Request) -> None:
        """Correct the charge of an ended request from the expected to the generated tokens."""
        owed = self._clock(request.tenant) + request.generated - request.charged
        request.charged = request.generated
        if owed > self._floor:
            self._clocks[request.tenant] = owed
        else:
            self._clocks.pop(request.tenant, None)

    def remove(self, request_id: str) -> Request | None:
        """Remove and return a waiting request; return None if it is not in the queue."""
        entry = self._waiting.pop(request_id, None)
        if entry is None:
            return None
        request = entry[2]
        self._overtaking = (None, [])
        self.prompt_tokens -= len(request.tokens)
        self.response_tokens -= request.expected_remaining()
        if not self._waiting:
            self.response_tokens = 0.0  # no drift from rounding
        key = (request.lane, request.priority)
        tenants, work = self._levels[key].waiting, self._levels[key].work
        work[request.tenant] -= request.expected_remaining() + _prompt_work(request)
        entries = tenants[request.tenant]
        del entries[bisect_left(entries, entry)]
        if not entries:
            del tenants[request.tenant], work[request.tenant]
        if not tenants:
            del self._levels[key]
        return request
