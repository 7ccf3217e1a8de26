"""Forecasts off the event loop: whatever queries wait while one batch runs make up the next."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from gateway.domain import Query
from gateway.prompt import Chat
from predictor.forecast import Forecast
from predictor.runtime import Features, Forecaster

log = logging.getLogger(__name__)

MAX_BATCH = 64


class Forecasts:
    """One thread runs the model. If it fails, `fallback` answers, and its name stands in the forecast."""

    def __init__(self, forecaster: Forecaster, fallback: Forecaster) -> None:
        self._forecaster = forecaster
        self._fallback = fallback
        self._waiting: list[tuple[Features, asyncio.Future[Forecast]]] = []
        self._worker: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "forecast")

    @property
    def name(self) -> str:
        return self._forecaster.name

    async def of(self, query: Query) -> Forecast:
        future: asyncio.Future[Forecast] = asyncio.get_running_loop().create_future()
        self._waiting.append((features(query), future))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work(), name="forecasts")
        return await future

    async def close(self) -> None:
        if self._worker is not None:
            await self._worker
        self._thread.shutdown()

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


def features(query: Query) -> Features:
    if not isinstance(query.prompt, Chat):
        return Features(text=query.text, model=query.model)
    turns = sum(message.role == "user" for message in query.prompt.messages)
    chars = sum(len(message.content) for message in query.prompt.messages) - len(query.text)
    return Features(text=query.text, model=query.model, turn=max(1, turns), context_chars=chars)
