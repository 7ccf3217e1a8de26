"""Forecast models that were not trained on as a mixture of known models, fitted to their outcomes.

Applies Bayes' rule over the rows of the model table: each outcome raises the weight of the rows that assigned
it a higher probability.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from predictor.forecast import Forecast
from predictor.onnx_forecaster import UNKNOWN_ROW, UNKNOWN_SUFFIX, Features, OnnxForecaster

MAX_MODELS = 1_024
"""The maximum number of tracked unseen models. The least recently used is evicted."""
MIN_SHARE = 0.02
"""Rows of less posterior weight are excluded from the mixture, which bounds the cost of a forecast."""
PRIOR_SHARE = 0.6
"""Prior weight of the forecast without outcomes (UNKNOWN_ROW, the alias's row, or the parent's mixture). The
rest is distributed evenly over all rows.
"""
EVIDENCE_WEIGHT = 0.7
"""Weight of the log-likelihood of an outcome, below 1 since no known model fits exactly."""
MAX_EVIDENCE_OUTCOMES = 200.0
"""Beyond this number of outcomes, older ones decay, so that the mixture adapts to changes of a model."""


@dataclass(slots=True)
class Posterior:
    """Log weights over the rows of the model table, and the mixture derived from them."""

    weights: NDArray[np.float64]
    outcomes: float = 0.0
    mixture: list[tuple[int, float]] = field(default_factory=list)
    """Pairs of a row and its share."""
    source: str = ""
    """The `source` of forecasts from this mixture."""

    def normalize(self, outcomes: float = 1.0) -> None:
        """Normalize the weights, decay them by the number of new `outcomes`, and recompute the mixture."""
        self.weights -= self.weights.max()
        if self.outcomes > MAX_EVIDENCE_OUTCOMES:
            self.weights *= 1.0 - outcomes / MAX_EVIDENCE_OUTCOMES
        shares = np.exp(self.weights)
        shares /= shares.sum()
        rows = np.flatnonzero(shares >= min(MIN_SHARE, float(shares.max())))
        total = float(shares[rows].sum())
        self.mixture = [(int(row), float(shares[row]) / total) for row in rows]


class UnseenModelForecaster:
    """Forecast unseen models as mixtures of known models, and known models directly. Thread-safe."""

    def __init__(self, base: OnnxForecaster) -> None:
        self.base = base
        self.name = base.name
        self._known = {name.casefold() for name in base.card.models[1:]}
        self._posteriors: OrderedDict[str, Posterior] = OrderedDict()
        self._lock = Lock()

    def take_over(self, earlier: UnseenModelForecaster) -> None:
        """Adopt from `earlier`, of another artifact, the posteriors of models unknown to this artifact.

        Rows with a name in both artifacts keep their weight. New rows get the weight of a uniform one.
        """
        names = self.base.card.models
        before = {name: row for row, name in enumerate(earlier.base.card.models)}
        both = [row for row, name in enumerate(names) if row == UNKNOWN_ROW or name in before]
        earlier_rows = [before.get(names[row], UNKNOWN_ROW) for row in both]
        with earlier._lock:
            learned = {
                name: (posterior.weights[earlier_rows], posterior.outcomes)
                for name, posterior in earlier._posteriors.items()
                if name not in self._known
            }
        for name, (weights, outcomes) in learned.items():
            posterior = Posterior(np.full(len(names), -np.log(len(names))), outcomes)
            posterior.weights[both] = weights - weights.max()
            self._put(name, posterior)

    def forecast(self, queries: Sequence[Features]) -> list[Forecast]:
        with self._lock:
            mixtures = [self._mixture_of(query.model, query.parent) for query in queries]
        counts = [len(mixture) for mixture, _ in mixtures]
        owner = np.arange(len(queries)).repeat(counts)
        rows = np.array([row for mixture, _ in mixtures for row, _ in mixture], dtype=np.int64)
        shares = np.array([share for mixture, _ in mixtures for _, share in mixture])
        edges = self.base.card.edges
        probabilities = self.base.probabilities([query.text for query in queries], owner, rows)
        begins = np.cumsum([0, *counts])[:-1]  # no mixture is empty
        mixed = np.add.reduceat(shares[:, None] * probabilities, begins)
        pairs = zip(mixed.tolist(), mixtures, strict=True)
        return [Forecast(edges, tuple(each), source) for each, (_, source) in pairs]

    def observe(self, query: Features, tokens: int, *, ended: bool = True) -> None:
        """Update the posterior with an answer of `tokens`. Known models are ignored; updates retrain them.

        If `ended` is false, the answer was cut short: its likelihood is the probability of a longer one. It
        counts as one minus the smallest of these likelihoods, in outcomes.
        """
        name = query.model.casefold()
        if name in self._known:
            return
        every = np.arange(len(self.base.card.models))
        probabilities = self.base.probabilities([query.text], np.zeros(len(every), dtype=np.int64), every)
        edges = np.array(self.base.card.edges)
        if ended:
            place = min(max(0, int(np.searchsorted(edges, tokens, side="left")) - 1), len(edges) - 2)
            likelihoods, outcomes = probabilities[:, place], 1.0
        else:
            longer = np.clip((edges[1:] - tokens) / np.diff(edges), 0.0, 1.0)  # the fraction of each range
            likelihoods = probabilities @ longer
            outcomes = 1.0 - float(likelihoods.min())
        with self._lock:
            posterior = self._posterior(query)
            posterior.weights += EVIDENCE_WEIGHT * np.log(np.maximum(likelihoods, 1e-6))
            posterior.outcomes += outcomes
            self._put(name, posterior, outcomes)

    def _put(self, name: str, posterior: Posterior, outcomes: float = 1.0) -> None:
        posterior.normalize(outcomes)
        row, share = max(posterior.mixture, key=lambda each: each[1])
        like = f"{10 * round(10 * share)}% like {self.base.card.models[row]}"
        posterior.source = f"{self.name}:{UNKNOWN_SUFFIX}:{like}"
        self._posteriors[name] = posterior

    def _mixture_of(self, model: str, parent: str) -> tuple[list[tuple[int, float]], str]:
        """Return pairs of a row and its share, and the source of the forecast."""
        posterior = self._posteriors.get(model.casefold())
        if posterior is None:
            row = self.base.row(model)
            if row != UNKNOWN_ROW:
                return [(row, 1.0)], self.name
            if not parent:
                return [(row, 1.0)], f"{self.name}:{UNKNOWN_SUFFIX}"
            return self._mixture_of(parent, "")[0], f"{self.name}:{UNKNOWN_SUFFIX}:as {parent}"
        return posterior.mixture, posterior.source

    def _posterior(self, query: Features) -> Posterior:
        name = query.model.casefold()
        if name not in self._posteriors:
            rows = len(self.base.card.models)
            shares = np.full(rows, (1.0 - PRIOR_SHARE) / rows)
            for row, share in self._mixture_of(query.model, query.parent)[0]:
                shares[row] += PRIOR_SHARE * share
            self._posteriors[name] = Posterior(np.log(shares))
        self._posteriors.move_to_end(name)
        if len(self._posteriors) > MAX_MODELS:
            self._posteriors.popitem(last=False)
        return self._posteriors[name]
