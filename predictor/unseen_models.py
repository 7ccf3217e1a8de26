"""A served model that was not trained on is forecast as the known ones that its first outcomes fit.

Bayes over the rows of the model table: each outcome makes the rows that gave it more probability weigh more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from predictor.forecast import Forecast
from predictor.onnx_forecaster import UNKNOWN, UNKNOWN_ROW, Features, OnnxForecaster

MODELS = 64
"""So many strangers are followed, the longest unseen forgotten."""
LEAST_SHARE = 0.02
"""Rows that weigh less have no say in a forecast, which keeps it cheap."""
PRIOR_SHARE = 0.6
"""What the row that stands for a stranger before any outcome weighs against all others together."""
EVIDENCE = 0.7
"""An outcome counts as so much of one, since no known model fits exactly."""
MOST_EVIDENCE = 200.0
"""Beyond so many outcomes older ones fade, so that a model that changes is followed."""


class Likeness(NamedTuple):
    """Whom a stranger is forecast as, the share of the belief that is in it, and from how many outcomes."""

    model: str
    share: float
    outcomes: int


@dataclass(slots=True)
class Belief:
    """Log weights over the rows of the model table, and the outcomes they come from."""

    weights: NDArray[np.float64]
    outcomes: int = 0
    kept: list[tuple[int, float]] = field(default_factory=list)

    def settle(self) -> None:
        """Normalises, fades, and keeps the rows that have a say."""
        self.weights -= self.weights.max()
        if self.outcomes > MOST_EVIDENCE:
            self.weights *= 1.0 - 1.0 / MOST_EVIDENCE
        shares = np.exp(self.weights)
        shares /= shares.sum()
        rows = np.flatnonzero(shares >= min(LEAST_SHARE, float(shares.max())))
        total = float(shares[rows].sum())
        self.kept = [(int(row), float(shares[row]) / total) for row in rows]


class BorrowingForecaster:
    """Forecasts strangers as a mixture of known models. Safe to use from several threads."""

    def __init__(self, serving: OnnxForecaster) -> None:
        self.serving = serving
        self.name = serving.name
        self._known = {name.casefold() for name in serving.card.models[1:]}
        self._beliefs: OrderedDict[str, Belief] = OrderedDict()
        self._lock = Lock()

    def forecast(self, queries: Sequence[Features]) -> list[Forecast]:
        with self._lock:
            plans = [self._plan(query.model) for query in queries]
        owner = np.array([place for place, (kept, _) in enumerate(plans) for _ in kept], dtype=np.int64)
        rows = np.array([row for kept, _ in plans for row, _ in kept], dtype=np.int64)
        shares = np.array([share for kept, _ in plans for _, share in kept])
        edges = self.serving.card.edges
        found = np.zeros((len(queries), len(edges) - 1))
        answers = self.serving.answers([query.text for query in queries], owner, rows)
        np.add.at(found, owner, shares[:, None] * answers)
        pairs = zip(found.tolist(), plans, strict=True)
        return [Forecast(edges, tuple(each), source) for each, (_, source) in pairs]

    def observe(self, query: Features, tokens: int) -> None:
        """A whole answer of `tokens`. Of a known model nothing is learned here: that is for an update."""
        name = query.model.casefold()
        if name in self._known:
            return
        every = np.arange(len(self.serving.card.models))
        answers = self.serving.answers([query.text], np.zeros(len(every), dtype=np.int64), every)
        edges = self.serving.card.edges
        place = min(max(0, int(np.searchsorted(edges, tokens, side="left")) - 1), len(edges) - 2)
        with self._lock:
            belief = self._belief(name)
            belief.weights += EVIDENCE * np.log(np.maximum(answers[:, place], 1e-6))
            belief.outcomes += 1
            belief.settle()

    def likeness(self, model: str) -> Likeness | None:
        """None for a model that was trained on, or of which no outcome has come yet."""
        with self._lock:
            belief = self._beliefs.get(model.casefold())
        if belief is None:
            return None
        row, share = max(belief.kept, key=lambda each: each[1])
        return Likeness(self.serving.card.models[row], share, belief.outcomes)

    def _plan(self, model: str) -> tuple[list[tuple[int, float]], str]:
        """Rows with their shares, and what the forecast's source says."""
        belief = self._beliefs.get(model.casefold())
        if belief is None:
            row = self.serving.row(model)
            return [(row, 1.0)], self.name if row != UNKNOWN_ROW else f"{self.name}:{UNKNOWN}"
        row, share = max(belief.kept, key=lambda each: each[1])
        like = self.serving.card.models[row]
        return belief.kept, f"{self.name}:{UNKNOWN}:{10 * round(10 * share)}% like {like}"

    def _belief(self, name: str) -> Belief:
        if name not in self._beliefs:
            rows = len(self.serving.card.models)
            weights = np.full(rows, np.log((1.0 - PRIOR_SHARE) / max(1, rows - 1)))
            weights[self.serving.row(name)] = np.log(PRIOR_SHARE)
            self._beliefs[name] = Belief(weights)
        self._beliefs.move_to_end(name)
        if len(self._beliefs) > MODELS:
            self._beliefs.popitem(last=False)
        return self._beliefs[name]
