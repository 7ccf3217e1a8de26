"""The load figures: a fitted cost that predicts, rates of busy time, a condensed list that rises."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from site_engine.core.load import CostFit, IterationCost, Meter, condense
from site_engine.core.remaining_curve import RemainingCurve, RemainingPoint


def test_the_fit_finds_the_cost_and_predicts_other_loads() -> None:
    true = IterationCost(0.004, 0.0002, 0.00015, 1.5e-7)
    rnd, fit = random.Random(0), CostFit()
    for _ in range(400):
        rows, chunk, kv = rnd.randint(1, 64), rnd.choice([0, 0, 64, 200]), rnd.randint(100, 60_000)
        noise = rnd.uniform(0.95, 1.05)
        fit.observe(rows, rows + chunk, kv, true.seconds(rows, rows + chunk, kv) * noise)
    found = fit.cost()
    assert found.seconds(128, 128, 90_000) == pytest.approx(true.seconds(128, 128, 90_000), rel=0.15)
    assert found.seconds(1, 1, 100) == pytest.approx(true.seconds(1, 1, 100), rel=0.25)


def test_the_cost_of_a_prompts_token_is_known_however_long_none_has_come() -> None:
    """Decodes alone have as many tokens as rows: which of the two takes the time cannot be told from them."""
    true = IterationCost(0.004, 0.0001, 0.00002, 5e-8)
    rnd, fit = random.Random(2), CostFit()
    for _ in range(200):
        rows, chunk, kv = rnd.randint(1, 64), rnd.choice([0, 200, 4000]), rnd.randint(100, 60_000)
        fit.observe(rows, rows + chunk, kv, true.seconds(rows, rows + chunk, kv))
    for _ in range(5000):
        rows, kv = rnd.randint(8, 10), rnd.randint(100, 60_000)
        fit.observe(rows, rows, kv, true.seconds(rows, rows, kv))
    assert fit.cost().per_token_s == pytest.approx(true.per_token_s, rel=0.1)


def test_prompts_that_are_alike_in_all_iterations_leave_the_fixed_part_known() -> None:
    true = IterationCost(0.004, 0.0001, 0.00002, 5e-8)
    rnd, fit = random.Random(3), CostFit()
    for at in range(5000):
        rows, chunk = 16, 200 if at > 100 else rnd.choice([0, 200, 4000])
        fit.observe(rows, rows + chunk, 40_000, true.seconds(rows, rows + chunk, 40_000))
    found = fit.cost()
    assert found.per_token_s == pytest.approx(true.per_token_s, rel=0.1)


def test_no_coefficient_is_ever_negative() -> None:
    rnd, fit = random.Random(1), CostFit()
    assert min(fit.cost()) >= 0.0
    for _ in range(200):
        fit.observe(rnd.randint(1, 9), rnd.randint(1, 99), rnd.randint(1, 999), rnd.uniform(0.001, 0.01))
        assert min(fit.cost()) >= 0.0


def test_rates_are_of_busy_time() -> None:
    meter = Meter()
    assert (meter.tokens_per_s, meter.seconds_per_iteration) == (0.0, 0.0)
    for _ in range(100):
        meter.iteration(rows=8, tokens=8, kv_tokens=80, sampled=8, seconds=0.01)
    assert meter.tokens_per_s == pytest.approx(800, rel=1e-6)
    assert meter.seconds_per_iteration == pytest.approx(0.01, rel=1e-6)
    assert meter.tokens_total == 800


@given(st.lists(st.floats(1, 5000), max_size=300))
def test_the_condensed_list_is_short_and_rises(remaining: list[float]) -> None:
    values, weight = condense(remaining)
    assert len(values) <= 64
    assert list(values) == sorted(values)
    assert len(values) * weight >= len(remaining) > (len(values) - 1) * weight or not remaining


@given(st.integers(0, 5000))
def test_a_remaining_curve_is_linear_between_its_points_and_never_below_one(generated: int) -> None:
    curve = RemainingCurve(
        (RemainingPoint(0, 100.0, 300), RemainingPoint(100, 50.0, 200), RemainingPoint(200, 0.0, 0))
    )
    assert curve.expected(generated) >= 1.0
    assert curve.p90(generated) >= 1
    if generated <= 100:
        assert curve.expected(generated) == pytest.approx(100 - generated / 2)
    assert curve.expected(10_000) == 1.0


def test_a_curve_that_does_not_rise_is_refused() -> None:
    with pytest.raises(ValueError, match="rise"):
        RemainingCurve((RemainingPoint(5, 1.0, 1), RemainingPoint(5, 1.0, 1)))
