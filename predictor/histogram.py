"""Forecast without a trained model, from a histogram of the recent answer lengths of each served model.

Answers that were cut short by a limit are treated as censored, with the Kaplan-Meier estimator; omitting them
would bias forecasts towards short answers. Memory is bounded: the least recently observed models are evicted.
Older outcomes decay.
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
"""Counts are halved at this number of outcomes, so that the histogram follows recent behaviour."""
PRIOR_OUTCOMES = 8.0
EDGES = (0, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192, 16384)
PRIOR = (2, 2, 4, 8, 14, 11, 9, 13, 9, 11, 8, 10, 6, 6, 3, 3, 1, 1, 0.5, 0.25)
"""Prior counts per range, of typical chat models. Normalized, they have the weight of PRIOR_OUTCOMES."""


class Query(Protocol):
    """The attributes of a query that HistogramForecaster reads."""

    @property
    def model(self) -> str: ...

    @property
    def parent(self) -> str: ...


class _Lengths(NamedTuple):
    """Counts of one model's answers per range: `ended` in the range, and `reached` it (at risk).

    An answer that was cut short within a range adds the fraction of the range that it covered to `reached`.
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
        """Return the posterior shares of the ranges. The prior `shares` weigh as much as PRIOR_OUTCOMES."""
        updated, left, expected_left = list[float](), 1.0, PRIOR_OUTCOMES
        for share, ended, reached in zip(shares, *self, strict=True):
            expected = PRIOR_OUTCOMES * share
            ends = left * min(1.0, (ended + expected) / (reached + max(expected_left, expected)))
            updated.append(ends)
            left, expected_left = left - ends, expected_left - expected
        updated[-1] += left
        return updated


class HistogramForecaster:
    """Forecast all queries of a served model with one distribution, from that model's outcomes.

    For a variant, the parent's distribution is the prior.
    """

    name = "histogram"

    def __init__(self) -> None:
        self._lengths: OrderedDict[str, _Lengths] = OrderedDict()
        self._lock = Lock()

    def observe(self, model: str, tokens: int, *, ended: bool = True) -> None:
        """Add one outcome. If `ended` is false, the answer was cut short after `tokens`."""
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
