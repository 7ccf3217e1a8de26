"""Decide whether a request fits in KV memory with the running ones, now and at every later iteration.

A running request grows by one token per iteration and frees its memory when it ends, so requests that end
make room for those that grow ("Past-Future Scheduler for LLM Serving", 2025). Lengths are uncertain: a
request holds an equal share of its memory until each of its likely lengths. With mean lengths alone, all
requests with similar forecasts would peak at the same time, and half the memory would stay empty. Admitting
too many costs preemptions, which change no token of an answer.

A chat is checked against other chats only: it starts as soon as its prompt has memory. If it needs more
later, batch lines are preempted, of which most have ended by then. Batch lines are checked against the peak
that the chats will hold; memory that chats will free is not counted, since other chats arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import Any, NamedTuple

import numpy as np

from site_engine.core.learned_lengths import LengthFactors
from site_engine.core.page_pool import PagePool
from site_engine.core.remaining_curve import LIKELY_LENGTHS
from site_engine.core.request import Lane, Request, State

KEPT_DEVIATIONS = 0.5
"""Memory reserved for forecasts that are too short, in standard deviations of the total need.

Preemptions cost less than unused memory: with twice this value, a quarter as many requests are preempted, and
a batch takes up to 5% longer.
"""
ENDS_LATE = 2
"""Iterations for which overlapped steps hold the pages of a request after its last token."""
REFRESH_EVERY = 16
"""Iterations between updates of the forecasts: a forecast length grows while its answer does not end."""

Remaining = Callable[[Request], Sequence[float]]
"""request -> equally likely numbers of remaining tokens, ascending."""


class Span(NamedTuple):
    """A request that ends after one of the iterations `ends`, which are ascending and equally likely. Until
    then it holds `base` + t tokens of memory in iteration t.
    """

    ends: tuple[float, ...]
    base: float

    @property
    def expected_end(self) -> float:
        return sum(self.ends) / len(self.ends)

    @property
    def variance(self) -> float:
        mean = self.expected_end
        return sum([(end - mean) ** 2 for end in self.ends]) / len(self.ends)


class FuturePeak:
    """The memory that requests are expected to hold together, at every time until the last of them ends."""

    def __init__(self) -> None:
        self._at: dict[object, int] = {}  # owners' places in the tables
        self._free: list[int] = []
        self._ends = np.zeros((0, LIKELY_LENGTHS))
        self._shares = np.zeros((0, LIKELY_LENGTHS))  # probability of each of a request's ends
        self._bases = np.zeros((0, LIKELY_LENGTHS))  # the base times these shares
        self._last = np.zeros((0, 2))  # tokens at the request's last end, and the variance of its length
        self._order = np.arange(0)  # argsort of all ends at the last `_sum_up`
        self._changed = True

    def put(self, spans: Mapping[Any, Span]) -> None:
        """Add or update the spans of requests."""
        for owner in spans:
            if owner not in self._at:
                if not self._free:
                    self._grow()
                self._at[owner] = self._free.pop()
        at = [self._at[owner] for owner in spans]
        padded = [(each.ends + each.ends[-1:] * LIKELY_LENGTHS)[:LIKELY_LENGTHS] for each in spans.values()]
        ends, bases = np.array(padded), np.array([each.base for each in spans.values()])
        likely = np.array([len(each.ends) for each in spans.values()])
        shares = (np.arange(LIKELY_LENGTHS) < likely[:, None]) / likely[:, None]
        means = (ends * shares).sum(1)
        self._ends[at], self._shares[at], self._bases[at] = ends, shares, bases[:, None] * shares
        self._last[at, 0] = bases + ends[:, -1]
        self._last[at, 1] = ((ends - means[:, None]) ** 2 * shares).sum(1)
        self._changed = True

    def remove(self, owner: object) -> None:
        at = self._at.pop(owner)
        self._shares[at] = self._bases[at] = 0.0
        self._last[at] = 0.0
        self._free.append(at)
        self._changed = True

    def _grow(self) -> None:
        before = len(self._ends)
        self._free = list(range(before, 2 * before + 8))
        more = ((0, len(self._free)), (0, 0))
        self._ends, self._shares = np.pad(self._ends, more), np.pad(self._shares, more)
        self._bases, self._last = np.pad(self._bases, more), np.pad(self._last, more)
        self._order = np.arange(self._ends.size)

    def with_one_more(self, span: Span) -> float:
        """Return the peak of expected tokens, with `span` added, until the last of its ends, plus the reserve
        of KEPT_DEVIATIONS standard deviations.
        """
        self._sum_up()
        ends = np.array(span.ends)
        running = np.arange(len(ends), 0, -1) / len(ends)  # share of `span` still held up to each of its ends
        ended = self._times.searchsorted(ends, side="right")
        at_its = self._base_left[ended] + self._left[ended] * ends + running * (span.base + ends)
        times = self._times[: ended[-1]]
        beside = running.repeat(ended - np.append(0, ended[:-1]))
        at_others = self._held[: len(times)] + beside * (span.base + times)
        most = float(max(at_its.max(), at_others.max(initial=0.0)))
        return most + KEPT_DEVIATIONS * sqrt(self._last[:, 1].sum() + span.variance)

    def all_at_last(self, span: Span) -> float:
        """Return the tokens held if all were at their last ends at once: a cheap upper bound of the peak."""
        return float(self._last[:, 0].sum()) + span.base + span.ends[-1]

    def peak(self) -> float:
        """Return the peak of the expected tokens held at once."""
        self._sum_up()
        return float(self._held.max(initial=0.0))

    def _sum_up(self) -> None:
        """Sum the shares and bases that are still held at each end, and after the last end."""
        if not self._changed:
            return
        self._order = self._order[self._ends.ravel()[self._order].argsort(kind="stable")]  # nearly in order
        self._times = self._ends.ravel()[self._order]
        last_first = self._order[::-1].copy()
        self._left, self._base_left = (
            np.append(shares.take(last_first).cumsum()[::-1], 0.0) for shares in (self._shares, self._bases)
        )
        self._held = self._base_left[:-1] + self._left[:-1] * self._times
        self._changed = False


class Reservation:
    """The expected memory of the running requests, updated as they start and leave.

    Each shared page is counted for one request only, its keeper: the sharer that is expected to end last and
    so to free the page. If the keeper ends before another, its pages count as held until all have ended.
    """

    def __init__(self, pool: PagePool, remaining: Remaining, chunk: Callable[[], int]) -> None:
        """`remaining` returns a request's likely remaining tokens, `chunk` an iteration's prompt tokens."""
        self.iteration = 0
        self.factors = LengthFactors()
        self._pool, self._remaining, self._chunk = pool, remaining, chunk
        self._spans: dict[Request, Span] = {}
        self._futures = {lane: FuturePeak() for lane in Lane}
        self._keepers: dict[int, Request] = {}  # by page
        self._shared: dict[Request, int] = {}  # pages of a request whose keeper is another
        self._at_limit: dict[Request, int] = {}  # pages of a request that reaches its token limit
        self._all_at_limit = 0
        self._read_at = 0
        self._refused: set[Request] = set()  # do not fit until a request leaves or forecasts are updated

    def fits(self, request: Request) -> bool:
        """Return whether memory suffices now and later if a request starts; True if none runs."""
        if not self._spans:
            return True
        if self.refused(request):
            return False
        if not self.has_room(request):
            self._refused.add(request)
            return False
        return request.lane is Lane.BATCH or self.has_pages(request)

    def has_pages(self, request: Request) -> bool:
        """Return whether free pages hold all current tokens of a request and of the running requests."""
        if self._fits_at_limit(request):
            return True
        missing = sum(map(self._missing_pages, self._spans))
        return self._missing_pages(request) + missing <= self._pool.available

    def _fits_at_limit(self, request: Request) -> bool:
        """Return whether memory suffices even if all requests reach their token limits."""
        return self._all_at_limit + self._pages_at_limit(request) <= self._pool.capacity

    def _pages_at_limit(self, request: Request) -> int:
        return self._pool.pages_for(request.prompt_len + request.max_tokens + ENDS_LATE)

    def _missing_pages(self, request: Request) -> int:
        known = max(len(request.tokens), request.computed + 1)
        return max(0, -(-known // self._pool.page_size) - len(request.pages))

    def has_room(self, request: Request) -> bool:
        """Return whether memory suffices at all times for a request and the running requests that count for
        its lane (see the module's docstring).
        """
        if self._fits_at_limit(request) or all(each.lane > request.lane for each in self._spans):
            return True
        self._refresh_forecasts()
        span, future, page_size = self._span(request, 0), self._futures[request.lane], self._pool.page_size
        room = self._pool.available + self._own_pages()
        chats = self._futures[Lane.CHAT].peak() if request.lane is Lane.BATCH else 0.0
        if chats + future.all_at_last(span) <= room * page_size:
            return True
        keepers, ends = [self._keepers.get(page) for page in request.pages], span.expected_end
        shared = sum(each is not None and self._spans[each].expected_end >= ends for each in keepers)
        held = chats + future.with_one_more(span) - shared * page_size
        return held <= (room + keepers.count(None)) * page_size

    def refused(self, request: Request) -> bool:
        """Return whether a recent check found that a request does not fit, and nothing has changed since."""
        return request in self._refused and self.iteration - self._read_at < REFRESH_EVERY

    def start(self, request: Request) -> None:
        """Add a request that starts. The pages that it holds already are from the prefix cache."""
        self._spans[request] = self._span(request, 0)
        self._shared[request] = 0
        self._at_limit[request] = self._pages_at_limit(request)
        self._all_at_limit += self._at_limit[request]
        self._futures[request.lane].put({request: self._spans[request]})
        self.shares(request, 0)

    def shares(self, request: Request, first: int) -> None:
        """Add a request's pages from index `first` on, taken from the prefix cache. Each page counts only for
        its keeper: this request, unless another keeper is expected to end no earlier.
        """
        ends = self._spans[request].expected_end
        lent: dict[Request, int] = {}  # pages no longer counted for a request, since another is their keeper
        for page in request.pages[first:]:
            keeper = self._keepers.get(page)
            kept = keeper is not None and self._spans[keeper].expected_end >= ends
            if not kept:
                self._keepers[page] = request
            if keeper is not None:
                other = request if kept else keeper
                lent[other] = lent.get(other, 0) + 1
        for other, pages in lent.items():
            span = self._spans[other]
            self._shared[other] += pages
            self._spans[other] = span._replace(base=span.base - pages * self._pool.page_size)
            self._futures[other.lane].put({other: self._spans[other]})

    def computes(self, request: Request, first: int, after: int) -> None:
        """Make a request the keeper of its pages [first, after), which others can share from now on."""
        for page in request.pages[first:after]:
            self._keepers.setdefault(page, request)

    def leave(self, request: Request) -> None:
        """Remove a request that is about to free its pages."""
        self._futures[request.lane].remove(request)
        del self._spans[request], self._shared[request]
        self._all_at_limit -= self._at_limit.pop(request)
        for page in request.pages:
            if self._keepers.get(page) is request:
                del self._keepers[page]
        self._refused.clear()

    def reserved_tokens(self) -> int:
        """Return the tokens that running requests will hold at their peak beyond those that they hold now."""
        if not self._spans:
            return 0
        self._refresh_forecasts()
        peaks = sum(future.peak() for future in self._futures.values())
        return max(0, round(peaks) - self._own_pages() * self._pool.page_size)

    def _own_pages(self) -> int:
        return sum([len(each.pages) for each in self._spans]) - sum(self._shared.values())

    def _refresh_forecasts(self) -> None:
        """Update all forecasts, at most once per REFRESH_EVERY iterations."""
        if self.iteration - self._read_at < REFRESH_EVERY:
            return
        self.factors.update(self._spans)
        self._spans = {each: self._span(each, self._shared[each]) for each in self._spans}
        for lane, future in self._futures.items():
            if spans := {each: span for each, span in self._spans.items() if each.lane is lane}:
                future.put(spans)
        self._read_at = self.iteration
        self._refused.clear()

    def _span(self, request: Request, shared: int) -> Span:
        request.length_factor = self.factors.factor(request)
        length, size = len(request.tokens), self._pool.page_size
        missing = 0 if request.state is State.DECODE else length - request.computed
        begins = self.iteration + ENDS_LATE + missing / max(1, self._chunk())
        held = length + size - 1 - shared * size  # whole pages are held: the last may be nearly empty
        return Span(tuple([begins + left for left in self._remaining(request)]), held - self.iteration)
