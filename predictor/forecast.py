"""Represent a forecast: the length of an answer as a distribution over ranges of lengths.

No I/O. Within a range, every integer length is equally likely.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import ceil
from operator import mul
from typing import NamedTuple

MIN_REMAINING_TOKENS = 1.0
CURVE_POINTS = 24
CURVE_MIN_SURVIVAL = 1e-3
"""Curves end at the last edge that more than this fraction of answers exceeds."""


class RemainingPoint(NamedTuple):
    """The remaining length in tokens after `generated` tokens."""

    generated: int
    expected_remaining: float
    p90_remaining: int


class Summary(NamedTuple):
    """The recorded figures of a forecast: the expected length and two quantiles, in tokens."""

    expected: float
    p50: int
    p90: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """A distribution over lengths in tokens: `probabilities[i]` is P(edges[i] < L <= edges[i+1]).

    `cumulative[i]` is P(L <= edges[i]), precomputed since a query's forecast is read about a dozen times.
    """

    edges: tuple[int, ...]
    probabilities: tuple[float, ...]
    source: str
    cumulative: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _summary: Summary | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cumulative", tuple(accumulate(self.probabilities, initial=0.0)))

    def expected(self, generated: int = 0) -> float:
        """Return the expected remaining tokens, E[L - t | L > t] with t = `generated`, at least 1."""
        if generated <= self.edges[0] and self.cumulative[-1] > 0.0:
            moment: float = sum(map(mul, self.probabilities, _range_means(self.edges)))
            return max(MIN_REMAINING_TOKENS, moment / self.cumulative[-1] - generated)
        mass = moment = 0.0
        for low, high, probability in self._ranges_above(generated):
            mass += probability
            moment += probability * (low + high + 1) / 2
        if mass <= 0.0:
            return MIN_REMAINING_TOKENS
        return max(MIN_REMAINING_TOKENS, moment / mass - generated)

    def quantile(self, q: float, generated: int = 0) -> int:
        """Return the smallest total length n, not remaining length, with P(L <= n | L > generated) >= q."""
        if generated <= self.edges[0] and self.cumulative[-1] > 0.0:
            return self._length_at(q * self.cumulative[-1])
        parts = self._ranges_above(generated)
        target = q * sum(probability for _, _, probability in parts)
        cumulative = 0.0
        for low, high, probability in parts:
            if probability > 0.0 and cumulative + probability >= target:
                share = max(0.0, (target - cumulative) / probability)
                return low + max(1, ceil(share * (high - low) - 1e-9))
            cumulative += probability
        return max(generated + 1, parts[-1][1] if parts else 0)

    @property
    def summary(self) -> Summary:
        """Return the recorded figures, computed on first use."""
        if self._summary is None:
            found = Summary(self.expected(), self.quantile(0.5), self.quantile(0.9))
            object.__setattr__(self, "_summary", found)
            return found
        return self._summary

    def capped(self, max_tokens: int) -> Forecast:
        """Return the forecast of min(length, `max_tokens`)."""
        limit = max(1, max_tokens)
        if limit >= self.edges[-1]:
            return self
        edges = [*self.edges[: bisect_left(self.edges, limit - 1)], limit - 1, limit]
        if edges[0] == edges[1]:
            edges = edges[1:]
        below = [*self.cumulative[: len(edges) - 2], self.share_within(edges[-2])]
        inner = [right - left for left, right in pairwise(below)]
        return replace(self, edges=tuple(edges), probabilities=(*inner, 1.0 - below[-1]))

    def remaining_curve(self) -> tuple[RemainingPoint, ...]:
        """Return at most CURVE_POINTS points, at edges, which a gateway sends to a site with a query."""
        return tuple(map(RemainingPoint, *self.remaining_columns()))

    def remaining_columns(self) -> tuple[list[int], list[float], list[int]]:
        """Return the curve as columns. Runs for every query, so it avoids function calls in its loops."""
        cumulative, edges, probabilities = self.cumulative, self.edges, self.probabilities
        total, last, above_p90 = cumulative[-1], len(probabilities), 1
        moments = tuple(accumulate(map(mul, probabilities, _range_means(edges)), initial=0.0))
        moment, indices = moments[-1], self._curve_edges()
        starts = [edges[index] for index in indices]
        expected = [
            rest
            if (rest := (moment - moments[index]) / (total - cumulative[index]) - edges[index])
            > MIN_REMAINING_TOKENS
            else MIN_REMAINING_TOKENS
            for index in indices
        ]
        p90 = []
        for index in indices:
            start, target = edges[index], total - 0.1 * (total - cumulative[index])
            if cumulative[above_p90] < target:  # non-decreasing, and usually unchanged
                above_p90 = bisect_left(cumulative, target, above_p90, last)
            low, high = edges[above_p90 - 1], edges[above_p90]
            missing, here = target - cumulative[above_p90 - 1], probabilities[above_p90 - 1]
            end = low + ceil(missing / here * (high - low) - 1e-9) if missing < here else high
            p90.append(end - start if end > start else 1)
        return starts, expected, p90

    def _curve_edges(self) -> Sequence[int]:
        """Return the indices of a curve's edges: evenly spaced, up to the end by CURVE_MIN_SURVIVAL."""
        visible_mass = self.cumulative[-1] * (1.0 - CURVE_MIN_SURVIVAL)
        return _evenly(max(0, bisect_left(self.cumulative, visible_mass) - 1))

    def _ranges_above(self, generated: int) -> list[tuple[int, int, float]]:
        """Return (low, high, probability) of the ranges above `generated`; the first one is truncated."""
        if generated <= self.edges[0]:
            return list(zip(self.edges, self.edges[1:], self.probabilities, strict=False))
        first = max(0, bisect_right(self.edges, generated) - 1)
        parts = []
        for index in range(first, len(self.probabilities)):
            low, high = self.edges[index], self.edges[index + 1]
            start = max(low, generated)
            parts.append((start, high, self.probabilities[index] * (high - start) / (high - low)))
        return parts

    def share_within(self, length: float) -> float:
        """Return P(L <= length), interpolated linearly within a range."""
        index = max(0, bisect_right(self.edges, length) - 1)
        if index >= len(self.probabilities):
            return 1.0
        low, high = self.edges[index], self.edges[index + 1]
        return self.cumulative[index] + self.probabilities[index] * (length - low) / (high - low)

    def shares_within(self, lengths: tuple[int, ...]) -> list[float]:
        """Return P(L <= length) for each length. Positions among the edges are cached for all forecasts."""
        cumulative, probabilities = self.cumulative, (*self.probabilities, 0.0)
        return [
            cumulative[index] + probabilities[index] * part for index, part in _places(self.edges, lengths)
        ]

    def _length_at(self, target: float) -> int:
        """Return the smallest length whose cumulative probability is at least `target`."""
        index = min(bisect_left(self.cumulative, target, 1), len(self.probabilities)) - 1
        low, high, mass = self.edges[index], self.edges[index + 1], self.probabilities[index]
        share = (target - self.cumulative[index]) / mass if mass > 0.0 else 1.0
        return low + max(1, ceil(min(1.0, share) * (high - low) - 1e-9))


@lru_cache(maxsize=1024)
def _evenly(last: int) -> Sequence[int]:
    """Return CURVE_POINTS evenly spaced integers from 0 to `last`, or all of them if there are fewer."""
    if last < CURVE_POINTS:
        return range(last + 1)
    return sorted({round(step * last / (CURVE_POINTS - 1)) for step in range(CURVE_POINTS)})


@lru_cache(maxsize=256)
def _range_means(edges: tuple[int, ...]) -> tuple[float, ...]:
    """Return the mean length of each range."""
    return tuple((low + high + 1) / 2 for low, high in pairwise(edges))


@lru_cache(maxsize=256)
def _places(edges: tuple[int, ...], lengths: tuple[int, ...]) -> list[tuple[int, float]]:
    """Return the range index of each length, and the fraction of that range at or below the length."""
    last = len(edges) - 1
    found = []
    for length in lengths:
        index = max(0, bisect_right(edges, length) - 1)
        width = edges[index + 1] - edges[index] if index < last else 1
        found.append((index, (length - edges[index]) / width if index < last else 0.0))
    return found
