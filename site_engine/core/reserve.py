"""Decide whether a request fits beside those that run, by the memory that all of them will need at any time.

A running request takes one more token in each iteration and returns its memory when it ends, so those that
end make room for those that grow; the peak lies at one of the expected ends ("Past-Future Scheduler for LLM
Serving", 2025). A forecast that is too short costs a preemption, which changes no token of an answer.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from math import sqrt
from typing import NamedTuple

import numpy as np

from site_engine.core.page_pool import PagePool
from site_engine.core.request import Request, State

P90_DEVIATIONS = 1.28
"""How many standard deviations the 90% quantile of a normal distribution lies above its mean."""
KEPT_DEVIATIONS = 0.25
"""Room kept for forecasts that are too short, in standard deviations of what all requests together need.

Errors cancel, and a preemption costs less than memory that stays empty: with none kept, throughput is
1 to 5% higher where few requests run at once, and preemptions are up to twice as many.
"""
ENDS_LATE = 2
"""Iterations for which an overlapped step holds the pages of a request that has its last token."""
LOOK_AGAIN = 16
"""Iterations after which forecasts are read again: that of an answer which has not ended is longer."""


class Remaining(NamedTuple):
    """The expected number of remaining tokens of a request, and its 90% quantile."""

    expected: float
    p90: float


class Span(NamedTuple):
    """A request until iteration `ends`; in iteration t it holds `base` + t tokens of memory."""

    ends: float
    base: float
    variance: float = 0.0  # of its length, in squared tokens; 0: known


class FuturePeak:
    """The memory that requests hold together, at every time until the last of them ends."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._spans = sorted(spans)
        self._changed = True

    def add(self, span: Span) -> None:
        insort(self._spans, span)
        self._changed = True

    def remove(self, span: Span) -> None:
        del self._spans[bisect_left(self._spans, span)]
        self._changed = True

    def with_one_more(self, span: Span) -> float:
        """Return the most tokens held at once until `span` ends, and the room to keep for wrong forecasts."""
        if self._changed:
            self._sum_up()
        ended = int(self._ends.searchsorted(span.ends, side="right"))
        peak = self._bases[ended] + (len(self._spans) - ended + 1) * span.ends
        if ended:
            peak = max(peak, self._highest[ended - 1])
        return float(span.base + peak) + KEPT_DEVIATIONS * sqrt(self._variance + span.variance)

    def peak(self) -> float:
        """Return the most tokens held at once."""
        if not self._spans:
            return 0.0
        self._sum_up()
        return float((self._bases[:-1] + np.arange(len(self._ends), 0, -1) * self._ends).max())

    def _sum_up(self) -> None:
        """Sum up the requests that are left at each end, and after the last."""
        ends, bases, variances = zip(*self._spans, strict=True) if self._spans else ((), (), ())
        self._ends = np.array(ends, float)
        self._bases = np.append(np.array(bases, float)[::-1].cumsum()[::-1], 0.0)
        with_one_more = np.arange(len(ends) + 1, 1, -1)
        self._highest = np.maximum.accumulate(self._bases[:-1] + with_one_more * self._ends)
        self._variance = sum(variances)
        self._changed = False


class Reservation:
    """The future of the running requests, kept as they start and leave.

    Of requests that share pages, the one that is expected to end last is their keeper: its end frees them. If
    it ends before another, they count as held until all have ended.
    """

    def __init__(
        self, pool: PagePool, remaining: Callable[[Request], Remaining], chunk: Callable[[], int]
    ) -> None:
        """Create a book without requests; `chunk` returns the prompt tokens that an iteration computes."""
        self.iteration = 0
        self._pool, self._remaining, self._chunk = pool, remaining, chunk
        self._spans: dict[Request, Span] = {}
        self._future = FuturePeak()
        self._keepers: dict[int, Request] = {}  # by page
        self._shared: dict[Request, int] = {}  # pages of a request whose keeper is another
        self._read_at = 0
        self._refused: set[Request] = set()  # the answer stays no until a request leaves

    def fits(self, request: Request) -> bool:
        """Return whether memory suffices at every time if a request starts now. A lone one always does."""
        if not self._spans:
            return True
        if self.refused(request):
            return False
        if self.iteration - self._read_at >= LOOK_AGAIN:
            self._read_forecasts()
        span = self._span(request, 0)
        keepers = [self._keepers.get(page) for page in request.pages]
        shared = sum(each is not None and self._spans[each].ends >= span.ends for each in keepers)
        room = self._pool.available + self._own_pages() + keepers.count(None)
        held = self._future.with_one_more(span) - shared * self._pool.page_size
        if held <= room * self._pool.page_size:
            return True
        self._refused.add(request)
        return False

    def refused(self, request: Request) -> bool:
        """Return whether a request was just found not to fit, and nothing has changed since."""
        return request in self._refused and self.iteration - self._read_at < LOOK_AGAIN

    def start(self, request: Request) -> None:
        """Enter a request that starts; the pages that it has are from the prefix cache."""
        self._spans[request] = self._span(request, 0)
        self._shared[request] = 0
        self._future.add(self._spans[request])
        self.shares(request, 0)

    def shares(self, request: Request, first: int) -> None:
        """Enter pages of the prefix cache, from number `first` of a request on."""
        ends = self._spans[request].ends
        lent: dict[Request, int] = {}  # pages of which another is the keeper, by those that had or have them
        for page in request.pages[first:]:
            keeper = self._keepers.get(page)
            kept = keeper is not None and self._spans[keeper].ends >= ends
            if not kept:
                self._keepers[page] = request
            if keeper is not None:
                other = request if kept else keeper
                lent[other] = lent.get(other, 0) + 1
        for other, pages in lent.items():
            span = self._spans[other]
            self._future.remove(span)
            self._shared[other] += pages
            self._spans[other] = span._replace(base=span.base - pages * self._pool.page_size)
            self._future.add(self._spans[other])

    def computes(self, request: Request, first: int, after: int) -> None:
        """Enter pages [first, after) of a request, which others can share from now on."""
        for page in request.pages[first:after]:
            self._keepers.setdefault(page, request)

    def leave(self, request: Request) -> None:
        """Forget a request that is about to drop its pages."""
        self._future.remove(self._spans.pop(request))
        del self._shared[request]
        for page in request.pages:
            if self._keepers.get(page) is request:
                del self._keepers[page]
        self._refused.clear()

    def reserved_tokens(self) -> int:
        """Return the tokens that running requests will hold at once beyond those that they hold now."""
        if not self._spans:
            return 0
        self._read_forecasts()
        return max(0, round(self._future.peak()) - self._own_pages() * self._pool.page_size)

    def _own_pages(self) -> int:
        return sum([len(each.pages) for each in self._spans]) - sum(self._shared.values())

    def _read_forecasts(self) -> None:
        self._spans = {each: self._span(each, self._shared[each]) for each in self._spans}
        self._future = FuturePeak(self._spans.values())
        self._read_at = self.iteration
        self._refused.clear()

    def _span(self, request: Request, shared: int) -> Span:
        expected, p90 = self._remaining(request)
        length, size = len(request.tokens), self._pool.page_size
        missing = 0 if request.state is State.DECODE else length - request.computed
        ends = self.iteration + expected + ENDS_LATE + missing / max(1, self._chunk())
        held = length + size - 1 - shared * size  # of whole pages, one may be nearly empty
        return Span(ends, held - self.iteration, (max(0.0, p90 - expected) / P90_DEVIATIONS) ** 2)
