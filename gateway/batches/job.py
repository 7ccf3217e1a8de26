"""Runs one batch whose lease this replica holds: validate → answer line by line → finalize."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from typing import Final, NamedTuple

from gateway.batches import finalize
from gateway.batches.answer_line import ENDPOINTS, answer_line, error_line, response_line
from gateway.batches.blend import Blend
from gateway.batches.capacity import (
    Sharing,
    SiteCapacity,
    available,
    can_serve,
    fair_share,
    lines_at_once,
    lines_of_batch,
    lines_waiting,
)
from gateway.batches.context import BatchContext
from gateway.batches.homes import Homes
from gateway.batches.ledger import LeaseLost
from gateway.batches.pace import Progress, is_late, work_of
from gateway.batches.prompts import Kept
from gateway.batches.reading import RawLine, read_line
from gateway.batches.validate import InvalidInputFile, validate
from gateway.batches.values import Batch, BatchStatus, Line, Order, Outcome, RunningLines
from gateway.batches.waiting import PAGE_LINES, WaitingLines
from gateway.domain import Site, SiteState
from gateway.errors import (
    AboveQuota,
    BudgetSpent,
    ClientMistake,
    MicoError,
    NoSite,
    Overloaded,
    ShuttingDown,
    TooMany,
    Unauthenticated,
)
from gateway.store.database import DATABASE_ERRORS, reason

log = logging.getLogger(__name__)

TICK_S: Final = 0.1
ROUND_S: Final = 0.02
"""Minimum time between two rounds. Each round writes the ended lines in one transaction and starts at most
`BatchLimits.starting` lines, which limits a replica to 400 lines a second.
"""
IDLE_S, IDLE_TICK_S = 60.0, 1.0
"""Seconds without a line in flight after which a batch makes room for another, and its tick while idle."""
BACKOFF_S: Final = 1.0
MAX_AWAY_BACKOFFS, MAX_AWAY_S = 60, 3600.0
"""A line whose site is unreachable waits at most this many times BACKOFF_S, and this many seconds in all."""
MAX_KEPT_LINES: Final = 64
"""Limit on lines with several prompts that wait for a retry with some prompts already answered."""

InFlight = dict[str, str]
"""Site names by query id, for the running lines of this replica."""


class Retry(NamedTuple):
    """A line to retry after `wait_s`. `pauses_batch`: all other lines would fail now, too."""

    line: Line
    wait_s: float
    pauses_batch: bool


class Job:
    """One run of one batch. The runner keeps `batch` up to date.

    `in_flight` is shared by all jobs of this replica. `sharing` returns how this replica's batches share
    their sites.
    """

    def __init__(
        self, batch: Batch, context: BatchContext, in_flight: InFlight, sharing: Callable[[Job], Sharing]
    ) -> None:
        self.batch = batch
        self.finalizing = False  # no line runs any more: the end of the batch is being written
        self.draining = False  # this process is about to end: nothing new starts
        self._id = secrets.token_hex(4)  # runs of a line by different jobs are different queries
        self._context = context
        self._in_flight = in_flight
        self._sharing = sharing
        self._waiting = WaitingLines(batch.order is Order.BLEND)
        self._blend = Blend()
        self._homes = Homes()
        self._retries: list[tuple[float, int, Line]] = []  # a heap, by the time when the line may run again
        self._running: dict[asyncio.Task[Outcome | Retry], Line] = {}
        self._kept: dict[int, Kept] = {}  # of the lines that run, and of some that run again
        self._away_since_s: dict[int, float] = {}  # of the lines that wait for a site
        self._paused_until_s = self._read_again_s = 0.0
        self._has_answers = False
        self._began_s = self._busy_s = context.clock()
        self._ended_work = self._running_work = self._left_work = 0.0

    @property
    def sites(self) -> set[str]:
        """Return the names of the sites, also those down, that serve its model and that its key may use."""
        model = self._model
        return {site.name for site in self._usable_sites() if model in site.identity.models}

    @property
    def _model(self) -> str:
        """Return the model that answers the batch's lines now, resolving a route."""
        return self._context.model_of(self.batch)

    def _usable_sites(self) -> Sequence[Site]:
        """Return the sites in the regions of its key, except where its model belongs to another tenant."""
        caller, sites = self._context.caller(self.batch.key_id), self._context.sites()
        sites, model = sites if caller is None else caller.sites_of(sites), self._model
        tenants = "", self.batch.tenant
        served = [site.identity.models.get(model) for site in sites]
        return [site for site, its in zip(sites, served, strict=True) if not its or its.tenant in tenants]

    @property
    def progress(self) -> Progress:
        ran_s = self._context.clock() - self._began_s
        return Progress(ran_s, self._ended_work, self._running_work, self._left_work)

    @property
    def is_late(self) -> bool:
        """Return whether the batch would miss its deadline at its current pace."""
        return is_late(self.batch, self.progress, self._context.unix_time())

    @property
    def can_start(self) -> bool:
        """Return whether the batch has lines that may start now, given room."""
        now_s = self._context.clock()
        is_due = bool(self._waiting) or bool(self._retries and self._retries[0][0] <= now_s)
        return is_due and now_s >= self._paused_until_s

    @property
    def is_idle(self) -> bool:
        """Return whether the batch only waits for sites of its model or for its tenant's quota."""
        waits = self.batch.status is BatchStatus.IN_PROGRESS and not self._running
        return waits and self._context.clock() - self._busy_s > IDLE_S

    @property
    def running_lines(self) -> RunningLines:
        progress = self.progress
        ends_at = self._context.unix_time() + progress.left_s if progress.is_known else None
        return RunningLines(len(self._running), ends_at)

    async def run(self) -> None:
        """Run the batch to its end. Raises LeaseLost, and DATABASE_ERRORS if the database is unreachable."""
        if self._context.caller(self.batch.key_id) is None:
            await self._context.refresh_keys()
        if self.batch.status is BatchStatus.VALIDATING and not self._must_stop:
            await self._validate()
        elif self.batch.in_progress_at is None:  # those of a replica that died while it read the file
            await self._context.ledger.remove_lines(self.batch.id)
        if self.batch.status is BatchStatus.IN_PROGRESS:
            await self._answer()
        if self.batch.ended or self.draining:
            return
        self.finalizing = True
        await finalize.finalize(self.batch, self._context, cancelled=self._cancelled)
        log.info("batch %s is over", self.batch.id)

    @property
    def _cancelled(self) -> bool:
        return self.batch.status is BatchStatus.CANCELLING

    @property
    def _must_stop(self) -> bool:
        """Return whether the batch was cancelled or has expired."""
        return self._cancelled or self._context.unix_time() >= self.batch.expires_at

    # ---- validate

    async def _validate(self) -> None:
        context, batch = self._context, self.batch
        try:
            model, lines = await validate(batch, context)
        except InvalidInputFile as invalid:
            self.finalizing = True
            await finalize.fail(batch, invalid.errors, context)
            self.batch = replace(batch, status=BatchStatus.FAILED)
            return
        await context.ledger.add_lines(batch.id, lines)
        changes = {
            "status": BatchStatus.IN_PROGRESS,
            "in_progress_at": context.unix_time(),
            "model": model,
            "total": len(lines),
            "outline": lines.outline._asdict(),
        }
        changed = await context.ledger.change(batch.id, (BatchStatus.VALIDATING,), **changes)
        status = BatchStatus.IN_PROGRESS if changed else BatchStatus.CANCELLING
        self.batch = replace(batch, status=status, model=model, total=len(lines))

    # ---- answer

    async def _answer(self) -> None:
        ledger, batch = self._context.ledger, self.batch
        self._left_work = await ledger.work_left(batch.id)
        counted = await ledger.get(batch.tenant, batch.id)
        self._has_answers = counted is not None and counted.completed > 0
        self._began_s = self._busy_s = self._context.clock()
        try:
            while not self._must_stop:
                is_read = await self._refill()
                is_over = is_read and not (self._waiting or self._retries)
                if not self._running and (self.draining or is_over):
                    return
                if is_read and not self.draining:
                    self._start_lines()
                await self._collect()
        finally:
            await self._cancel_running()

    async def _refill(self) -> bool:
        """Read the next lines. Return whether they are known. Running lines continue while the database is
        unreachable.
        """
        if self._context.clock() < self._read_again_s:
            return False
        try:
            await self._waiting.refill(self._context.ledger, self.batch.id)
        except DATABASE_ERRORS as exc:
            log.warning("lines of batch %s wait for the database: %s", self.batch.id, reason(exc))
            self._read_again_s = self._context.clock() + BACKOFF_S
            return False
        return True

    def _start_lines(self) -> None:
        now_s = self._context.clock()
        if now_s < self._paused_until_s:
            return
        sharing = self._sharing(self)
        capacities = [each for each in self._capacities(now_s) if each.site.name not in sharing.taken]
        model = self._model
        serving = [site.name for site in self._usable_sites() if can_serve(site, model, now_s)]
        self._homes.begin(capacities, serving)
        if capacities:
            lines = self._take_lines(fair_share(capacities, sharing.sites), now_s, sharing)
            for line, site in zip(lines, self._homes.assign(lines, capacities), strict=True):
                self._start_line(line, site)
        elif self._can_run_nowhere():
            for line in self._take_lines(PAGE_LINES, now_s, sharing):
                self._start_line(line, "")

    def _start_line(self, line: Line, site: str) -> None:
        # Usage is stored once per id, and a job that lost its lease can't store its count of runs.
        query_id = f"{self.batch.id}-{line.number}-{self._id}-{line.runs}"
        self._in_flight[query_id] = site
        task = asyncio.create_task(self._run_line(line, query_id, site), name=query_id)
        self._running[task] = line
        self._running_work += work_of(line)
        task.add_done_callback(self._on_line_done)

    def _on_line_done(self, task: asyncio.Task[Outcome | Retry]) -> None:
        self._in_flight.pop(task.get_name(), None)

    def _capacities(self, now_s: float) -> list[SiteCapacity]:
        starting: dict[str, int] = {}
        for query_id, site in self._in_flight.items():
            if not self._context.dispatched(query_id):
                starting[site] = starting.get(site, 0) + 1
        return available(self._usable_sites(), self._model, starting, now_s)

    def _take_lines(self, max_lines: int, now_s: float, sharing: Sharing) -> list[Line]:
        """Take the lines to start now, within the limits: due retries first, then the queue."""
        limits = self._context.limits
        sites, model = self._usable_sites(), self._model
        running = [task.get_name() for task in self._running if not task.done()]
        starting = len(running) - sum(map(self._context.dispatched, running))
        max_lines = min(
            max_lines,
            lines_of_batch(sites, model, sharing, limits.in_flight) - len(self._running),
            max(1, limits.starting // sharing.replica) - starting,
        )
        at_sites, waiting_there = lines_at_once(sites, model) // sharing.sites, lines_waiting(sites, model)
        size = sum(line.size for line in self._running.values())
        lines: list[Line] = []
        while len(lines) < max_lines:
            waiting = self._waiting.next_end(self._blend, at_sites, waiting_there)
            if (line := self._next_line(now_s, waiting)) is None:
                break
            if size + line.size > limits.in_flight_bytes and (size or lines):
                if line.runs:  # it was not in `waiting`, which may be no queue of lines at all
                    heappush(self._retries, (now_s, line.number, line))
                else:
                    waiting.appendleft(line)
                break
            size += line.size
            self._blend.started(line, self._left_work)
            lines.append(line)
        return lines

    def _next_line(self, now_s: float, waiting: deque[Line]) -> Line | None:
        if self._retries and self._retries[0][0] <= now_s:
            return heappop(self._retries)[-1]
        return self._homes.take(waiting)

    def _can_run_nowhere(self) -> bool:
        """Return whether the key was revoked, the model is unknown, or all its sites are in regions that the
        key may not use. Each line then fails with that error. If the batch has an answer its sites exist,
        although a newly started gateway may not know them yet.
        """
        if self._context.caller(self.batch.key_id) is None:
            return True
        return self._context.knows_sites() and not self.sites and not self._has_answers

    async def _collect(self) -> None:
        """Wait for lines to end, at most one tick, and write their outcomes."""
        if not self._running:
            await asyncio.sleep(IDLE_TICK_S if self.is_idle else TICK_S)
            return
        self._busy_s = self._context.clock()
        await asyncio.sleep(ROUND_S)
        done, _ = await asyncio.wait(self._running, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            return
        results = [task.result() for task in done]
        outcomes = [each for each in results if isinstance(each, Outcome)]
        retries = [each for each in results if isinstance(each, Retry)]
        for retry in retries:
            self._schedule(retry)
        await self._write(outcomes, [retry.line for retry in retries])
        self._has_answers |= any(not outcome.failed for outcome in outcomes)
        for task in done:
            self._forget(self._running.pop(task), has_outcome=isinstance(task.result(), Outcome))

    def _forget(self, line: Line, *, has_outcome: bool) -> None:
        """Record a line that no longer runs. Without an outcome it will run again."""
        work = work_of(line)
        self._blend.ended(line.number)
        self._running_work -= work
        if has_outcome:
            self._ended_work += work
            self._left_work -= work
            self._kept.pop(line.number, None)
            self._away_since_s.pop(line.number, None)

    def _schedule(self, retry: Retry) -> None:
        due_s, number = self._context.clock() + retry.wait_s, retry.line.number
        heappush(self._retries, (due_s, number, retry.line))
        if not self._kept.get(number) or len(self._kept) > len(self._running) + MAX_KEPT_LINES:
            self._kept.pop(number, None)
        if retry.pauses_batch:
            self._paused_until_s = max(self._paused_until_s, due_s)

    async def _write(self, outcomes: list[Outcome], retried: list[Line]) -> None:
        """Retry a write until the database accepts it. No line starts in the meantime."""
        while True:
            try:
                await self._context.ledger.write(self.batch.id, outcomes, retried)
                return
            except DATABASE_ERRORS as exc:
                log.warning("outcomes of batch %s wait for the database: %s", self.batch.id, reason(exc))
                await asyncio.sleep(BACKOFF_S)

    async def _cancel_running(self) -> None:
        """Cancel the running lines. Their usage is recorded, so a later run of a line gets another id."""
        cancelled, self._running = self._running, {}
        for task in cancelled:
            task.cancel()
        if not cancelled:
            return
        await asyncio.wait(cancelled)
        results = [task.result() for task in cancelled if not task.cancelled()]
        outcomes = [each for each in results if isinstance(each, Outcome)]  # paid for: not to be run again
        answered = {each.number for each in outcomes}
        retried = [
            replace(line, runs=line.runs + 1) for line in cancelled.values() if line.number not in answered
        ]
        with suppress(LeaseLost, *DATABASE_ERRORS):
            await self._context.ledger.write(self.batch.id, outcomes, retried)

    # ---- one line

    async def _run_line(self, line: Line, query_id: str, site: str) -> Outcome | Retry:
        try:
            body = await self._answer_line(line, query_id, site)
        except AboveQuota as exc:
            return self._error(line, query_id, exc)
        except BudgetSpent as exc:  # queries in progress at other replicas may give tokens back
            return self._on_failure(line, query_id, exc)
        except (TooMany, Overloaded, NoSite, ShuttingDown) as exc:
            if isinstance(exc, NoSite) and self._capacities(self._context.clock()):
                return self._on_no_site(line, query_id, exc)  # other lines could run: the cause is this line
            wait_s = exc.retry_after_s or BACKOFF_S
            return Retry(replace(line, runs=line.runs + 1), wait_s, pauses_batch=True)
        except ClientMistake as exc:
            return self._error(line, query_id, exc)
        except DATABASE_ERRORS:
            return Retry(replace(line, runs=line.runs + 1), BACKOFF_S, pauses_batch=True)
        except Exception as exc:  # noqa: BLE001 - it becomes the line's outcome after the last failure
            return self._on_failure(line, query_id, exc)
        return Outcome(line.number, False, response_line(line.custom_id, query_id, body))

    async def _answer_line(self, line: Line, query_id: str, site: str) -> bytes:
        context, batch = self._context, self.batch
        caller = context.caller(batch.key_id)
        if caller is None:
            raise Unauthenticated("The API key that submitted this batch was revoked.")
        data = await context.files.read(batch.input_file_id, line.begins, line.size)
        read = partial(read_line, RawLine(line.number, line.begins, data), batch.endpoint, context.limits)
        request = await context.side_work.run_if_large(batch.tenant, line.size, read)
        return await answer_line(
            batch,
            line,
            request.body,
            caller,
            context,
            query_id=query_id,
            preferred_site=site or None,
            goes_first=self.is_late,
            kept=self._kept.setdefault(line.number, {}),
        )

    def _error(self, line: Line, query_id: str, exc: Exception) -> Outcome:
        endpoint = ENDPOINTS[self.batch.endpoint]
        return Outcome(line.number, True, error_line(endpoint, line.custom_id, query_id, exc))

    def _on_no_site(self, line: Line, query_id: str, exc: NoSite) -> Outcome | Retry:
        """Retry a line that no site with room can serve. For up to an hour this is not a failure while
        another site that may be able to serve it is unreachable.
        """
        model, now_s = self._model, self._context.clock()
        serving = [site for site in self._usable_sites() if model in site.identity.models]
        all_here = self._context.knows_sites() and all(site.state is SiteState.READY for site in serving)
        if all_here or now_s - self._away_since_s.setdefault(line.number, now_s) > MAX_AWAY_S:
            return self._on_failure(line, query_id, exc)
        wait_s = BACKOFF_S * min(2 ** min(line.runs, 16), MAX_AWAY_BACKOFFS)
        return Retry(replace(line, runs=line.runs + 1), wait_s, pauses_batch=False)

    def _on_failure(self, line: Line, query_id: str, exc: Exception) -> Outcome | Retry:
        """Retry a failed line. Its last failure becomes its outcome."""
        if not isinstance(exc, MicoError):
            log.error("line %d of batch %s failed", line.number, self.batch.id, exc_info=exc)
        failures = line.failures + 1
        if failures >= self._context.limits.failures:
            return self._error(line, query_id, exc)
        again = replace(line, runs=line.runs + 1, failures=failures)
        return Retry(again, BACKOFF_S * 2**failures, pauses_batch=False)
