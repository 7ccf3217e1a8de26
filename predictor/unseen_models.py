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
from predictor.onnx_forecaster import UNKNOWN_ROW, UNKNOWN_SUFFIX, Features, OnnxForecaster

MAX_MODELS = 64
"""So many strangers are followed, the longest unseen forgotten."""
MIN_SHARE = 0.02
"""Rows that weigh less have no say in a forecast, which keeps it cheap."""
PRIOR_SHARE = 0.6
"""What the row that stands for a stranger before any outcome weighs against all others together."""
EVIDENCE_WEIGHT = 0.7
"""An outcome counts as so much of one, since no known model fits exactly."""
MAX_EVIDENCE_OUTCOMES = 200.0
"""Beyond so many outcomes older ones fade, so that a model that changes is followed."""


class NearestModel(NamedTuple):
    """Whom a stranger is forecast as, the share of the belief that is in it, and from how many outcomes."""

    model: str
    share: float
    outcomes: int


@dataclass(slots=True)
class Posterior:
    """Log weights over the rows of the model table, and the outcomes they come from."""

    weights: NDArray[np.float64]
    outcomes: int = 0
    mixture: list[tuple[int, float]] = field(default_factory=list)

    def normalize(self) -> None:
        """Normalises, fades, and keeps the rows that have a say."""
        self.weights -= self.weights.max()
        if self.outcomes > MAX_EVIDENCE_OUTCOMES:
            self.weights *= 1.0 - 1.0 / MAX_EVIDENCE_OUTCOMES
        shares = np.exp(self.weights)
        shares /= shares.sum()
        rows = np.flatnonzero(shares >= min(MIN_SHARE, float(shares.max())))
        total = float(shares[rows].sum())
        self.mixture = [(int(row), float(shares[row]) / total) for row in rows]


class UnseenModelForecaster:
    """Forecasts strangers as a mixture of known models. Safe to use from several threads."""

    def __init__(self, base: OnnxForecaster) -> None:
        self.base = base
        self.name = base.name
        self._known = {name.casefold() for name in base.card.models[1:]}
        self._posteriors: OrderedDict[str, Posterior] = OrderedDict()
        self._lock = Lock()

    def forecast(self, queries: Sequence[Features]) -> list[Forecast]:
        with self._lock:
            mixtures = [self._mixture_of(query.model) for query in queries]
        owner = np.array(
            [place for place, (mixture, _) in enumerate(mixtures) for _ in mixture], dtype=np.int64
        )
        rows = np.array([row for mixture, _ in mixtures for row, _ in mixture], dtype=np.int64)
        shares = np.array([share for mixture, _ in mixtures for _, share in mixture])
        edges = self.base.card.edges
        mixed = np.zeros((len(queries), len(edges) - 1))
        probabilities = self.base.probabilities([query.text for query in queries], owner, rows)
        np.add.at(mixed, owner, shares[:, None] * probabilities)
        pairs = zip(mixed.tolist(), mixtures, strict=True)
        return [Forecast(edges, tuple(each), source) for each, (_, source) in pairs]

    def observe(self, query: Features, tokens: int) -> None:
        """A whole answer of `tokens`. Of a known model nothing is learned here: that is for an update."""
        name = query.model.casefold()
        if name in self._known:
            return
        every = np.arange(len(self.base.card.models))
        probabilities = self.base.probabilities([query.text], np.zeros(len(every), dtype=np.int64), every)
        edges = self.base.card.edges
        place = min(max(0, int(np.searchsorted(edges, tokens, side="left")) - 1), len(edges) - 2)
        with self._lock:
            posterior = self._posterior(name)
            posterior.weights += EVIDENCE_WEIGHT * np.log(np.maximum(probabilities[:, place], 1e-6))
            posterior.outcomes += 1
            posterior.normalize()

    def nearest_model(self, model: str) -> NearestModel | None:
        """None for a model that was trained on, or of which no outcome has come yet."""
        with self._lock:
            posterior = self._posteriors.get(model.casefold())
        if posterior is None:
            return None
        row, share = max(posterior.mixture, key=lambda each: each[1])
        return NearestModel(self.base.card.models[row], share, posterior.outcomes)

    def _mixture_of(self, model: str) -> tuple[list[tuple[int, float]], str]:
        """Rows with their shares, and what the forecast's source says."""
        posterior = self._posteriors.get(model.casefold())
        if posterior is None:
            row = self.base.row(model)
            return [(row, 1.0)], self.name if row != UNKNOWN_ROW else f"{self.name}:{UNKNOWN_SUFFIX}"
        row, share = max(posterior.mixture, key=lambda each: each[1])
        nearest = self.base.card.models[row]
        return posterior.mixture, f"{self.name}:{UNKNOWN_SUFFIX}:{10 * round(10 * share)}% like {nearest}"

    def _posterior(self, name: str) -> Posterior:
        if name not in self._posteriors:
            rows = len(self.base.card.models)
            weights = np.full(rows, np.log((1.0 - PRIOR_SHARE) / max(1, rows - 1)))
            weights[self.base.row(name)] = np.log(PRIOR_SHARE)
            self._posteriors[name] = Posterior(weights)
        self._posteriors.move_to_end(name)
        if len(self._posteriors) > MAX_MODELS:
            self._posteriors.popitem(last=False)
        return self._posteriors[name]
