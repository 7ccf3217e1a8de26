"""Measure how fast the queries for each model arrive, and how many of them continue earlier prompts."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Final

from gateway.routing.demand import Arriving, Demand

RECENT: Final = 32
"""The number of last queries from which the traffic of a model is measured."""
MIN_QUERIES: Final = 8
"""With fewer queries, the arrival rate is unknown."""
MIN_SPAN_S: Final = 1e-6
MAX_MODELS: Final = 4096
"""The number of models that are tracked; the oldest entry is dropped, as tuned models come and go."""


class Traffic:
    """The last RECENT queries for each of MAX_MODELS models at one gateway. Not thread-safe."""

    def __init__(self) -> None:
        self._recent: dict[str, _Recent] = {}

    def __len__(self) -> int:
        return len(self._recent)

    def arrive(self, demand: Demand, now_s: float) -> Demand:
        """Count a query, and return its demand with the traffic of its model, the query included."""
        recent = self._recent.get(demand.model)
        if recent is None:
            if len(self._recent) == MAX_MODELS:
                del self._recent[next(iter(self._recent))]
            recent = self._recent[demand.model] = _Recent()
        return replace(
            demand, arriving=recent.add(now_s, demand.response_tokens, bool(demand.cached.by_site))
        )


class _Recent:
    """The last queries for one model."""

    __slots__ = ("_queries", "_returning", "_tokens")

    def __init__(self) -> None:
        self._queries: deque[tuple[float, float]] = deque()  # arrival, response tokens
        self._tokens = self._returning = 0.0

    def add(self, now_s: float, response_tokens: float, returns: bool) -> Arriving:
        queries = self._queries
        if len(queries) == RECENT:
            self._tokens -= queries.popleft()[1]
        queries.append((now_s, response_tokens))
        self._tokens += response_tokens
        self._returning += (returns - self._returning) / len(queries)
        if len(queries) < MIN_QUERIES:
            return Arriving(returning=self._returning)
        first_s, first_tokens = queries[0]
        tokens = max(0.0, self._tokens - first_tokens)
        return Arriving(tokens / max(MIN_SPAN_S, now_s - first_s), self._returning)
