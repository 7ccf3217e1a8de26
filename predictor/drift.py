"""Detect drift between forecasts and outcomes.

Tracks two figures over recent outcomes: the population stability index between forecast and observed lengths,
and the coverage of the p90. Uses bounded memory and no clock.
"""

from __future__ import annotations

from bisect import bisect_left
from math import log, sqrt
from typing import NamedTuple

from predictor.forecast import Forecast

LENGTH_BOUNDS = (16, 48, 96, 192, 384, 768, 1536)
"""Bounds of eight length classes, coarse enough to be populated by 200 outcomes."""
STABILITY_ALARM = 0.25
"""The usual threshold: below 0.1 the index indicates no change, above 0.25 a large change."""
STATED_COVERAGE = 0.9
COVERAGE_SLACK = 0.03
MIN_OUTCOMES = 200
FADE_AT_OUTCOMES = 5_000.0
"""Counts are halved at this number of outcomes, so that older outcomes decay."""
SMOOTHING = 0.5


class Drift(NamedTuple):
    """Drift figures over recent outcomes."""

    outcomes: float
    stability_index: float
    p90_coverage: float
    alarm: bool


class DriftMonitor:
    """Accumulate forecasts with their outcomes. Older outcomes decay."""

    def __init__(self) -> None:
        self._forecast_counts = [0.0] * (len(LENGTH_BOUNDS) + 1)
        self._observed_counts = [0.0] * (len(LENGTH_BOUNDS) + 1)
        self._within_p90 = 0.0
        self._p90_outcomes = 0.0  # outcomes whose p90 was below the limit
        self._outcomes = 0.0

    def observe(self, forecast: Forecast, tokens: int, limit: int | None = None) -> None:
        """Add a forecast and its outcome of `tokens`. `limit` is the maximum length of the answer.

        Include answers that reach their limit: without them, observed lengths are biased towards short ones.
        """
        shares = forecast.shares_within(LENGTH_BOUNDS)
        if limit is not None:
            shares = [
                1.0 if bound >= limit else share for bound, share in zip(LENGTH_BOUNDS, shares, strict=True)
            ]
        classes = zip(self._forecast_counts, [0.0, *shares], [*shares, 1.0], strict=True)
        self._forecast_counts = [count + (high - low) for count, low, high in classes]
        self._observed_counts[bisect_left(LENGTH_BOUNDS, tokens)] += 1.0
        p90 = forecast.summary.p90
        if limit is None or p90 < limit:
            self._within_p90 += tokens <= p90
            self._p90_outcomes += 1.0
        self._outcomes += 1.0
        if self._outcomes >= FADE_AT_OUTCOMES:
            self._fade()

    def report(self) -> Drift:
        """Return the current figures.

        An alarm requires MIN_OUTCOMES and either an index above STABILITY_ALARM or a coverage error above
        COVERAGE_SLACK plus three standard errors.
        """
        if self._outcomes == 0.0:
            return Drift(0.0, 0.0, STATED_COVERAGE, alarm=False)
        coverage, index = self._p90_coverage(), self._stability_index()
        drifted = self._outcomes >= MIN_OUTCOMES and index > STABILITY_ALARM
        return Drift(self._outcomes, index, coverage, alarm=drifted or self._is_miscovered(coverage))

    def _p90_coverage(self) -> float:
        return self._within_p90 / self._p90_outcomes if self._p90_outcomes else STATED_COVERAGE

    def _is_miscovered(self, coverage: float) -> bool:
        if self._p90_outcomes < MIN_OUTCOMES:
            return False
        three_sigma = 3.0 * sqrt(STATED_COVERAGE * (1.0 - STATED_COVERAGE) / self._p90_outcomes)
        return abs(coverage - STATED_COVERAGE) > COVERAGE_SLACK + three_sigma

    def _stability_index(self) -> float:
        """Return Σ (observed − forecast) · ln(observed / forecast) over the classes, as shares."""
        total = self._outcomes + SMOOTHING * len(self._observed_counts)
        pairs = zip(self._observed_counts, self._forecast_counts, strict=True)
        shares = [
            ((observed + SMOOTHING) / total, (forecast + SMOOTHING) / total) for observed, forecast in pairs
        ]
        return sum((observed - forecast) * log(observed / forecast) for observed, forecast in shares)

    def _fade(self) -> None:
        self._forecast_counts = [count / 2.0 for count in self._forecast_counts]
        self._observed_counts = [count / 2.0 for count in self._observed_counts]
        self._within_p90 /= 2.0
        self._p90_outcomes /= 2.0
        self._outcomes /= 2.0
