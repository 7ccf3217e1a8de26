"""Forecasts queries in batches. Queries that arrive in one turn of the event loop are forecast on it if that
is fast enough. Others are forecast on a thread, where requests that arrive during one batch form the next.

Outcomes are reported here, to learn from and to measure drift. The text of a query is dropped when its
outcome has been learned from, unless an outcome log is given.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import inf
from queue import SimpleQueue
from threading import BoundedSemaphore, Thread
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.domain import Finish, Lane, Query
from gateway.outcome import Outcome, Status
from gateway.prompt import Chat
from gateway.tasks import cancel
from predictor.drift import DriftMonitor
from predictor.errors import ArtifactError
from predictor.features import HEAD_CHARS, TAIL_CHARS
from predictor.forecast import Forecast
from predictor.histogram import HistogramForecaster
from predictor.hot_reload import HotReloadForecaster
from predictor.onnx_forecaster import Features, Forecaster
from predictor.outcome_log import OutcomeLog

log = logging.getLogger(__name__)

NO_ANSWER = Forecast((0, 1), (1.0,), "none")
"""The forecast of queries that generate nothing: the shortest possible."""
MAX_BATCH = 64
MAX_BATCH_LINES = 2
"""Batch lines that are forecast together with interactive queries. A long line takes more than a millisecond,
and an interactive query waits for the lines of at most two forecast batches, however many lines wait.
"""
MAX_INLINE_S = 0.002
"""CPU time for which a batch may block the event loop, predicted from earlier batches of as many characters.
On the thread a small batch costs several times as much: the threads wake each other and exchange the GIL.
"""
MAX_BUSY_INLINE_S = 0.0004
"""The same while the event loop is busy with other queries; on the thread the model runs beside it."""
QUERY_CHARS = 50
"""The fixed cost of a query, in characters of text."""
MAX_AWAITED = 20_000
"""The number of queries whose outcome is awaited; the oldest are dropped first."""
RELOAD_EVERY_S = 10.0
LEARNING_PAUSE = 50.0
"""Pause after each outcome that was learned from, as a multiple of the time that learning took: 2% of a core.
Learning about an unseen model reads every known model. The pause grows with the model's number of outcomes,
as each adds less (see FIRST_OUTCOMES).
"""
FIRST_OUTCOMES = 30.0
"""The number of outcomes of a model after which the pause has doubled."""
MAX_TO_LEARN = 1_000
"""The number of outcomes that may wait to be learned from; further ones are not learned from."""
MAX_LEARNED_CHARS = 64 * 1024
"""Longer prompts are not learned from: the outcomes that wait would hold gigabytes."""
MAX_LEARNED_MODELS = 1_000
"""The number of models whose outcomes are counted. At the limit all counts are dropped, which shortens the
pauses for a while.
"""


class ForecastRequest(NamedTuple):
    """The features of a query, and the future of its forecast, which belongs to one event loop."""

    features: Features
    future: asyncio.Future[Forecast]

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self.future.get_loop()

    @property
    def chars(self) -> int:
        """The cost of the forecast: the characters that the forecaster reads, plus QUERY_CHARS."""
        return min(len(self.features.text), HEAD_CHARS + TAIL_CHARS) + QUERY_CHARS


class WaitingRequests:
    """The requests that wait for the forecast thread, in two lanes, neither of which starves the other."""

    def __init__(self) -> None:
        self._arrivals: SimpleQueue[None] = SimpleQueue()  # one item for each request, and one for `close`
        self._lanes = {Lane.INTERACTIVE: deque[ForecastRequest](), Lane.BATCH: deque[ForecastRequest]()}

    def put(self, request: ForecastRequest, lane: Lane) -> None:
        self._lanes[lane].append(request)
        self._arrivals.put(None)

    def close(self) -> None:
        """Let `take` return an empty list once no request waits. `put` must not be called afterwards."""
        self._arrivals.put(None)

    def take(self) -> list[ForecastRequest]:
        """Block until requests wait; return those to forecast together. Return [] once closed and empty."""
        self._arrivals.get()
        bunch: list[ForecastRequest] = []
        for lane, most in ((Lane.INTERACTIVE, MAX_BATCH), (Lane.BATCH, MAX_BATCH_LINES)):
            waiting = self._lanes[lane]
            bunch += [waiting.popleft() for _ in range(min(most, len(waiting)))]
        for _ in bunch[1:]:
            self._arrivals.get()
        return bunch


class InlineLimit:
    """The longest batch, in characters, that takes at most `max_s` of CPU time, learned from earlier batches.

    `chars` is -1 until a batch has been fast enough.
    """

    def __init__(self, max_s: float) -> None:
        self.chars = -1
        self._max_s = max_s

    def observe(self, chars: int, took_s: float) -> None:
        if took_s > self._max_s:
            self.chars = min(self.chars, chars - 1)
        else:
            self.chars = max(self.chars, chars)


class ForecastService(Collector):
    """Forecasts on the event loop or on a thread, and learns on another, so that learning delays no forecast.

    If the forecaster fails, `fallback` forecasts, and the forecast's source names the fallback.
    """

    def __init__(
        self,
        forecaster: Forecaster,
        fallback: Forecaster,
        *,
        outcome_log: OutcomeLog | None = None,
        parent_of: Callable[[str], str] = lambda _: "",
        loop_is_busy: Callable[[], bool] = lambda: False,
        reload_every_s: float = RELOAD_EVERY_S,
    ) -> None:
        """`parent_of` returns the parent of a variant's id, empty for a model that is not a variant."""
        self._forecaster = forecaster
        self._fallback = fallback
        self._outcome_log = outcome_log
        self._parent_of = parent_of
        self._reload_every_s = reload_every_s
        self._learn_after_s = -inf
        self._learned_counts: Counter[str] = Counter()
        self._loop_is_busy = loop_is_busy
        self._inline = InlineLimit(MAX_INLINE_S)
        self._busy_inline = InlineLimit(MAX_BUSY_INLINE_S)
        self._arrivals: list[ForecastRequest] = []  # interactive requests of this turn of the event loop
        self._requests = WaitingRequests()
        self._thread: Thread | None = None
        self._reload_task: asyncio.Task[None] | None = None
        self._learner = ThreadPoolExecutor(1, "learn")
        self._learn_slots = BoundedSemaphore(MAX_TO_LEARN)
        self._awaited: OrderedDict[str, Features] = OrderedDict()  # by query id, until the outcome
        self._drift: dict[str, DriftMonitor] = {}

    def start(self) -> None:
        """Start to check for a new artifact every `reload_every_s`, and to load it without a restart."""
        if isinstance(self._forecaster, HotReloadForecaster):
            self._reload_task = asyncio.create_task(self._reload_for_ever(self._forecaster), name="artifact")

    def request(self, query: Query) -> asyncio.Future[Forecast]:
        """Request a forecast. The caller may set an exception on the future to stop waiting."""
        request = self._request_of(query)
        self._awaited[query.id] = request.features
        if len(self._awaited) > MAX_AWAITED:
            self._awaited.popitem(last=False)
        if query.lane is Lane.INTERACTIVE:
            if not self._arrivals:
                request.loop.call_soon(self._forecast_arrivals)
            self._arrivals.append(request)
        else:
            self._enqueue(request, query.lane)
        return request.future

    def request_ahead(self, query: Query) -> asyncio.Future[Forecast]:
        """Request a forecast of a query that is answered later, under another id. No outcome is awaited."""
        request = self._request_of(query)
        self._enqueue(request, query.lane)
        return request.future

    def _request_of(self, query: Query) -> ForecastRequest:
        known = features(query, self._parent_of(query.model))
        return ForecastRequest(known, asyncio.get_running_loop().create_future())

    def _forecast_arrivals(self) -> None:
        """Forecast the requests of one turn of the event loop: on the loop if they are short enough, else
        on the thread.
        """
        arrivals, self._arrivals = self._arrivals, []
        has_others = len(self._awaited) > len(arrivals)
        limit = self._busy_inline if has_others and self._loop_is_busy() else self._inline
        if sum(each.chars for each in arrivals) <= limit.chars:
            _resolve(arrivals, self._forecast_batch(arrivals))
        else:
            for each in arrivals:
                self._enqueue(each, Lane.INTERACTIVE)

    def _enqueue(self, request: ForecastRequest, lane: Lane) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._forecast_for_ever, name="forecast", daemon=True)
            self._thread.start()
        self._requests.put(request, lane)

    def observe(self, outcome: Outcome) -> None:
        """Learn from the outcome of a query. An answer cut short by a limit counts as longer than that.

        Answers with several choices, whose tokens are only counted together, and answers ended by a content
        filter are not learned from.
        """
        features = self._awaited.pop(outcome.query_id, None)
        if outcome.status is not Status.ANSWERED or outcome.forecast is None:
            return
        reasons = outcome.ending.finish_reasons
        if len(reasons) > 1:
            return
        if outcome.tells_length:
            monitor = self._drift.setdefault(outcome.forecast.source.split(":", 1)[0], DriftMonitor())
            monitor.observe(outcome.forecast, outcome.completion_tokens, outcome.max_tokens)
        ended = Finish.LENGTH not in reasons
        if Finish.CONTENT_FILTER in reasons or (not ended and outcome.completion_tokens <= 0):
            return
        if isinstance(self._fallback, HistogramForecaster):
            self._fallback.observe(outcome.model, outcome.completion_tokens, ended=ended)
        may_learn = self._outcome_log is not None or time.monotonic() >= self._learn_after_s
        if features is None or not may_learn or len(features.text) > MAX_LEARNED_CHARS:
            return
        if self._learn_slots.acquire(blocking=False):
            self._learner.submit(self._learn, features, outcome.completion_tokens, ended=ended)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of drift between forecasts and recent outcomes, by forecaster."""
        reports = [(forecaster, monitor.report()) for forecaster, monitor in self._drift.items()]
        for name, text, figure in (
            ("stability_index", "Population stability of outcomes against forecasts", "stability_index"),
            ("p90_coverage", "Share of answers no longer than their p90", "p90_coverage"),
            ("drift", "1 while outcomes are no longer as forecast", "alarm"),
        ):
            family = GaugeMetricFamily(f"mico_forecast_{name}", text, labels=["forecaster"])
            for forecaster, drift in reports:
                family.add_metric([forecaster], float(getattr(drift, figure)))
            yield family

    async def close(self) -> None:
        await cancel(self._reload_task)
        if self._thread is not None:
            self._requests.close()
            await asyncio.to_thread(self._thread.join)
        self._learner.shutdown()

    async def _reload_for_ever(self, current: HotReloadForecaster) -> None:
        while True:
            await asyncio.sleep(self._reload_every_s)
            try:
                if await asyncio.get_running_loop().run_in_executor(self._learner, current.refresh):
                    log.info("forecasts come from a new artifact, %s", current.name)
                    self._drift.clear()  # measured for the earlier artifact, which may have the same name
            except ArtifactError as error:
                log.warning("the artifact in force stays: %s", error)
            except Exception:
                log.exception("a look for a new artifact went wrong in an unforeseen way")

    def _forecast_for_ever(self) -> None:
        """Run the forecast thread. A batch consists of the waiting requests, and does not wait for more."""
        while taken := self._requests.take():
            batch = [each for each in taken if not each.future.done()]  # the others were cancelled
            if not batch:
                continue
            forecasts = self._forecast_batch(batch)
            with suppress(RuntimeError):  # the event loop has ended
                batch[0].loop.call_soon_threadsafe(_resolve, batch, forecasts)

    def _forecast_batch(self, batch: list[ForecastRequest]) -> list[Forecast] | Exception:
        began_s = time.thread_time()
        try:
            return self._run_forecaster([each.features for each in batch])
        except Exception as exc:  # noqa: BLE001 - raised where the forecasts are awaited
            return exc
        finally:
            chars, took_s = sum(each.chars for each in batch), time.thread_time() - began_s
            self._inline.observe(chars, took_s)
            self._busy_inline.observe(chars, took_s)

    def _run_forecaster(self, queries: list[Features]) -> list[Forecast]:
        try:
            forecasts = self._forecaster.forecast(queries)
            if len(forecasts) != len(queries):
                raise ValueError(f"{len(forecasts)} forecasts for {len(queries)} queries")
            return forecasts
        except Exception:
            log.exception("the forecaster %s failed", self._forecaster.name)
            return self._fallback.forecast(queries)

    def _learn(self, features: Features, tokens: int, *, ended: bool) -> None:
        """Learn from one outcome. Runs on the learner's thread."""
        try:
            began_s = time.monotonic()
            if isinstance(self._forecaster, HotReloadForecaster) and began_s >= self._learn_after_s:
                self._forecaster.observe(features, tokens, ended=ended)
                self._schedule_next_lesson(features.model, began_s, time.monotonic())
            if self._outcome_log is not None:
                self._outcome_log.add(features, tokens, ended=ended)
        except Exception:
            log.exception("nothing was learned from an outcome")
        finally:
            self._learn_slots.release()

    def _schedule_next_lesson(self, model: str, began_s: float, ended_s: float) -> None:
        if len(self._learned_counts) >= MAX_LEARNED_MODELS:
            self._learned_counts.clear()
        self._learned_counts[model] += 1
        longer = 1.0 + self._learned_counts[model] / FIRST_OUTCOMES
        self._learn_after_s = ended_s + LEARNING_PAUSE * longer * (ended_s - began_s)


def _resolve(batch: list[ForecastRequest], forecasts: list[Forecast] | Exception) -> None:
    """Set the results of a batch, except for cancelled requests. Runs on the event loop."""
    for index, request in enumerate(batch):
        if request.future.done():
            continue
        if isinstance(forecasts, Exception):
            request.future.set_exception(forecasts)
        else:
            request.future.set_result(forecasts[index])


def features(query: Query, parent: str) -> Features:
    if not isinstance(query.prompt, Chat):
        return Features(text=query.text, model=query.model, parent=parent)
    turns = sum(message.role == "user" for message in query.prompt.messages)
    return Features(text=query.text, model=query.model, turn=max(1, turns), parent=parent)
