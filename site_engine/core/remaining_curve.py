"""The forecast of a request's remaining tokens, and the distribution of its length derived from it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import exp, expm1, inf, log
from typing import NamedTuple

LIKELY_LENGTHS = 8
"""Equally likely lengths that represent a request's length distribution when memory is reserved."""


class RemainingPoint(NamedTuple):
    """The expected number of remaining tokens after `generated` tokens, and its 90% quantile."""

    generated: int
    expected: float
    p90: int


class RemainingLine(NamedTuple):
    """A segment of a curve for [begins, ends) generated tokens: `expected` tokens remain at its begin, and
    `slope` more for each token generated since.
    """

    begins: int
    ends: float
    expected: float
    slope: float


@dataclass(frozen=True, slots=True)
class RemainingCurve:
    """The forecast of the remaining response by tokens generated; linear between points, at least 1."""

    points: tuple[RemainingPoint, ...] = (
        RemainingPoint(0, 200.0, 500),
        RemainingPoint(200, 150.0, 400),
        RemainingPoint(1000, 300.0, 700),
    )

    def __post_init__(self) -> None:
        at = [point.generated for point in self.points]
        if not at or at != sorted(set(at)):
            raise ValueError(f"the points of a forecast must rise in `generated`, got {at}")

    @classmethod
    def exactly(cls, tokens: int) -> RemainingCurve:
        """Return the curve of a response whose length is known."""
        first, last = RemainingPoint(0, float(tokens), tokens), RemainingPoint(tokens - 1, 1.0, 1)
        return cls((first, last) if tokens > 1 else (first,))

    def expected(self, generated: int) -> float:
        begins, _, expected, slope = self.line(generated)
        return max(1.0, expected + slope * (generated - begins))

    def line(self, generated: int) -> RemainingLine:
        """Return the segment at `generated` tokens. Callers must clamp its values to at least 1."""
        points = self.points
        after = bisect_right(points, (generated, inf))
        if after == 0:
            return RemainingLine(0, points[0].generated, points[0].expected, 0.0)
        low = points[after - 1]
        if after == len(points):
            return RemainingLine(low.generated, inf, low.expected, 0.0)
        high = points[after]
        slope = (high.expected - low.expected) / (high.generated - low.generated)
        return RemainingLine(low.generated, high.generated, low.expected, slope)

    def p90(self, generated: int) -> int:
        low, high, part = self._between(generated)
        return max(1, round(low.p90 + (high.p90 - low.p90) * part))

    def typical(self) -> float:
        """Return 1 / E[1 / L], the harmonic mean of the whole length L.

        Latency per token divides a second of waiting by L, so this is the length that weighs waiting. The
        distribution is recovered from the curve (Hall and Wellner, 1981): lengths between two points count as
        equal, and the share that ends there is what explains the change of the mean.
        """
        left, inverse = 1.0, 0.0
        for low, high in pairwise(self.points):
            middle = (low.generated + high.generated + 1) / 2
            above, beyond = low.generated + low.expected - middle, high.generated + high.expected - middle
            still = left * min(1.0, max(0.0, above / beyond)) if beyond > 0.0 else left
            inverse += (left - still) / middle
            left = still
        last = self.points[-1]
        return 1.0 / (inverse + left / max(1.0, last.generated + last.expected))

    def _between(self, generated: int) -> tuple[RemainingPoint, RemainingPoint, float]:
        points = self.points
        after = bisect_right(points, (generated, inf))
        if after in {0, len(points)}:
            edge = points[0] if after == 0 else points[-1]
            return edge, edge, 0.0
        low, high = points[after - 1], points[after]
        return low, high, (generated - low.generated) / (high.generated - low.generated)


@lru_cache(maxsize=4096)
def likely_lengths(curve: RemainingCurve) -> tuple[float, ...]:
    """Return equally likely lengths of the whole response, ascending: the middles of its quantiles.

    The mean m of what remains tells the share S of the lengths that are longer than t (Hall and Wellner,
    1981): S(t) = m(0) / m(t) x exp(-integral of 1 / m until t). Between points, where m is linear,
    S x m ^ (1 + 1 / slope) is constant.
    """
    longer = [1 - (at + 0.5) / LIKELY_LENGTHS for at in range(LIKELY_LENGTHS)]
    lengths, left = list[float](), 1.0
    for low, high in pairwise(curve.points):
        mean, beyond = max(1.0, low.expected), max(1.0, high.expected)
        tokens = high.generated - low.generated
        slope = (beyond - mean) / tokens
        if slope <= -1.0:
            continue  # no answer ends here
        still = left * exp(-tokens / mean if slope == 0.0 else (1 + 1 / slope) * log(mean / beyond))
        for share in longer[len(lengths) :]:
            if share <= still:
                break
            gone = log(left / share)
            more = gone if slope == 0.0 else expm1(gone * slope / (1 + slope)) / slope
            lengths.append(low.generated + mean * more)
        left = still
    last = curve.points[-1]
    rest = max(1.0, last.expected) - 1.0
    return (*lengths, *(last.generated + 1.0 + rest * log(left / share) for share in longer[len(lengths) :]))
