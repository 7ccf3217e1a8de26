"""Drift raises no alarm while outcomes match the forecasts, and raises one when they do not."""

import random

import pytest

from predictor.drift import FADE_AT_OUTCOMES, MIN_OUTCOMES, DriftMonitor
from predictor.forecast import Forecast

EVEN = Forecast((0, 100, 200, 400, 800), (0.25, 0.25, 0.25, 0.25), "even")


def outcomes(count: int, stretch: float = 1.0, seed: int = 3) -> list[int]:
    """Lengths drawn from the forecast itself, then stretched."""
    chance = random.Random(seed)
    return [max(1, round(stretch * EVEN.quantile(chance.uniform(0.001, 0.999)))) for _ in range(count)]


def watched(lengths: list[int]) -> DriftMonitor:
    """Return a monitor of lengths drawn from the forecast itself, then stretched."""
    watch = DriftMonitor()
    for tokens in lengths:
        watch.observe(EVEN, tokens)
    return watch


def test_nothing_seen_is_no_alarm() -> None:
    assert not DriftMonitor().report().alarm


def test_outcomes_as_forecast_raise_no_alarm() -> None:
    report = watched(outcomes(2_000)).report()
    assert not report.alarm
    assert report.stability_index < 0.1
    assert report.p90_coverage == pytest.approx(0.9, abs=0.03)


def test_longer_answers_raise_the_alarm() -> None:
    report = watched(outcomes(2_000, stretch=2.0)).report()
    assert report.alarm
    assert report.p90_coverage < 0.8


@pytest.mark.parametrize("limit", [50, 150, 300, 700, 5_000])
def test_answers_up_to_a_limit_raise_no_alarm_where_they_are_as_forecast(limit: int) -> None:
    """Clients that limit answers raised it for ever: those that reached the limit were left out."""
    watch = DriftMonitor()
    for tokens in outcomes(2_000):
        watch.observe(EVEN, min(tokens, limit), limit)
    report = watch.report()
    assert not report.alarm
    assert report.stability_index < 0.1
    assert report.p90_coverage == pytest.approx(0.9, abs=0.03)


def test_longer_answers_raise_the_alarm_also_where_a_limit_hides_by_how_much() -> None:
    watch = DriftMonitor()
    for tokens in outcomes(2_000, stretch=3.0):
        watch.observe(EVEN, min(tokens, 300), 300)
    assert watch.report().alarm


def test_a_few_odd_answers_do_not() -> None:
    assert not watched([5_000] * (MIN_OUTCOMES - 1)).report().alarm


def test_an_old_change_fades() -> None:
    watch = watched(outcomes(int(FADE_AT_OUTCOMES), stretch=3.0))
    assert watch.report().alarm
    for tokens in outcomes(8 * int(FADE_AT_OUTCOMES), seed=4):
        watch.observe(EVEN, tokens)
    assert not watch.report().alarm
    assert watch.report().outcomes <= FADE_AT_OUTCOMES
