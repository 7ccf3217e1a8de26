"""Calibration: a temperature per served model, and per kind of prompt a bend above the median.

Which kind a prompt is of is told from its inputs, since nobody names its source when it is served. Fitted on
prompts that were not trained on. Needs scipy and scikit-learn; training only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp, softmax
from sklearn.linear_model import LogisticRegression

from predictor.data.labels import range_index
from predictor.evaluation.metrics import coverage, quantile

Floats = NDArray[np.float64]

COVERAGE_WEIGHT = 100.0
"""Two points of coverage count as much as 0.04 nats."""
OWN_TEMPERATURE_ROWS = 250
"""A model with fewer calibration rows takes the temperature of all together."""
MEDIAN, STATED, FAR = 0.5, 0.9, 0.99
LEAST_REACHED, MOST_REACHED = 0.75, 0.975
PRIOR_ROWS = 5.0
"""What a kind of prompt is expected to reach, until so many rows speak against it."""
SHIFT_PRIOR_ROWS = 30.0
MOST_ROWS_OF_A_KIND = 3_000
KINDS_PENALTY = 0.01


class Kinds(NamedTuple):
    """Kinds of prompts, told apart on standardised inputs, and what share of each the p90 really reached."""

    weight: NDArray[np.float32]
    """`[kinds, inputs]`"""
    bias: NDArray[np.float32]
    reached: NDArray[np.float32]

    def shares(self, standardised: NDArray[np.float32]) -> Floats:
        """How much of each kind a prompt is `[prompts, kinds]`."""
        found: Floats = softmax((standardised @ self.weight.T + self.bias).astype(np.float64), axis=1)
        return found

    def reached_by(self, standardised: NDArray[np.float32], shift: Floats | float = 0.0) -> Floats:
        """What share of such prompts the p90 reaches before it is bent; `shift` is the served model's own."""
        reached = self.shares(standardised) @ self.reached + shift
        found: Floats = np.clip(reached, LEAST_REACHED, MOST_REACHED)
        return found


def one_kind(inputs: int) -> Kinds:
    """All prompts alike, and nothing to bend."""
    weight = np.zeros((1, inputs), dtype=np.float32)
    return Kinds(weight, np.zeros(1, dtype=np.float32), np.full(1, STATED, dtype=np.float32))


def kinds_of(standardised: NDArray[np.float32], source: NDArray[np.str_]) -> Kinds:
    """Kinds named by the sources of some prompts; what each reaches is yet to be fitted."""
    if len(np.unique(source)) < 3:
        return one_kind(standardised.shape[1])
    found = LogisticRegression(C=KINDS_PENALTY, max_iter=200).fit(standardised, source)
    kinds = len(found.classes_)
    stated = np.full(kinds, STATED, dtype=np.float32)
    return Kinds(found.coef_.astype(np.float32), found.intercept_.astype(np.float32), stated)


def fit_reached(
    kinds: Kinds, standardised: NDArray[np.float32], within: NDArray[np.bool_], source: NDArray[np.str_]
) -> Kinds:
    """What each kind reaches, such that every source's rows, whatever kinds they look like, come out right.

    `within` says of each row whether it was within its p90; least squares, drawn to the mean of all.
    """
    shares, mean = kinds.shares(standardised), float(within.mean())
    left = [np.sqrt(PRIOR_ROWS) * np.eye(len(kinds.bias))]
    right = [np.full(len(kinds.bias), np.sqrt(PRIOR_ROWS) * mean)]
    for each in np.unique(source):
        own = source == each
        weight = np.sqrt(min(own.sum(), MOST_ROWS_OF_A_KIND))
        left.append(weight * shares[own].mean(axis=0, keepdims=True))
        right.append(np.array([weight * within[own].mean()]))
    solved = np.linalg.lstsq(np.concatenate(left), np.concatenate(right), rcond=None)[0]
    return kinds._replace(reached=np.clip(solved, 0.5, 1.0).astype(np.float32))


def bent(probabilities: Floats, reached: Floats) -> Floats:
    """The same p50 and p99; the p90, which covered `reached`, covers 90 %; what lies between is stretched.

    The far tail stays, since the expected length hangs on it.
    """
    below = np.cumsum(probabilities, axis=1)
    inner = (reached[:, None] - MEDIAN) / (STATED - MEDIAN)
    outer = (FAR - reached[:, None]) / (FAR - STATED)
    moved = below + (inner - 1.0) * np.maximum(below - MEDIAN, 0.0)
    moved += (outer - inner) * np.maximum(below - STATED, 0.0)
    moved += (1.0 - outer) * np.maximum(below - FAR, 0.0)
    shares = np.maximum(np.diff(moved, axis=1, prepend=0.0), 0.0)
    whole: Floats = shares / shares.sum(axis=1, keepdims=True)
    return whole


def shift_of(
    probabilities: Floats, length: NDArray[np.int64], edges: tuple[int, ...], reached: Floats
) -> float:
    """What to add to `reached` so that the p90 of such rows, bent, covers 90 %; less where rows are few."""
    bounds, place = np.array(edges), range_index(length, edges)
    rows = np.arange(len(place))
    own = probabilities[rows, place]
    # A p90 is a whole number, rounded up: it reaches a length as soon as it is above the one before.
    share = np.clip((length - 1 - bounds[place]) / (bounds[place + 1] - bounds[place]), 0.0, 1.0)
    below = np.cumsum(probabilities, axis=1)[rows, place] - own * (1.0 - share)
    missing = float(np.quantile(_most_reached(below) - reached, 1.0 - STATED))
    return missing * len(rows) / (len(rows) + SHIFT_PRIOR_ROWS)


def _most_reached(below: Floats) -> Floats:
    """The largest `reached` with which a length, `below` which lies this share, is within the bent p90."""
    inner = MEDIAN + (STATED - MEDIAN) ** 2 / np.maximum(below - MEDIAN, 1e-3)
    beyond = np.clip((below - STATED) / (FAR - STATED), 0.0, 1.0 - 1e-3)
    outer = (STATED - FAR * beyond) / (1.0 - beyond)
    found: Floats = np.where(below <= STATED, inner, outer)
    return found


def log_loss(logits: NDArray[np.float64], label: NDArray[np.int64]) -> float:
    """Mean −log p of the ranges that came true, in nats."""
    chosen = logits[np.arange(len(label)), label]
    return float(np.mean(logsumexp(logits, axis=1) - chosen))


def sharpness(
    logits: NDArray[np.float64],
    length: NDArray[np.int64],
    edges: tuple[int, ...],
    reached: Floats | None = None,
) -> float:
    """The factor on the logits (1 / temperature) with the least log loss, and a p90 that covers 90 %."""
    label = range_index(length, edges)

    def cost(factor: float) -> float:
        probabilities = softmax(logits * factor, axis=1)
        if reached is not None:
            probabilities = bent(probabilities, reached)
        within = coverage(length, quantile(probabilities, edges, STATED))
        return log_loss(logits * factor, label) + COVERAGE_WEIGHT * (within - STATED) ** 2

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
