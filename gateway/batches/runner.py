"""Leases batches and runs them, in every replica: whichever has a free hand takes the oldest that is free."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Final

from gateway.batches.context import BatchContext
from gateway.batches.job import AWAY, Flight, Job
from gateway.batches.ledger import LeaseLost
from gateway.batches.values import Batch
from gateway.store.database import reason

log = logging.getLogger(__name__)

POLL_S: Final = 2.0
"""How soon what was submitted or cancelled elsewhere is noticed. A lease outlives several looks."""


class Runner:
    def __init__(self, context: BatchContext, poll_s: float = POLL_S) -> None:
        self._context = context
        self._poll_s = poll_s
        self._jobs: dict[str, tuple[Job, asyncio.Task[None]]] = {}
        self._flight: Flight = {}
        self._draining = False
        self._wanted = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    @property
    def in_flight(self) -> int:
        return sum(job.in_flight for job, _ in self._jobs.values())

    def start(self) -> None:
        self._watching = asyncio.create_task(self._watch(), name="batches")

    def wake(self) -> None:
        """Something was submitted or cancelled here."""
        self._wanted.set()

    def drain(self) -> None:
        """This process is about to end: nothing new starts, and what runs keeps its lease."""
        self._draining = True
        for job, _ in self._jobs.values():
            job.ending = True

    async def close(self, within_s: float = 0.0) -> None:
        """What still runs after `within_s` runs again elsewhere, at once."""
        self.drain()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        tasks = [task for _, task in self._jobs.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=within_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for batch_id in self._jobs:
            with suppress(*AWAY):
                await self._context.ledger.release(batch_id)

    async def _watch(self) -> None:
        while True:
            try:
                await self._look()
            except AWAY as exc:
                log.warning("batches go on without a look at the database: %s", reason(exc))
            except Exception:
                log.exception("a look at the batches went wrong in an unforeseen way; the next one follows")
            with suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):
                    await self._wanted.wait()
            self._wanted.clear()

    async def _look(self) -> None:
        """Renew our leases, take new ones, learn what was cancelled, let go of what another took."""
        for batch_id in [batch_id for batch_id, (_, task) in self._jobs.items() if task.done()]:
            del self._jobs[batch_id]
        most = len(self._jobs) if self._draining else self._context.limits.replica_batches
        held = {batch.id: batch for batch in await self._context.ledger.lease(most)}
        for batch_id, (job, task) in self._jobs.items():
            if batch_id not in held and not job.closing and not task.cancelling():
                task.cancel()
        for batch in held.values():
            self._tell(batch)

    def _tell(self, batch: Batch) -> None:
        """A job knows best how far it is; what it can't know is that somebody cancelled."""
        if batch.id not in self._jobs and not self._draining:
            job = Job(batch, self._context, self._flight, lambda: len(self._jobs))
            self._jobs[batch.id] = job, asyncio.create_task(self._run(job), name=batch.id)
        elif batch.id in self._jobs and batch.cancelling_at is not None:
            self._jobs[batch.id][0].batch = batch

    async def _run(self, job: Job) -> None:
        try:
            await job.run()
            if self._draining:
                await self._context.ledger.release(job.batch.id)
        except LeaseLost:
            log.warning("batch %s is run by another replica now", job.batch.id)
        except AWAY as exc:
            log.warning("batch %s waits for the database: %s", job.batch.id, reason(exc))
        except Exception:
            log.exception("batch %s went wrong in an unforeseen way; it is tried again", job.batch.id)
