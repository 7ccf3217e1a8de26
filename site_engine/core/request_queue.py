"""Order the waiting requests: by lane, by priority, fairly between tenants, then by expected work.

Chats run the least weighted work first, with ageing; lines of batches run as they come, since the gateway has
put them in order; those of any order that take memory before those that take computing. Does not decide
whether a request fits; the scheduler does.
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
"""Cost of a prompt token in units of a response token, which shares its iteration with other rows."""
AGEING_SHARE = 0.5
"""Waiting this share of the queue's recent passage time outweighs a factor of e in work times length.

With a fixed time, a short queue is ordered by length alone and a long one is first come, first served.
"""
MIN_AGEING_S = 2.0
PASSAGE_FADE_S = 60.0
GAP_SHARE = 0.05
"""Weight of the newest value in the running mean of the time between two starts."""
STARVING_AFTER_S = 60.0
STARVING_EVERY = 4
"""One start in this many goes to the request that has waited longest, once it is starving.

If every start did, an overload in which nearly all requests starve would be first come, first served.
"""
TENANT_PARTS = 4
FAIR_WITHIN_TOKENS = 32_768
"""Tenants whose service differs by less count as served equally, so that their shortest request goes first.

With turns at every request, p99 latency per token is up to twice as long (docs/decisions/site-order.md).
"""
FLOOD_TIMES = 4.0
"""A tenant's waiting work beyond this multiple of the other tenants' average counts as a flood."""


class Ageing:
    """A clock that runs slower the longer the queue takes to pass.

    Every waiting request ages equally by it, so no two swap places and a score is computed once, at arrival.
    """

    def __init__(self) -> None:
        self._aged = 0.0
        self._read_s = 0.0
        self._gap_s = 0.0  # between two starts while others wait
        self._started_s = 0.0
        self._passage_s = 0.0  # the longest recent wait of a new request under first come, first served

    def arrived(self, now_s: float, waiting: int, waited_s: float = 0.0) -> float:
        """Return the clock's reading for a request that comes while `waiting` others wait.

        One that another engine gives up has waited there: that counts at today's pace.
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
    """Score for the least latency per token.

    A chat weighs one over the length of its response; by Smith's rule (1956) the least work over weight
    goes first. Waiting adds to the logarithm of the score, that is, by factors. Lines of batches go as they
    come: the gateway, which knows all lines of a batch, has put them in order. An answer that another site
    began goes before all others: its client waits in the middle of a stream.
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
    """Score as MICO's own engine does (section 3.4): the shortest prompt pads the running batch least."""
    return float(request.prompt_len)


def forecast(request: Request) -> list[float]:
    """Return the likely numbers of remaining tokens: of the likely lengths those that are not reached yet."""
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
    """The order of the queue, the length expected of a response, and whether batches start together."""

    score: Score = least_work
    remaining: Remaining = forecast
    static: bool = False  # a batch starts when the whole batch before it has ended


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
"""The score of a request that waits, and its number: the lowest goes first."""


class _Tenants:
    """The waiting requests of one lane and priority, shared between tenants by start-time fair queuing.

    Each tenant has a virtual clock that advances by the tokens it was given. A tenant that is ahead of the
    one furthest behind by more than `FAIR_WITHIN_TOKENS` waits for it. A flood of waiting work counts as
    being ahead; all waiting work would not do, since under overload a tenant that asks for a little more than
    the others would be shut out, ever more of its work waiting.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, list[Entry]] = {}  # in order: any is found at once
        self.work: dict[str, float] = {}  # waiting, in tokens

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
        self._in_order = True  # until a request comes that another engine has given up
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
        """Add a request, which comes as it arrives, or at `now_s` if another engine has given it up."""
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
        """Return the request that runs next, or None.

        A starving request takes turns with better ones of its lane and tenant, and gives its tenant a turn
        also at a lower priority; it does not let a flood go first.
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
        """Return the next request of those that are wanted, or None."""
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
        """Return the waiting lines of any order that may overtake one, prefill-heavy ones last.

        Those that go on from another site are not among them: they are next in any case.
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
        """Return the oldest starving request of each tenant, oldest first."""
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
        """Remove a request that starts and charge its tenant the expected cost."""
        level = self._levels[request.lane, request.priority]
        self._floor = level.behind(self._clocks, self._floor)
        self._taken += 1
        self.remove(request.id)
        self._ageing.started(self._now_s, len(self._waiting))
        self.charge(request, _prompt_work(request))
        self._clocks = {tenant: clock for tenant, clock in self._clocks.items() if clock > self._floor}

    def charge(self, request: Request, prompt_work: float = 0.0) -> None:
        """Charge the tenant the tokens that a request is expected to take, until it is settled."""
        request.charged = request.generated + request.expected_remaining()
        start = self._clock(request.tenant)
        self._clocks[request.tenant] = start + request.expected_remaining() + prompt_work

    def settle(self, request: Request) -> None:
        """Charge the tenant of an ended request for its real tokens instead of the expected ones."""
        owed = self._clock(request.tenant) + request.generated - request.charged
        request.charged = request.generated
        if owed > self._floor:
            self._clocks[request.tenant] = owed
        else:
            self._clocks.pop(request.tenant, None)

    def remove(self, request_id: str) -> Request | None:
        """Remove and return a request that was cancelled or given up; return None if it does not wait."""
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
