"""Calibration: a temperature per served model, so that probabilities mean what they say.

Fitted on prompts that were not trained on. Needs scipy; training only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp

OWN_TEMPERATURE_ROWS = 250
"""A model with fewer calibration rows takes the temperature of all together."""


def log_loss(logits: NDArray[np.float64], label: NDArray[np.int64]) -> float:
    """Mean −log p of the ranges that came true, in nats."""
    chosen = logits[np.arange(len(label)), label]
    return float(np.mean(logsumexp(logits, axis=1) - chosen))


def sharpness(logits: NDArray[np.float64], label: NDArray[np.int64]) -> float:
    """The factor on the logits (1 / temperature) with the least log loss."""
    found = minimize_scalar(
        lambda factor: log_loss(logits * factor, label), bounds=(0.2, 4.0), method="bounded"
    )
    return float(found.x)


def sharpness_by_model(
    logits: NDArray[np.float64], label: NDArray[np.int64], model: NDArray[np.int64], models: int
) -> NDArray[np.float32]:
    """One factor for each row of the model table."""
    factors = np.full(models, sharpness(logits, label))
    for row in range(models):
        own = model == row
        if own.sum() >= OWN_TEMPERATURE_ROWS:
            factors[row] = sharpness(logits[own], label[own])
    return factors.astype(np.float32)
