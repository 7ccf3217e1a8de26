"""The training runs of this site: orders of gateways, events of the engine, reports to gateways.

Runs on the event loop. Each run has one task, which fetches its data, stores its snapshots and ends it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from io import BytesIO
from typing import Any, Final, NamedTuple, TypeVar

from site_engine.core.training import (
    AdapterShape,
    Content,
    End,
    Failed,
    Kind,
    Saved,
    StepDone,
    StopTraining,
    Train,
    Training,
    TrainingEvent,
    TrainingOrder,
)
from site_engine.engine_client import TrainingEngine
from site_engine.errors import TransferFailed
from site_engine.federation.bulk import Bulk
from site_engine.federation.site import Site
from site_engine.messages import Model

log = logging.getLogger(__name__)

T = TypeVar("T")

REPORT_EVERY_S: Final = 1.0
"""Gateways expect a report on a run every 2 s."""
MAX_STEPS: Final = 64
"""Maximum number of steps in a report."""
MAX_SAVED: Final = 3
"""Snapshots of a run that may wait for storage; beyond that the oldest is dropped."""
MAX_ENDED: Final = 64
"""Ended runs kept until a gateway acknowledges them; beyond that the oldest is dropped."""
MAX_DATA_BYTES: Final = 256 << 20
MAX_CONTENT_BYTES: Final = 4 << 30
RETRY_S: Final = 1.0
MAX_FETCHES: Final = 60
"""Consecutive fruitless tries after which a run is abandoned."""


class Ended(NamedTuple):
    end: End = End.RUNNING
    code: str = ""
    error: str = ""


class Run:
    """One run, from its order until a gateway orders it dropped."""

    def __init__(self, order: Train) -> None:
        self.order = order
        self.steps: deque[StepDone] = deque(maxlen=MAX_STEPS)
        self.times_s: deque[float] = deque(maxlen=MAX_STEPS)
        self.unreported = 0  # steps
        self.saved: deque[Saved] = deque(maxlen=MAX_SAVED)
        self.failure: Failed | None = None
        self.fetches = True  # what it needs, before it trains
        self.stops = False  # a gateway wants a snapshot, and the end
        self.changed = asyncio.Event()
        self.ended = Ended()
        self.task: asyncio.Task[None] | None = None

    def report(self, revision: str) -> Training:
        step, total, tokens, per_s = 0, 0, 0, 0.0
        if self.steps:
            first, last = self.steps[0], self.steps[-1]
            step, total, tokens = last.step, last.total_steps, last.trained_tokens
            took_s = self.times_s[-1] - self.times_s[0]
            per_s = (tokens - first.trained_tokens) / took_s if took_s > 0 else 0.0
        figures = step, total, tokens, tuple(self.steps), per_s
        return Training(self.order.job_id, self.order.run, *figures, *self.ended, revision)


class TrainingRuns:
    """`base` is the model to train on. At most `most` runs exist at once.

    `pack` builds the archive of an adapter from a snapshot, on any thread. `serve` serves an archive under a
    name for a tenant and returns the reason of a refusal, or an empty string.
    """

    def __init__(
        self,
        site: Site,
        engine: TrainingEngine,
        base: Model,
        most: int,
        *,
        pack: Callable[[bytes, AdapterShape, str], bytes],
        serve: Callable[[str, str, bytes], Awaitable[str]],
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._site = site
        self._engine = engine
        self._base = base
        self._most = most
        self._pack, self._serve = pack, serve
        self._clock, self._sleep = clock, sleep
        self._runs: dict[str, Run] = {}
        self._draining = False
        site.on_training = self.receive

    # ---- from gateways

    def receive(self, order: Train | StopTraining) -> None:
        if isinstance(order, Train):
            self._begin(order)
        elif (run := self._runs.get(order.run)) is None:
            log.debug("run %s is not here", order.run)
        elif order.snapshot:
            self._stop(run)
        else:
            self._drop(run)

    def _begin(self, order: Train) -> None:
        """Start a run and drop any other run of its job. A run that exists already continues."""
        if order.run in self._runs:
            return
        for each in [each for each in self._runs.values() if each.order.job_id == order.job_id]:
            self._drop(each)
        run = self._runs[order.run] = Run(order)
        live = [each for each in self._runs.values() if not each.ended.end]
        ended = [each for each in self._runs.values() if each.ended.end]
        for each in ended[: max(0, len(ended) - MAX_ENDED)]:
            self._drop(each)
        if self._draining:
            self._end(run, Ended(End.GIVEN_UP, "draining", "the site is ending"))
        elif len(live) > self._most:
            self._end(run, Ended(End.GIVEN_UP, "no_room", f"{self._most} runs are here, which is the limit"))
        else:
            log.info("run %s of job %s begins", order.run, order.job_id)
            run.task = asyncio.create_task(self._carry_out(run), name=f"train {order.run}")

    def _stop(self, run: Run) -> None:
        """Store and end a run. A run that is still fetching has nothing to store."""
        if run.fetches and run.task is not None and not run.ended.end:
            run.task.cancel()
            self._end(run, Ended(End.STOPPED))
        else:
            run.stops = True
            run.changed.set()

    def _drop(self, run: Run) -> None:
        """Drop a run, here and in the engine."""
        del self._runs[run.order.run]
        if run.task is not None:
            run.task.cancel()
        if not run.ended.end:
            self._engine.stop_training(run.order.run, lambda _: None)

    # ---- from the engine

    def heard(self, run_name: str, event: TrainingEvent) -> None:
        """Record an event of a run, which the engine identifies by name."""
        run = self._runs.get(run_name)
        if run is None:  # it was dropped while the engine read its data
            self._engine.stop_training(run_name, lambda _: None)
            return
        if isinstance(event, StepDone):
            run.steps.append(event)
            run.times_s.append(self._clock())
            run.unreported += 1
            if run.unreported >= MAX_STEPS // 2:
                self._report(run)
            return
        if isinstance(event, Saved):
            run.saved.append(event)
        else:
            run.failure = event
        run.changed.set()

    # ---- to gateways

    async def report_forever(self) -> None:
        while True:
            await self._sleep(REPORT_EVERY_S)
            for run in self._runs.values():
                self._report(run)

    def _report(self, run: Run) -> None:
        run.unreported = 0
        report = run.report(self._base.revision)
        for connection in self._site.tuning:
            connection.attempts.outbox.training(report)
            connection.wake()

    def _end(self, run: Run, ended: Ended) -> None:
        log.info("run %s has %s %s", run.order.run, ended.end.name.lower().replace("_", " "), ended.error)
        run.ended = ended
        self._report(run)

    async def drain(self) -> None:
        """Store and end every run, so that other sites can continue them. Accept no new runs."""
        self._draining = True
        tasks = []
        for run in self._runs.values():
            self._stop(run)
            tasks += [] if run.task is None else [run.task]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- a run

    async def _carry_out(self, run: Run) -> None:
        try:
            ended = await self._train(run)
        except TransferFailed as exc:
            if exc.stale:
                log.info("run %s is dropped: %s", run.order.run, exc)
                self._drop(run)
                return
            ended = Ended(End.GIVEN_UP, "transfer_failed", str(exc))
        except Exception as exc:
            log.exception("run %s went wrong in an unforeseen way", run.order.run)
            ended = Ended(End.GIVEN_UP, "site_failed", type(exc).__name__)
        if ended.end is not End.SUCCEEDED:
            self._engine.stop_training(run.order.run, lambda _: None)
        self._end(run, ended)

    async def _train(self, run: Run) -> Ended:
        """Train until the job ends or the run is stopped. Raises TransferFailed."""
        order, base = run.order, self._base
        if order.model != base.id or order.revision not in ("", base.revision):
            here = f"this site trains {base.id} of revision {base.revision}"
            return Ended(
                End.GIVEN_UP, "base_changed", f"{here}, not {order.model} of {order.revision or 'any'}"
            )
        try:
            recipe = order.recipe()
        except ValueError as exc:
            return Ended(End.FAILED, "invalid_hyperparameters", str(exc))
        data = await self.fetch(order.data, MAX_DATA_BYTES)
        valid = await self.fetch(order.validation, MAX_DATA_BYTES) if order.validation else b""
        snapshot = await self.fetch(order.snapshot) if order.snapshot else b""
        run.fetches = False
        job = TrainingOrder(order.run, order.tenant, recipe, data, valid, snapshot)
        refused = await answer(partial(self._engine.train, job))
        del job, data, valid, snapshot
        if refused is not None:
            end = End.GIVEN_UP if refused.elsewhere else End.FAILED
            return Ended(end, "training_refused", str(refused))
        return await self._follow(run)

    async def _follow(self, run: Run) -> Ended:
        """Store saved snapshots until the job ends. Raises TransferFailed."""
        stopped = False
        while True:
            while run.saved:
                saved = run.saved.popleft()
                if saved.last:
                    return await self._finish(run, saved)
                await self._keep(run, saved)
            if run.failure is not None:
                end = End.GIVEN_UP if run.failure.elsewhere else End.FAILED
                return Ended(end, "training_failed", run.failure.reason)
            if stopped:
                return Ended(End.STOPPED)
            if run.stops:
                run.stops = False  # once: after the last step there is nothing to stop
                stopped = await self._stop_engine(run)
            else:
                run.changed.clear()
                await run.changed.wait()

    async def _stop_engine(self, run: Run) -> bool:
        """Stop a run in the engine. Return whether it stopped and returned its last snapshot."""
        last = await answer(partial(self._engine.stop_training, run.order.run))
        if isinstance(last, Failed):
            run.failure = last
        elif last is not None:
            run.saved.append(last)
        return isinstance(last, Saved)

    async def _keep(self, run: Run, saved: Saved) -> None:
        """Store a snapshot, and a checkpoint after each epoch. If that fails the run continues. Raises
        TransferFailed if the order is outdated.
        """
        order, total = run.order, run.steps[-1].total_steps if run.steps else 0
        try:
            await self._store(order, Kind.SNAPSHOT, saved.step, saved.data)
            if total and saved.step % (total // order.epochs) == 0:
                await self._store(order, Kind.CHECKPOINT, saved.step, await self._packed(order, saved))
        except TransferFailed as exc:
            if exc.stale:
                raise
            log.warning("step %d of run %s is not stored: %s", saved.step, order.run, exc)
        self._report(run)

    async def _finish(self, run: Run, saved: Saved) -> Ended:
        """Store the adapter, then serve it. Raises TransferFailed."""
        order = run.order
        archive = await self._packed(order, saved)
        await self._store(order, Kind.ADAPTER, saved.step, archive)
        error = await self._serve(order.tuned_model, order.tenant, archive)
        if error:
            return Ended(End.GIVEN_UP, "not_served", f"the adapter can't be served here: {error}")
        return Ended(End.SUCCEEDED)

    async def _packed(self, order: Train, saved: Saved) -> bytes:
        return await asyncio.to_thread(self._pack, saved.data, order.recipe().shape, order.model)

    # ---- beside the links

    async def fetch(self, content: Content, max_bytes: int = MAX_CONTENT_BYTES) -> bytes:
        """Fetch content from any gateway. Raises TransferFailed."""
        if content.size_bytes > max_bytes:
            raise TransferFailed(f"{content.size_bytes} bytes; this site takes {max_bytes} at most")
        received, fruitless, reason = BytesIO(), 0, "no gateway is linked"
        while fruitless < MAX_FETCHES:
            for bulk in self._bulks():
                had = received.tell()
                try:
                    await bulk.fetch(content, received)
                    return received.getvalue()
                except TransferFailed as exc:
                    if exc.final:
                        raise
                    reason, fruitless = str(exc), 0 if received.tell() > had else fruitless
            fruitless += 1
            await self._sleep(RETRY_S)
        raise TransferFailed(f"the content could not be fetched: {reason}")

    async def _store(self, order: Train, kind: Kind, step: int, data: bytes) -> None:
        """Store at any gateway, retrying until one accepts. Raises TransferFailed if a refusal is final."""
        while True:
            for bulk in self._bulks():
                try:
                    await bulk.store(order, kind, step, data)
                    return
                except TransferFailed as exc:
                    if exc.final:
                        raise
                    log.warning("%s of run %s is stored later: %s", kind.name.lower(), order.run, exc)
            await self._sleep(RETRY_S)

    def _bulks(self) -> list[Bulk]:
        return [each.bulk for each in self._site.tuning if each.bulk is not None]


async def answer(call: Callable[[Callable[[T], None]], Any]) -> T:
    """Call a function that replies by callback, and await the reply."""
    reply: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def resolve(value: T) -> None:
        if not reply.done():  # nobody waits any more
            reply.set_result(value)

    call(resolve)
    return await reply
