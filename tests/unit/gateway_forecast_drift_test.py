"""Answers that a query's own limit ends are compared with their forecasts up to it."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from gateway.ending import Ending
from gateway.query.forecasting import ForecastService
from predictor.histogram import HistogramForecaster
from predictor.onnx_forecaster import Features
from tests.unit.gateway_forecasting_test import outcome, query, sample

LIMIT = 64


def drift_of(ends: list[tuple[str, int, str]], limit: int | None = LIMIT) -> dict[str, float]:
    """Return the drift after answers of these ids, tokens and finish reasons, all of queries with a limit."""

    async def scenario() -> dict[str, float]:
        forecasts = ForecastService(HistogramForecaster(), HistogramForecaster())
        for name, tokens, reason in ends:
            told = await forecasts.request(query(name))
            ended, ending = outcome(name, tokens, forecast=told), Ending(finish_reasons=(reason,))
            forecasts.observe(msgspec.structs.replace(ended, ending=ending, max_tokens=limit))
        await forecasts.close()
        return sample(forecasts, "mico_forecast_drift")

    return asyncio.run(scenario())


def test_answers_as_forecast_raise_no_drift_where_clients_limit_them() -> None:
    chance, ends = random.Random(5), []
    (told,) = HistogramForecaster().forecast([Features("hi", "m")])
    for number in range(600):
        tokens = told.quantile(chance.uniform(0.001, 0.999))
        ends.append((f"q{number}", min(tokens, LIMIT), "length" if tokens >= LIMIT else "stop"))
    assert drift_of(ends) == {"histogram": 0.0}


@pytest.mark.parametrize(
    ("tokens", "reason", "limit"),
    [(5, "length", LIMIT), (LIMIT, "content_filter", LIMIT), (5, "length", None)],
)
def test_what_a_budget_a_site_or_a_filter_cut_is_not_compared(
    tokens: int, reason: str, limit: int | None
) -> None:
    assert drift_of([("q", tokens, reason)], limit) == {}
