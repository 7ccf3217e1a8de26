"""Calibration: a temperature per served model, so that probabilities mean what they say.

Fitted on prompts that were not trained on. Needs scipy; training only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp, softmax

from predictor.labels import range_of
from predictor.metrics import coverage, quantile

COVERAGE_WEIGHT = 20.0
"""Two points of coverage count as much as 0.008 nats."""
OWN_TEMPERATURE_ROWS = 250
"""A model with fewer calibration rows takes the temperature of all together."""


def log_loss(logits: NDArray[np.float64], label: NDArray[np.int64]) -> float:
    """Mean −log p of the ranges that came true, in nats."""
    chosen = logits[np.arange(len(label)), label]
    return float(np.mean(logsumexp(logits, axis=1) - chosen))


def sharpness(logits: NDArray[np.float64], length: NDArray[np.int64], edges: tuple[int, ...]) -> float:
    """The factor on the logits (1 / temperature) with the least log loss, and a p90 that covers 90 %."""
    label = range_of(length, edges)

    def cost(factor: float) -> float:
        within = coverage(length, quantile(softmax(logits * factor, axis=1), edges, 0.9))
        return log_loss(logits * factor, label) + COVERAGE_WEIGHT * (within - 0.9) ** 2

    found = minimize_scalar(cost, bounds=(0.4, 2.5), method="bounded")
    return float(found.x)


def sharpness_by_model(
    logits: NDArray[np.float64],
    length: NDArray[np.int64],
    model: NDArray[np.int64],
    edges: tuple[int, ...],
    models: int,
) -> NDArray[np.float32]:
    """One factor for each row of the model table."""
    factors = np.full(models, sharpness(logits, length, edges))
    for row in range(models):
        own = model == row
        if own.sum() >= OWN_TEMPERATURE_ROWS:
            factors[row] = sharpness(logits[own], length[own], edges)
    return factors.astype(np.float32)
