"""Leases batches and runs them. Every replica with spare capacity takes the oldest batch without a holder."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Final

from gateway.batches.capacity import Sharing
from gateway.batches.context import BatchContext
from gateway.batches.job import InFlight, Job
from gateway.batches.ledger import LeaseLost
from gateway.batches.values import Batch
from gateway.store.database import DATABASE_ERRORS, reason
from gateway.tasks import cancel

log = logging.getLogger(__name__)

POLL_S: Final = 2.0
"""Interval of looking for batches submitted or cancelled elsewhere. A lease outlives several polls."""


class Runner:
    """Runs the batches that this replica leases."""

    def __init__(self, context: BatchContext, poll_s: float = POLL_S) -> None:
        self._context = context
        self._poll_s = poll_s
        self._jobs: dict[str, tuple[Job, asyncio.Task[None]]] = {}
        self._in_flight: InFlight = {}
        self._draining = False
        self._wake = asyncio.Event()
        self._polling: asyncio.Task[None] | None = None

    @property
    def running_lines(self) -> int:
        return sum(job.running_lines.in_flight for job, _ in self._jobs.values())

    def start(self) -> None:
        self._polling = asyncio.create_task(self._poll_for_ever(), name="batches")

    def wake(self) -> None:
        """Poll at once: a batch was submitted or cancelled here."""
        self._wake.set()

    def drain(self) -> None:
        """Start nothing new, because this process is about to end. Running batches keep their leases."""
        self._draining = True
        for job, _ in self._jobs.values():
            job.draining = True

    async def close(self, within_s: float = 0.0) -> None:
        """Wait `within_s` for running lines. Batches that still run are released: another replica goes on."""
        self.drain()
        await cancel(self._polling)
        tasks = [task for _, task in self._jobs.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=within_s)
        await cancel(*tasks)
        for batch_id in self._jobs:
            with suppress(*DATABASE_ERRORS):
                await self._context.ledger.release(batch_id)

    async def _poll_for_ever(self) -> None:
        while True:
            try:
                await self._poll()
            except DATABASE_ERRORS as exc:
                log.warning("batches go on without a look at the database: %s", reason(exc))
            except Exception:
                log.exception("a look at the batches went wrong in an unforeseen way; the next one follows")
            with suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):
                    await self._wake.wait()
            self._wake.clear()

    async def _poll(self) -> None:
        """Renew the leases, take new ones, notice cancelled batches, stop those that another replica took."""
        for batch_id in [batch_id for batch_id, (_, task) in self._jobs.items() if task.done()]:
            del self._jobs[batch_id]
        max_batches = len(self._jobs)
        if not self._draining:
            limits, idle = self._context.limits, sum(job.is_idle for job, _ in self._jobs.values())
            max_batches = max(max_batches, limits.replica_batches + min(idle, limits.idle_batches))
        running = {batch_id: job.running_lines for batch_id, (job, _) in self._jobs.items()}
        leased = {batch.id: batch for batch in await self._context.ledger.lease(max_batches, running)}
        for batch_id, (job, task) in self._jobs.items():
            if batch_id not in leased and not job.finalizing and not task.cancelling():
                task.cancel()
        for batch in leased.values():
            self._update_job(batch)

    def _update_job(self, batch: Batch) -> None:
        """Start a job, or pass a cancellation on to it. A running job knows everything else better itself."""
        if batch.id not in self._jobs and not self._draining:
            job = Job(batch, self._context, self._in_flight, self._sharing)
            self._jobs[batch.id] = job, asyncio.create_task(self._run(job), name=batch.id)
        elif batch.id in self._jobs and batch.cancelling_at is not None:
            self._jobs[batch.id][0].batch = batch

    def _sharing(self, job: Job) -> Sharing:
        """Return how the sites of a batch are shared: between those that may use any of them. Late ones go
        first, and share theirs between themselves.
        """
        jobs = [each for each, _ in self._jobs.values() if each is job or not each.is_idle]
        kinds = {each: (self._context.model_of(each.batch), each.batch.key_id) for each in jobs}
        one_of = {kind: each for each, kind in kinds.items()}  # all of a kind have the same sites
        sites = {kind: each.sites for kind, each in one_of.items()}
        sites_of = {each: sites[kind] for each, kind in kinds.items()}
        beside = [each for each in jobs if each is job or not sites_of[each].isdisjoint(sites_of[job])]
        late = [each for each in beside if each.can_start and each.is_late]
        if job in late:
            return Sharing(len(jobs), len(late))
        taken = frozenset().union(*(sites_of[each] for each in late))
        return Sharing(len(jobs), len(beside) - len(late), taken)

    async def _run(self, job: Job) -> None:
        try:
            await job.run()
            if self._draining:
                await self._context.ledger.release(job.batch.id)
        except LeaseLost:
            log.warning("batch %s is run by another replica now", job.batch.id)
        except DATABASE_ERRORS as exc:
            log.warning("batch %s waits for the database: %s", job.batch.id, reason(exc))
        except Exception:
            log.exception("batch %s went wrong in an unforeseen way; it is tried again", job.batch.id)
