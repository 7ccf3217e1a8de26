"""Define the length ranges of forecasts, and the training targets of models."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAX_LENGTH_TOKENS = 16_384
STEPS_PER_OCTAVE = 4
"""Adjacent edges differ by 19 %: finer than the variance of a model, coarse enough to learn."""

ALIGNED_TO = 51.2


def log_spaced_edges(max_length: int = MAX_LENGTH_TOKENS) -> tuple[int, ...]:
    """Return 0, integers a quarter octave apart, and `max_length`.

    The series contains ALIGNED_TO, so that the ten buckets of the paper at l_max 512, 1024 and 2048 start at
    edges.
    """
    octaves = np.arange(-6 * STEPS_PER_OCTAVE, 12 * STEPS_PER_OCTAVE) / STEPS_PER_OCTAVE
    lengths = np.round(ALIGNED_TO * 2.0**octaves).astype(int)
    inner = sorted({int(length) for length in lengths if 0 < length < 0.9 * max_length})
    return (0, *inner, max_length)


def equal_width_edges(buckets: int, max_length: int) -> tuple[int, ...]:
    """Return integer edges of ranges of equal width, as in the paper. Widths differ by at most one."""
    return tuple(max_length * place // buckets for place in range(buckets + 1))


def range_index(lengths: NDArray[np.int64], edges: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the index of the range (edges[i], edges[i+1]] of each length, the last for longer lengths."""
    return np.clip(np.searchsorted(edges, lengths, side="left") - 1, 0, len(edges) - 2).astype(np.int64)


def soft_targets(
    lengths: NDArray[np.int64], edges: tuple[int, ...], spread_octaves: float
) -> NDArray[np.float32]:
    """Return a Gaussian over log2 length around each outcome, as probabilities `[rows, ranges]`."""
    starts = np.array(edges[:-1]) + 1
    centres = np.log2((starts + np.array(edges[1:])) / 2.0)
    distance = np.log2(np.clip(lengths, 1, edges[-1]))[:, None] - centres[None, :]
    width = np.log2((np.array(edges[1:]) + 0.5) / (starts - 0.5))
    bell = np.exp(-0.5 * (distance / spread_octaves) ** 2) * width[None, :]
    bell += 1e-30 * np.eye(len(starts))[range_index(lengths, edges)]
    targets: NDArray[np.float32] = (bell / bell.sum(axis=1, keepdims=True)).astype(np.float32)
    return targets
