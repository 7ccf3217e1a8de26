"""Forecast without a model: a histogram of the lengths that each served model has answered with lately.

Bounded: the least recently used models are forgotten, and older outcomes of each fade.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Protocol

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


class HistogramForecaster:
    """Forecasts all queries of a served model alike, from that model's outcomes.

    A variant is forecast as its parent until its own outcomes outweigh that.
    """

    name = "histogram"

    def __init__(self) -> None:
        self._counts: OrderedDict[str, list[float]] = OrderedDict()
        self._lock = Lock()

    def observe(self, model: str, tokens: int) -> None:
        """Add one outcome."""
        with self._lock:
            counts = self._counts.setdefault(model, [0.0] * len(PRIOR))
            self._counts.move_to_end(model)
            counts[min(len(PRIOR) - 1, max(0, bisect_left(EDGES, tokens) - 1))] += 1.0
            if sum(counts) >= FADE_AT_OUTCOMES:
                counts[:] = [count / 2.0 for count in counts]
            if len(self._counts) > MAX_MODELS:
                self._counts.popitem(last=False)

    def forecast(self, queries: Sequence[Query]) -> list[Forecast]:
        forecasts: dict[str, Forecast] = {}
        for query in queries:
            if query.model not in forecasts:
                forecasts[query.model] = self._forecast_model(query.model, query.parent)
        return [forecasts[query.model] for query in queries]

    def _forecast_model(self, model: str, parent: str) -> Forecast:
        with self._lock:
            known = [self._counts[each] for each in (parent, model) if each in self._counts]
            weights: Sequence[float] = PRIOR
            for counts in known:  # a model's outcomes outweigh what was expected before
                scale = PRIOR_OUTCOMES / sum(weights)
                weights = [scale * weight + count for weight, count in zip(weights, counts, strict=True)]
        total = sum(weights)
        return Forecast(EDGES, tuple(weight / total for weight in weights), f"histogram:{model}")
