"""Compute quality metrics of forecasts over many rows at once.

Distributions are probabilities `[rows, ranges]` over shared edges. The results equal those of `Forecast`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.stats import kendalltau, spearmanr

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
BUCKETS = 10


def expected(probabilities: Floats, edges: tuple[int, ...]) -> Floats:
    """Return the mean length of each row."""
    bounds = np.array(edges)
    means: Floats = probabilities @ ((bounds[:-1] + bounds[1:] + 1) / 2.0)
    return means


def quantile(probabilities: Floats, edges: tuple[int, ...], q: float) -> Integers:
    """Return, for each row, the smallest length whose cumulative probability is at least `q`."""
    bounds = np.array(edges)
    reached = np.concatenate([np.zeros((len(probabilities), 1)), np.cumsum(probabilities, axis=1)], axis=1)
    place = np.minimum((reached[:, 1:] < q).sum(axis=1), len(edges) - 2)
    rows = np.arange(len(place))
    share = (q - reached[rows, place]) / np.maximum(probabilities[rows, place], 1e-12)
    width = bounds[place + 1] - bounds[place]
    steps = np.clip(np.ceil(share * width - 1e-9), 1, width)
    lengths: Integers = (bounds[place] + steps).astype(np.int64)
    return lengths


def likeliest_bucket(probabilities: Floats, edges: tuple[int, ...], max_length: int) -> Integers:
    """Return the most probable tenth of `max_length` of each row. The last tenth includes longer lengths."""
    places = np.interp(np.arange(1, BUCKETS) * max_length / BUCKETS, edges, np.arange(len(edges)))
    whole = np.minimum(places.astype(int), len(edges) - 2)  # at the last edge, the whole last range
    reached = np.concatenate([np.zeros((len(probabilities), 1)), np.cumsum(probabilities, axis=1)], axis=1)
    inner = reached[:, whole] + (places - whole) * probabilities[:, whole]
    ends = np.concatenate([np.zeros((len(inner), 1)), inner, np.ones((len(inner), 1))], axis=1)
    bucket: Integers = np.diff(ends, axis=1).argmax(axis=1)
    return bucket


def true_bucket(lengths: Integers, max_length: int) -> Integers:
    """Return the bucket floor(length / (max_length / 10)) of each length, at most 9."""
    return np.minimum(BUCKETS - 1, lengths * BUCKETS // max_length).astype(np.int64)


def accuracy(lengths: Integers, bucket: Integers, max_length: int) -> dict[str, float]:
    """Return the shares of rows in the right bucket, at most one bucket off, and in the majority bucket."""
    truth = true_bucket(lengths, max_length)
    miss = np.abs(truth - bucket)
    majority = np.bincount(truth, minlength=BUCKETS).max() / len(truth)
    return {
        f"accuracy_{max_length}": float((miss == 0).mean()),
        f"within_one_{max_length}": float((miss <= 1).mean()),
        f"majority_{max_length}": float(majority),
    }


def rank(lengths: Integers, estimate: Floats) -> dict[str, float | None]:
    """Return the Spearman and Kendall correlations; both are None if lengths or estimates are constant."""
    if np.ptp(lengths) == 0 or np.ptp(estimate) == 0:
        return {"spearman": None, "kendall": None}
    return {
        "spearman": float(spearmanr(lengths, estimate).statistic),
        "kendall": float(kendalltau(lengths, estimate).statistic),
    }


def coverage(lengths: Integers, bound: Integers) -> float:
    """Return the share of lengths at or below their bound."""
    return float((lengths <= bound).mean())


def mean_absolute_error(lengths: Integers, estimate: Floats | Integers) -> float:
    """Return the mean absolute error in tokens."""
    return float(np.abs(lengths - estimate).mean())
