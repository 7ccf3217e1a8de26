"""Forecast without a model: a histogram of the lengths that each served model has answered with lately.

Answers that a limit cut short count as longer than that, by the estimator of Kaplan and Meier; without them
those that end sooner would look typical. Bounded: the least recently used models are forgotten, and older
outcomes of each fade.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple, Protocol

from predictor.forecast import Forecast

MAX_MODELS = 1_024
FADE_AT_OUTCOMES = 2_000.0
"""Counts are halved here, so that the histogram follows what a model does now."""
PRIOR_OUTCOMES = 8.0
EDGES = (0, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192, 16384)
PRIOR = (2, 2, 4, 8, 14, 11, 9, 13, 9, 11, 8, 10, 6, 6, 3, 3, 1, 1, 0.5, 0.25)
"""Counts per range for typical chat models; a model's own outcomes soon outweigh them."""


class Query(Protocol):
    """The part of a query that a histogram reads."""

    @property
    def model(self) -> str: ...

    @property
    def parent(self) -> str: ...


class _Lengths(NamedTuple):
    """The answers of one model by range of length: those that ended in it, and those that could have.

    An answer that was cut short in a range counts there by the part of the range that it had passed.
    """

    ended: list[float]
    reached: list[float]

    def observe(self, tokens: int, *, ended: bool) -> None:
        place = min(len(PRIOR) - 1, max(0, bisect_left(EDGES, tokens) - 1))
        for before in range(place):
            self.reached[before] += 1.0
        if ended:
            self.ended[place] += 1.0
            self.reached[place] += 1.0
        else:
            width = EDGES[place + 1] - EDGES[place]
            self.reached[place] += min(1.0, max(0.0, (tokens - EDGES[place]) / width))
        if self.reached[0] >= FADE_AT_OUTCOMES:
            for counts in self:
                counts[:] = [count / 2.0 for count in counts]

    def outweigh(self, shares: Sequence[float]) -> list[float]:
        """Return the shares of the ranges, where `shares` were expected and count as PRIOR_OUTCOMES."""
        updated, left, expected_left = list[float](), 1.0, PRIOR_OUTCOMES
        for share, ended, reached in zip(shares, *self, strict=True):
            expected = PRIOR_OUTCOMES * share
            ends = left * min(1.0, (ended + expected) / (reached + max(expected_left, expected)))
            updated.append(ends)
            left, expected_left = left - ends, expected_left - expected
        updated[-1] += left
        return updated


class HistogramForecaster:
    """Forecasts all queries of a served model alike, from that model's outcomes.

    A variant is forecast as its parent until its own outcomes outweigh that.
    """

    name = "histogram"

    def __init__(self) -> None:
        self._lengths: OrderedDict[str, _Lengths] = OrderedDict()
        self._lock = Lock()

    def observe(self, model: str, tokens: int, *, ended: bool = True) -> None:
        """Add one outcome; one that has not `ended` was cut short after `tokens`."""
        with self._lock:
            nothing = _Lengths([0.0] * len(PRIOR), [0.0] * len(PRIOR))
            self._lengths.setdefault(model, nothing).observe(tokens, ended=ended)
            self._lengths.move_to_end(model)
            if len(self._lengths) > MAX_MODELS:
                self._lengths.popitem(last=False)

    def forecast(self, queries: Sequence[Query]) -> list[Forecast]:
        forecasts: dict[str, Forecast] = {}
        for query in queries:
            if query.model not in forecasts:
                forecasts[query.model] = self._forecast_model(query.model, query.parent)
        return [forecasts[query.model] for query in queries]

    def _forecast_model(self, model: str, parent: str) -> Forecast:
        shares = [weight / sum(PRIOR) for weight in PRIOR]
        with self._lock:
            for lengths in (self._lengths[each] for each in (parent, model) if each in self._lengths):
                shares = lengths.outweigh(shares)
        return Forecast(EDGES, tuple(shares), f"histogram:{model}")
