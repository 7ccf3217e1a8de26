"""Calibrate forecasts: fit a temperature per served model, and recalibrate the tail per kind of prompt.

The kind of a prompt is inferred from its inputs, since a request does not name its source. All parameters are
fitted on prompts that were not trained on. Requires scipy and scikit-learn. Used in training only.
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

COVERAGE_PENALTY = 100.0
"""Weight of the squared coverage error: two points of coverage count as much as 0.04 nats."""
MIN_MODEL_ROWS = 250
"""A model with fewer calibration rows gets the temperature fitted on all models."""
MEDIAN, P90, P99 = 0.5, 0.9, 0.99
MIN_P90_COVERAGE, MAX_P90_COVERAGE = 0.75, 0.975
PRIOR_ROWS = 5.0
"""Weight, in rows, of the prior that the coverage of a kind is the mean of all rows."""
SHIFT_PRIOR_ROWS = 30.0
MAX_ROWS_PER_SOURCE = 3_000
KINDS_PENALTY = 0.01


class PromptKinds(NamedTuple):
    """A softmax classifier of prompts on standardised inputs, and the coverage of the raw p90 per kind."""

    weight: NDArray[np.float32]
    """`[kinds, inputs]`"""
    bias: NDArray[np.float32]
    p90_coverage: NDArray[np.float32]
    """Share of the answers of each kind within the raw p90 `[kinds]`."""

    def memberships(self, standardised: NDArray[np.float32]) -> Floats:
        """Return the probability of each kind for each prompt `[prompts, kinds]`."""
        logits = (standardised @ self.weight.T + self.bias).astype(np.float64)
        probabilities: Floats = softmax(logits, axis=1)
        return probabilities

    def expected_coverage(self, standardised: NDArray[np.float32], shift: Floats | float = 0.0) -> Floats:
        """Return the expected coverage of the raw p90 for each prompt `[prompts]`.

        `shift` is the correction of the served model.
        """
        covered = self.memberships(standardised) @ self.p90_coverage + shift
        clipped: Floats = np.clip(covered, MIN_P90_COVERAGE, MAX_P90_COVERAGE)
        return clipped


def single_kind(inputs: int) -> PromptKinds:
    """Return a single kind for all prompts, with the coverage 0.9, which needs no recalibration."""
    weight = np.zeros((1, inputs), dtype=np.float32)
    return PromptKinds(weight, np.zeros(1, dtype=np.float32), np.full(1, P90, dtype=np.float32))


def fit_kinds(standardised: NDArray[np.float32], source: NDArray[np.str_]) -> PromptKinds:
    """Fit a classifier of prompts by source, with coverage 0.9 for all kinds; see `fit_p90_coverage`.

    Returns a single kind if there are fewer than three sources.
    """
    if len(np.unique(source)) < 3:
        return single_kind(standardised.shape[1])
    fitted = LogisticRegression(C=KINDS_PENALTY, max_iter=200).fit(standardised, source)
    p90_coverage = np.full(len(fitted.classes_), P90, dtype=np.float32)
    return PromptKinds(fitted.coef_.astype(np.float32), fitted.intercept_.astype(np.float32), p90_coverage)


def fit_p90_coverage(
    kinds: PromptKinds, standardised: NDArray[np.float32], within: NDArray[np.bool_], source: NDArray[np.str_]
) -> PromptKinds:
    """Fit the coverage of each kind so that the mean expected coverage of each source matches the observed.

    `within` marks the rows whose length is within their p90. Least squares over sources, with a prior that
    shrinks each kind towards the mean of all rows.
    """
    memberships, mean = kinds.memberships(standardised), float(within.mean())
    design = [np.sqrt(PRIOR_ROWS) * np.eye(len(kinds.bias))]
    observed = [np.full(len(kinds.bias), np.sqrt(PRIOR_ROWS) * mean)]
    for each in np.unique(source):
        rows = source == each
        weight = np.sqrt(min(rows.sum(), MAX_ROWS_PER_SOURCE))
        design.append(weight * memberships[rows].mean(axis=0, keepdims=True))
        observed.append(np.array([weight * within[rows].mean()]))
    solution = np.linalg.lstsq(np.concatenate(design), np.concatenate(observed), rcond=None)[0]
    return kinds._replace(p90_coverage=np.clip(solution, 0.5, 1.0).astype(np.float32))


def recalibrate(probabilities: Floats, p90_coverage: Floats) -> Floats:
    """Move the p90 of each row, which covers `p90_coverage`, to cover 90 %. The p50 and p99 are unchanged.

    Rescales the cumulative distribution piecewise linearly between these three quantiles. The tail beyond the
    p99 is unchanged, since the expected length depends on it.
    """
    cumulative = np.cumsum(probabilities, axis=1)
    inner_slope = (p90_coverage[:, None] - MEDIAN) / (P90 - MEDIAN)
    outer_slope = (P99 - p90_coverage[:, None]) / (P99 - P90)
    moved = cumulative + (inner_slope - 1.0) * np.maximum(cumulative - MEDIAN, 0.0)
    moved += (outer_slope - inner_slope) * np.maximum(cumulative - P90, 0.0)
    moved += (1.0 - outer_slope) * np.maximum(cumulative - P99, 0.0)
    masses = np.maximum(np.diff(moved, axis=1, prepend=0.0), 0.0)
    normalised: Floats = masses / masses.sum(axis=1, keepdims=True)
    return normalised


def fit_shift(
    probabilities: Floats, length: NDArray[np.int64], edges: tuple[int, ...], p90_coverage: Floats
) -> float:
    """Return the correction of `p90_coverage` for which the recalibrated p90 of the rows covers 90 %.

    The correction is shrunk towards 0 for few rows.
    """
    bounds, label = np.array(edges), range_index(length, edges)
    rows = np.arange(len(label))
    mass = probabilities[rows, label]
    # A p90 is rounded up to an integer: it reaches a length as soon as it is above the previous one.
    share = np.clip((length - 1 - bounds[label]) / (bounds[label + 1] - bounds[label]), 0.0, 1.0)
    below = np.cumsum(probabilities, axis=1)[rows, label] - mass * (1.0 - share)
    missing = float(np.quantile(_max_coverage_within(below) - p90_coverage, 1.0 - P90))
    return missing * len(rows) / (len(rows) + SHIFT_PRIOR_ROWS)


def _max_coverage_within(below: Floats) -> Floats:
    """Return the largest p90 coverage for which each length is within the recalibrated p90.

    `below` is the cumulative probability below the length.
    """
    inner = MEDIAN + (P90 - MEDIAN) ** 2 / np.maximum(below - MEDIAN, 1e-3)
    beyond = np.clip((below - P90) / (P99 - P90), 0.0, 1.0 - 1e-3)
    outer = (P90 - P99 * beyond) / (1.0 - beyond)
    largest: Floats = np.where(below <= P90, inner, outer)
    return largest


def log_loss(logits: NDArray[np.float64], label: NDArray[np.int64]) -> float:
    """Return the mean −log p of the true ranges, in nats."""
    chosen = logits[np.arange(len(label)), label]
    return float(np.mean(logsumexp(logits, axis=1) - chosen))


def fit_sharpness(
    logits: NDArray[np.float64],
    length: NDArray[np.int64],
    edges: tuple[int, ...],
    p90_coverage: Floats | None = None,
) -> float:
    """Return the factor on the logits (1 / temperature) that minimises log loss and p90 coverage error."""
    label = range_index(length, edges)

    def cost(factor: float) -> float:
        probabilities = softmax(logits * factor, axis=1)
        if p90_coverage is not None:
            probabilities = recalibrate(probabilities, p90_coverage)
        within = coverage(length, quantile(probabilities, edges, P90))
        return log_loss(logits * factor, label) + COVERAGE_PENALTY * (within - P90) ** 2

    return float(minimize_scalar(cost, bounds=(0.4, 2.5), method="bounded").x)


def fit_sharpness_by_model(
    logits: NDArray[np.float64],
    length: NDArray[np.int64],
    model: NDArray[np.int64],
    edges: tuple[int, ...],
    models: int,
) -> NDArray[np.float32]:
    """Return the sharpness of each row of the model table `[models]`."""
    factors = np.full(models, fit_sharpness(logits, length, edges))
    for row in range(models):
        rows = model == row
        if rows.sum() >= MIN_MODEL_ROWS:
            factors[row] = fit_sharpness(logits[rows], length[rows], edges)
    return factors.astype(np.float32)
