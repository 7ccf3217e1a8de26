"""Drift: whether outcomes still look like the forecasts that were made of them.

Two figures over recent outcomes: the population stability index between what was forecast and what came, and
the share that stayed within the p90. Bounded memory; no clock.
"""

from __future__ import annotations

from bisect import bisect_left
from math import log, sqrt
from typing import NamedTuple

from predictor.forecast import Forecast

BOUNDS = (16, 48, 96, 192, 384, 768, 1536)
"""Eight classes of length, coarse enough that two hundred outcomes fill them."""
STABILITY_ALARM = 0.25
"""The usual reading of the index: below 0.1 nothing has changed, above 0.25 much has."""
STATED_COVERAGE = 0.9
COVERAGE_SLACK = 0.03
LEAST_OUTCOMES = 200
FADE_AT_OUTCOMES = 5_000.0
SMOOTHING = 0.5


class Drift(NamedTuple):
    """What recent outcomes say of the forecasts."""

    outcomes: float
    stability_index: float
    p90_coverage: float
    alarm: bool


class DriftWatch:
    """Takes in forecasts with their outcomes; older ones fade."""

    def __init__(self) -> None:
        self._forecast = [0.0] * (len(BOUNDS) + 1)
        self._came = [0.0] * (len(BOUNDS) + 1)
        self._within = 0.0
        self._outcomes = 0.0

    def observe(self, forecast: Forecast, tokens: int) -> None:
        """A query that was forecast so, and answered in `tokens` without being cut short."""
        reached = [forecast.share_within(bound) for bound in BOUNDS]
        for index, (low, high) in enumerate(zip([0.0, *reached], [*reached, 1.0], strict=True)):
            self._forecast[index] += high - low
        self._came[bisect_left(BOUNDS, tokens)] += 1.0
        self._within += tokens <= forecast.quantile(STATED_COVERAGE)
        self._outcomes += 1.0
        if self._outcomes >= FADE_AT_OUTCOMES:
            self._fade()

    def report(self) -> Drift:
        """The figures now; the alarm waits for enough outcomes, and for more than chance."""
        if self._outcomes == 0.0:
            return Drift(0.0, 0.0, STATED_COVERAGE, alarm=False)
        coverage = self._within / self._outcomes
        chance = 3.0 * sqrt(STATED_COVERAGE * (1.0 - STATED_COVERAGE) / self._outcomes)
        strayed = abs(coverage - STATED_COVERAGE) > COVERAGE_SLACK + chance
        index = self._stability_index()
        enough = self._outcomes >= LEAST_OUTCOMES
        return Drift(self._outcomes, index, coverage, alarm=enough and (strayed or index > STABILITY_ALARM))

    def _stability_index(self) -> float:
        """Σ (came − forecast) · ln(came / forecast) over the classes, as shares."""
        total = self._outcomes + SMOOTHING * len(self._came)
        pairs = zip(self._came, self._forecast, strict=True)
        shares = [((came + SMOOTHING) / total, (told + SMOOTHING) / total) for came, told in pairs]
        return sum((came - told) * log(came / told) for came, told in shares)

    def _fade(self) -> None:
        self._forecast = [count / 2.0 for count in self._forecast]
        self._came = [count / 2.0 for count in self._came]
        self._within /= 2.0
        self._outcomes /= 2.0
