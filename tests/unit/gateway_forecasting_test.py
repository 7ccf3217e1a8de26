"""Forecasts off the event loop: whatever the forecaster does, every query gets one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gateway.domain import Caller, Query, Sampling
from gateway.forecasting import Forecasts
from predictor.forecast import Forecast
from predictor.histogram import HistogramForecaster
from predictor.runtime import Features


class Forgetful:
    """Answers for all queries but the last."""

    name = "forgetful"

    def forecast(self, queries: Sequence[Features]) -> list[Forecast]:
        return [Forecast((0, 100), (1.0,), self.name) for _ in queries[1:]]


def query(name: str) -> Query:
    return Query(name, "m", "hi", Sampling(), Caller("k", "t"), 0.0, 100.0)


def test_a_forecaster_that_answers_too_few_is_replaced_by_the_fallback() -> None:
    async def scenario() -> None:
        forecasts = Forecasts(Forgetful(), HistogramForecaster())
        async with asyncio.timeout(10.0):
            found = await asyncio.gather(*(forecasts.of(query(f"q{i}")) for i in range(3)))
        assert {each.source for each in found} == {"histogram:m"}
        await forecasts.close()

    asyncio.run(scenario())


class Broken:
    name = "broken"

    def forecast(self, queries: Sequence[Features]) -> list[Forecast]:
        raise RuntimeError("no such luck")


def test_a_failure_of_the_fallback_reaches_those_who_wait_and_those_who_come_later() -> None:
    async def scenario() -> None:
        forecasts = Forecasts(Broken(), Broken())
        for round_ in range(2):
            async with asyncio.timeout(10.0):
                waiting = (forecasts.of(query(f"q{round_}{i}")) for i in range(3))
                found = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(isinstance(each, RuntimeError) for each in found)
        await forecasts.close()

    asyncio.run(scenario())
