"""Forecasts on a thread: whatever queries wait while one batch runs make up the next. One that is answered
alone, as the one before it, is forecast where it is asked.

Outcomes come back here: what they teach, and how far they are from the forecasts. No text outlives its query,
unless an outcome log is given.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import inf
from queue import SimpleQueue
from threading import BoundedSemaphore, Thread
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.domain import Outcome, Query, Status
from gateway.prompt import Chat
from predictor.drift import DriftMonitor
from predictor.errors import ArtifactError
from predictor.forecast import Forecast
from predictor.histogram import HistogramForecaster
from predictor.hot_reload import HotReloadForecaster
from predictor.onnx_forecaster import Features, Forecaster
from predictor.outcome_log import OutcomeLog

log = logging.getLogger(__name__)

MAX_BATCH = 64
HELD_S = 0.002
"""A query that is answered alone may hold the loop so long, by what texts as long have shown: that saves
waking a thread and being woken by it, and what is in the caches of one processor serves on.
"""
MOST_ASKED = 20_000
"""Queries whose outcome is awaited; the oldest are forgotten first."""
LOOK_EVERY_S = 10.0
LEARNING_REST = 50.0
"""Learning a stranger reads every known model: it rests so many times as long as it took, at 2% of a core,
and longer and longer as each outcome adds less to what is known.
"""
FIRST_OUTCOMES = 30.0
MOST_TO_LEARN = 1_000
"""Outcomes that wait to be learned; nothing is learned of those that come while there are so many."""
MOST_LEARNED = 1_000
"""Models of which outcomes are counted; beyond, all are forgotten, and learned faster for a while."""


class Asked(NamedTuple):
    """What was forecast of, until its outcome comes; an answer of `most_tokens` was cut short."""

    features: Features
    most_tokens: float


class Wanted(NamedTuple):
    """A query whose forecast is awaited, on the loop that awaits it."""

    features: Features
    answer: asyncio.Future[Forecast]

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self.answer.get_loop()


class Forecasts(Collector):
    """One thread forecasts what comes together, and another learns, so that no forecast waits for it.

    If the forecaster fails, `fallback` answers, and its name stands in the forecast.
    """

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
        self._may_learn_s = -inf
        self._learned: Counter[str] = Counter()
        self._alone = False  # when the last one came, no other was being answered
        self._quick_chars = -1  # texts up to so long are known to be forecast within HELD_S
        self._wanted: SimpleQueue[Wanted | None] = SimpleQueue()
        self._forecasting: Thread | None = None
        self._looking: asyncio.Task[None] | None = None
        self._learning = ThreadPoolExecutor(1, "learn")
        self._to_learn = BoundedSemaphore(MOST_TO_LEARN)
        self._asked: OrderedDict[str, Asked] = OrderedDict()
        self._watches: dict[str, DriftMonitor] = {}

    def start(self) -> None:
        """Look for a new artifact from time to time, and take it up without a restart."""
        if isinstance(self._forecaster, HotReloadForecaster):
            self._looking = asyncio.create_task(self._look(self._forecaster), name="artifact")

    @property
    def name(self) -> str:
        return self._forecaster.name

    def request(self, query: Query) -> asyncio.Future[Forecast]:
        """Who does not wait for it any longer may give it an end of another kind."""
        wanted = _wanted(query)
        self._asked[query.id] = Asked(wanted.features, query.sampling.max_tokens or inf)
        if len(self._asked) > MOST_ASKED:
            self._asked.popitem(last=False)
        before, self._alone = self._alone, len(self._asked) == 1
        if self._alone and before and len(wanted.features.text) <= self._quick_chars:
            _hand_out([wanted], self._forecast([wanted]))
        else:
            self._queue(wanted)
        return wanted.answer

    def ahead(self, query: Query) -> asyncio.Future[Forecast]:
        """Of one that is answered later, under another id: no outcome follows, so nothing is kept of it."""
        wanted = _wanted(query)
        self._queue(wanted)
        return wanted.answer

    def _queue(self, wanted: Wanted) -> None:
        if self._forecasting is None:
            self._forecasting = Thread(target=self._forecast_for_ever, name="forecast", daemon=True)
            self._forecasting.start()
        self._wanted.put(wanted)

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
            self._watches.setdefault(who, DriftMonitor()).observe(outcome.forecast, outcome.completion_tokens)
        teaches = self._kept is not None or time.monotonic() >= self._may_learn_s
        if asked is not None and teaches and self._to_learn.acquire(blocking=False):
            self._learning.submit(self._learn, asked.features, outcome.completion_tokens)

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
        if self._forecasting is not None:
            self._wanted.put(None)
            await asyncio.to_thread(self._forecasting.join)
        self._learning.shutdown()

    async def _look(self, current: HotReloadForecaster) -> None:
        while True:
            await asyncio.sleep(self._look_every_s)
            try:
                if await asyncio.get_running_loop().run_in_executor(self._learning, current.refresh):
                    log.info("forecasts come from a new artifact, %s", current.name)
            except ArtifactError as error:
                log.warning("the artifact in force stays: %s", error)
            except Exception:
                log.exception("a look for a new artifact went wrong in an unforeseen way")

    def _forecast_for_ever(self) -> None:
        """On its thread: whatever is there makes up a batch, and nothing waits for more to come."""
        while (first := self._wanted.get()) is not None:
            batch = [first]
            while len(batch) < MAX_BATCH and not self._wanted.empty():
                if (another := self._wanted.get()) is None:
                    self._wanted.put(None)
                    break
                batch.append(another)
            forecasts = self._forecast(batch)
            with suppress(RuntimeError):  # the loop has ended, and nobody waits
                first.loop.call_soon_threadsafe(_hand_out, batch, forecasts)

    def _forecast(self, batch: list[Wanted]) -> list[Forecast] | Exception:
        began_s = time.monotonic()
        try:
            return self._run([each.features for each in batch])
        except Exception as exc:  # noqa: BLE001 - told to those who wait: nobody else could
            return exc
        finally:
            if len(batch) == 1:
                self._took(len(batch[0].features.text), time.monotonic() - began_s)

    def _took(self, chars: int, seconds: float) -> None:
        if seconds > HELD_S:
            self._quick_chars = min(self._quick_chars, chars - 1)
        else:
            self._quick_chars = max(self._quick_chars, chars)

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
        """On its thread."""
        try:
            began_s = time.monotonic()
            if isinstance(self._forecaster, HotReloadForecaster) and began_s >= self._may_learn_s:
                self._forecaster.observe(asked, tokens)
                self._rest(asked.model, began_s, time.monotonic())
            if self._kept is not None:
                self._kept.add(asked, tokens)
        except Exception:
            log.exception("nothing was learned from an outcome")
        finally:
            self._to_learn.release()

    def _rest(self, model: str, began_s: float, ended_s: float) -> None:
        if len(self._learned) >= MOST_LEARNED:
            self._learned.clear()
        self._learned[model] += 1
        longer = 1.0 + self._learned[model] / FIRST_OUTCOMES
        self._may_learn_s = ended_s + LEARNING_REST * longer * (ended_s - began_s)


def _wanted(query: Query) -> Wanted:
    return Wanted(features(query), asyncio.get_running_loop().create_future())


def _hand_out(batch: list[Wanted], forecasts: list[Forecast] | Exception) -> None:
    """On the loop; who gave up meanwhile is passed over."""
    for number, each in enumerate(batch):
        if each.answer.done():
            continue
        if isinstance(forecasts, Exception):
            each.answer.set_exception(forecasts)
        else:
            each.answer.set_result(forecasts[number])


def features(query: Query) -> Features:
    if not isinstance(query.prompt, Chat):
        return Features(text=query.text, model=query.model)
    turns = sum(message.role == "user" for message in query.prompt.messages)
    chars = sum(len(message.content) for message in query.prompt.messages) - len(query.text)
    return Features(text=query.text, model=query.model, turn=max(1, turns), context_chars=chars)
