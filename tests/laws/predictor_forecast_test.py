"""A forecast is a distribution: its summaries agree with enumerating every length, whatever its shape."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.data.labels import log_spaced_edges
from predictor.forecast import CURVE_POINTS, Forecast


@st.composite
def forecasts(draw: st.DrawFn) -> Forecast:
    steps = draw(st.lists(st.integers(1, 40), min_size=1, max_size=30))
    weights = draw(
        st.lists(st.floats(0, 1), min_size=len(steps), max_size=len(steps)).filter(lambda w: sum(w) > 0.01)
    )
    edges = [0]
    for step in steps:
        edges.append(edges[-1] + step)
    return Forecast(tuple(edges), tuple(weight / sum(weights) for weight in weights), "drawn")


def each_length(forecast: Forecast) -> dict[int, float]:
    """The same distribution, one whole length at a time."""
    mass = {}
    for low, high, probability in zip(
        forecast.edges, forecast.edges[1:], forecast.probabilities, strict=False
    ):
        mass.update(dict.fromkeys(range(low + 1, high + 1), probability / (high - low)))
    return mass


@given(forecasts(), st.integers(0, 300))
def test_the_expected_rest_is_the_mean_over_the_lengths_still_possible(
    forecast: Forecast, generated: int
) -> None:
    left = {length: p for length, p in each_length(forecast).items() if length > generated}
    total = sum(left.values())
    truth = sum(length * p for length, p in left.items()) / total - generated if total > 1e-9 else 1.0
    if total > 1e-9 or total == 0.0:
        assert forecast.expected(generated) == pytest.approx(max(1.0, truth), rel=1e-6)
    assert forecast.expected(generated) >= 1.0


@given(forecasts(), st.floats(0.01, 0.99), st.integers(0, 100))
def test_a_quantile_is_the_least_length_that_covers_its_share(
    forecast: Forecast, q: float, generated: int
) -> None:
    found = forecast.quantile(q, generated)
    left = {length: p for length, p in each_length(forecast).items() if length > generated}
    total = sum(left.values())
    assert found > generated
    if total > 1e-6:
        reached = sum(p for length, p in left.items() if length <= found) / total
        before = sum(p for length, p in left.items() if length < found) / total
        assert reached >= q - 1e-6
        assert before < q + 1e-6


@given(forecasts(), st.integers(0, 200))
def test_quantiles_never_fall_as_their_share_rises(forecast: Forecast, generated: int) -> None:
    shares = [0.05, 0.25, 0.5, 0.75, 0.9, 0.99]
    bounds = [forecast.quantile(share, generated) for share in shares]
    assert bounds == sorted(bounds)


@given(forecasts(), st.integers(1, 400))
def test_a_cap_moves_what_lies_beyond_onto_the_cap_and_leaves_the_rest(forecast: Forecast, cap: int) -> None:
    capped = forecast.capped(cap)
    truth: dict[int, float] = {}
    for length, p in each_length(forecast).items():
        truth[min(length, cap)] = truth.get(min(length, cap), 0.0) + p
    assert sum(capped.probabilities) == pytest.approx(1.0)
    assert list(capped.edges) == sorted(set(capped.edges))
    assert capped.edges[-1] <= max(cap, forecast.edges[-1])
    for length, p in each_length(capped).items():
        assert p == pytest.approx(truth.get(length, 0.0), abs=1e-9)
    assert capped.quantile(0.99) <= cap


@given(forecasts())
def test_the_curve_agrees_with_the_forecast(forecast: Forecast) -> None:
    curve = forecast.remaining_curve()
    assert 1 <= len(curve) <= CURVE_POINTS
    assert curve[0].generated == 0
    assert [point.generated for point in curve] == sorted({point.generated for point in curve})
    for point in curve:
        assert point.expected_remaining == pytest.approx(forecast.expected(point.generated), rel=1e-6)
        remaining = forecast.quantile(0.9, point.generated) - point.generated
        assert (
            abs(point.p90_remaining - remaining) <= 1
            or forecast.quantile(0.9, point.generated) in forecast.edges
        )


def test_a_fine_forecast_still_gives_a_short_curve() -> None:
    edges = log_spaced_edges()
    even = Forecast(edges, tuple(1 / (len(edges) - 1) for _ in edges[1:]), "even")
    assert len(even.remaining_curve()) == CURVE_POINTS


def test_an_outlived_forecast_still_expects_a_token() -> None:
    short = Forecast((0, 10, 20), (1.0, 0.0), "short")
    assert short.expected(10) == 1.0
    assert short.expected(500) == 1.0
    assert short.quantile(0.9, 500) == 501
