"""The fallback follows a model's outcomes, within bounds."""

from random import Random

import pytest

from predictor import histogram
from predictor.histogram import HistogramForecaster
from predictor.onnx_forecaster import Features


def expected(forecaster: HistogramForecaster, model: str) -> float:
    (found,) = forecaster.forecast([Features("any", model)])
    assert found.source == f"histogram:{model}"
    assert abs(sum(found.probabilities) - 1.0) < 1e-9
    return found.expected()


def test_outcomes_outweigh_the_prior() -> None:
    forecaster = HistogramForecaster()
    before = expected(forecaster, "short")
    for _ in range(100):
        forecaster.observe("short", 10)
        forecaster.observe("long", 3_000)
    assert expected(forecaster, "short") < before / 3
    assert expected(forecaster, "long") > 1_000


@pytest.mark.parametrize("limits", [(500,), (100, 500), (64, 100, 1_000_000)])
def test_answers_that_limits_cut_short_do_not_make_forecasts_short(limits: tuple[int, ...]) -> None:
    """Without them, and where they counted as ended, half of all would seem to end within their limits."""
    draw, forecaster = Random(1), HistogramForecaster()
    lengths = [1 + int(draw.lognormvariate(5.5, 1.0)) for _ in range(1_900)]
    for number, length in enumerate(lengths):
        limit = limits[number % len(limits)]
        forecaster.observe("model", min(length, limit), ended=length <= limit)
    (found,) = forecaster.forecast([Features("any", "model")])
    for within in (32, 96, 256, 384):
        if within <= max(limits):
            true = sum(length <= within for length in lengths) / len(lengths)
            assert found.share_within(within) == pytest.approx(true, abs=0.04)


def test_answers_cut_short_at_once_change_nothing() -> None:
    forecaster = HistogramForecaster()
    before = expected(forecaster, "model")
    for _ in range(5_000):
        forecaster.observe("model", 1, ended=False)
    assert expected(forecaster, "model") == pytest.approx(before, rel=0.03)


def test_lengths_out_of_range_are_taken_in() -> None:
    forecaster = HistogramForecaster()
    forecaster.observe("odd", 0)
    forecaster.observe("odd", 10**9)
    forecaster.observe("odd", 10**9, ended=False)
    assert expected(forecaster, "odd") > 0


def test_it_follows_a_model_whose_lengths_change() -> None:
    forecaster = HistogramForecaster()
    for _ in range(5_000):
        forecaster.observe("model", 1_000)
    for _ in range(5_000):
        forecaster.observe("model", 20)
    assert expected(forecaster, "model") < 150


def test_the_least_recently_used_models_are_forgotten() -> None:
    forecaster = HistogramForecaster()
    prior = expected(forecaster, "never seen")
    for index in range(histogram.MAX_MODELS + 1):
        for _ in range(50):
            forecaster.observe(f"model {index}", 3_000)
    assert expected(forecaster, "model 0") == prior
    assert expected(forecaster, f"model {histogram.MAX_MODELS}") > 2 * prior


def test_a_variant_begins_as_its_parent_and_soon_goes_its_own_way() -> None:
    forecaster = HistogramForecaster()
    for _ in range(200):
        forecaster.observe("base", 3_000)

    def forecast() -> float:
        (found,) = forecaster.forecast([Features("any", "variant", parent="base")])
        assert found.source == "histogram:variant"
        return found.expected()

    assert forecast() == expected(forecaster, "base")
    for _ in range(100):
        forecaster.observe("variant", 10)
    assert forecast() < expected(forecaster, "base") / 5
    assert expected(forecaster, "base") > 1_000, "a variant teaches its parent nothing"
