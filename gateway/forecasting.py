"""Forecasts off the event loop: whatever queries wait while one batch runs make up the next.

Outcomes come back here: what they teach, and how far they are from the forecasts. No text outlives its query,
unless an outcome log is given.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import inf
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.domain import Outcome, Query, Status
from gateway.prompt import Chat
from predictor.current import CurrentForecaster
from predictor.drift import DriftWatch
from predictor.errors import ArtifactError
from predictor.forecast import Forecast
from predictor.histogram import HistogramForecaster
from predictor.outcomes import OutcomeLog
from predictor.runtime import Features, Forecaster

log = logging.getLogger(__name__)

MAX_BATCH = 64
MOST_ASKED = 20_000
"""Queries whose outcome is awaited; the oldest are forgotten first."""
LOOK_EVERY_S = 10.0
LEARN_EVERY_S = 0.1
"""Learning a stranger reads every known model, on the thread that others wait for to forecast."""


class Asked(NamedTuple):
    """What was forecast of, until its outcome comes; an answer of `most_tokens` was cut short."""

    features: Features
    most_tokens: float


class Forecasts(Collector):
    """One thread runs the model. If it fails, `fallback` answers, and its name stands in the forecast."""

    def __init__(
        self,
        forecaster: Forecaster,
        fallback: Forecaster,
        *,
        kept: OutcomeLog | None = None,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._forecaster = forecaster
        self._fallback = fallback
        self._kept = kept
        self._look_every_s = look_every_s
        self._learned_s = -inf
        self._waiting: list[tuple[Features, asyncio.Future[Forecast]]] = []
        self._worker: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "forecast")
        self._asked: OrderedDict[str, Asked] = OrderedDict()
        self._watches: dict[str, DriftWatch] = {}

    def start(self) -> None:
        """Look for a new artifact from time to time, and take it up without a restart."""
        if isinstance(self._forecaster, CurrentForecaster):
            self._looking = asyncio.create_task(self._look(self._forecaster), name="artifact")

    @property
    def name(self) -> str:
        return self._forecaster.name

    async def of(self, query: Query) -> Forecast:
        future: asyncio.Future[Forecast] = asyncio.get_running_loop().create_future()
        asked = features(query)
        self._waiting.append((asked, future))
        self._asked[query.id] = Asked(asked, query.sampling.max_tokens or inf)
        if len(self._asked) > MOST_ASKED:
            self._asked.popitem(last=False)
        if self._worker is None:
            self._worker = asyncio.create_task(self._work(), name="forecasts")
        return await future

    def observe(self, outcome: Outcome) -> None:
        """Learns from a whole answer; one that was cut short says little of how long it would have been."""
        asked = self._asked.pop(outcome.query_id, None)
        if outcome.status is not Status.ANSWERED:
            return
        if asked is not None and outcome.completion_tokens >= asked.most_tokens:
            return
        if isinstance(self._fallback, HistogramForecaster):
            self._fallback.observe(outcome.model, outcome.completion_tokens)
        if outcome.forecast is not None:
            who = outcome.forecast.source.split(":", 1)[0]
            self._watches.setdefault(who, DriftWatch()).observe(outcome.forecast, outcome.completion_tokens)
        if asked is not None:
            self._thread.submit(self._learn, asked.features, outcome.completion_tokens)

    def collect(self) -> Iterator[Metric]:
        """How far recent outcomes are from what was forecast, by who forecast it."""
        told = [(who, watch.report()) for who, watch in self._watches.items()]
        for name, text, figure in (
            ("stability_index", "Population stability of outcomes against forecasts", "stability_index"),
            ("p90_coverage", "Share of answers no longer than their p90", "p90_coverage"),
            ("drift", "1 while outcomes are no longer as forecast", "alarm"),
        ):
            family = GaugeMetricFamily(f"mico_forecast_{name}", text, labels=["forecaster"])
            for who, drift in told:
                family.add_metric([who], float(getattr(drift, figure)))
            yield family

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        if self._worker is not None:
            await self._worker
        self._thread.shutdown()

    async def _look(self, current: CurrentForecaster) -> None:
        while True:
            await asyncio.sleep(self._look_every_s)
            try:
                if await asyncio.get_running_loop().run_in_executor(self._thread, current.refresh):
                    log.info("forecasts come from a new artifact, %s", current.name)
            except ArtifactError as error:
                log.warning("the artifact in force stays: %s", error)

    async def _work(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
            queries = [features for features, _ in batch]
            waiting = [future for _, future in batch]
            try:
                forecasts = await asyncio.get_running_loop().run_in_executor(self._thread, self._run, queries)
            except Exception as exc:  # noqa: BLE001 - told to those who wait: nobody else could
                for future in waiting:
                    if not future.done():
                        future.set_exception(exc)
                continue
            for future, forecast in zip(waiting, forecasts, strict=True):
                if not future.done():
                    future.set_result(forecast)
        self._worker = None

    def _run(self, queries: list[Features]) -> list[Forecast]:
        try:
            forecasts = self._forecaster.forecast(queries)
            if len(forecasts) != len(queries):
                raise ValueError(f"{len(forecasts)} forecasts for {len(queries)} queries")
            return forecasts
        except Exception:
            log.exception("the forecaster %s failed", self._forecaster.name)
            return self._fallback.forecast(queries)

    def _learn(self, asked: Features, tokens: int) -> None:
        try:
            if isinstance(self._forecaster, CurrentForecaster) and self._may_learn():
                self._forecaster.observe(asked, tokens)
            if self._kept is not None:
                self._kept.add(asked, tokens)
        except Exception:
            log.exception("nothing was learned from an outcome")

    def _may_learn(self) -> bool:
        now_s = time.monotonic()
        if now_s < self._learned_s + LEARN_EVERY_S:
            return False
        self._learned_s = now_s
        return True


def features(query: Query) -> Features:
    if not isinstance(query.prompt, Chat):
        return Features(text=query.text, model=query.model)
    turns = sum(message.role == "user" for message in query.prompt.messages)
    chars = sum(len(message.content) for message in query.prompt.messages) - len(query.text)
    return Features(text=query.text, model=query.model, turn=max(1, turns), context_chars=chars)
