"""One batch as the replica runs it that holds its lease: validate → answer line by line → close."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from heapq import heappop, heappush
from typing import Final, NamedTuple

from sqlalchemy.exc import SQLAlchemyError

from gateway.batches import answer_line, finalize
from gateway.batches.capacity import room, share, spread
from gateway.batches.context import BatchContext
from gateway.batches.ledger import LeaseLost
from gateway.batches.reading import Raw, read_line
from gateway.batches.validating import NoBatch, validated
from gateway.batches.values import Batch, BatchStatus, Line, Outcome
from gateway.domain import Site
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
from gateway.store.database import reason

log = logging.getLogger(__name__)

TICK_S: Final = 0.1
PAGE_LINES: Final = 256
BACKOFF_S: Final = 1.0
AWAY: Final = (SQLAlchemyError, OSError)

Flight = dict[str, str]
"""The lines of this replica that are on their way to a site: by query id, the name of the site."""


class Put(NamedTuple):
    """A line that runs again, not before `wait_s`. `all_wait`: no other line would fare better now."""

    line: Line
    wait_s: float
    all_wait: bool


class Job:
    """`batch` is kept up to date by the runner. `sharers`: how many batches this replica runs now."""

    def __init__(
        self, batch: Batch, context: BatchContext, flight: Flight, sharers: Callable[[], int]
    ) -> None:
        self.batch = batch
        self.closing = False  # from here on nothing of it runs: its end is being written
        self.ending = False  # this process is about to end: nothing new starts
        self._context = context
        self._flight = flight
        self._sharers = sharers
        self._queue: deque[Line] = deque()
        self._again: list[tuple[float, int, Line]] = []  # a heap: the first to be due comes first
        self._running: dict[asyncio.Task[Outcome | Put], Line] = {}
        self._paused_until_s = 0.0
        self._last_place = -1
        self._read_all = False

    @property
    def in_flight(self) -> int:
        return len(self._running)

    async def run(self) -> None:
        """To its end. Raises LeaseLost, and SQLAlchemy's errors when the database is away."""
        if self.batch.status is BatchStatus.VALIDATING and not self._over:
            await self._validate()
        if self.batch.status is BatchStatus.IN_PROGRESS:
            await self._answer()
        if self.batch.ended or self.ending:
            return
        self.closing = True
        await finalize.close(self.batch, self._context, cancelled=self._cancelled)
        log.info("batch %s is over", self.batch.id)

    @property
    def _cancelled(self) -> bool:
        return self.batch.status is BatchStatus.CANCELLING

    @property
    def _over(self) -> bool:
        return self._cancelled or self._context.unix_time() >= self.batch.expires_at

    # ---- validate

    async def _validate(self) -> None:
        context, batch = self._context, self.batch
        try:
            model, lines = await validated(batch, context)
        except NoBatch as no_batch:
            self.closing = True
            await finalize.refuse(batch, no_batch.faults, context)
            self.batch = replace(batch, status=BatchStatus.FAILED)
            return
        await context.ledger.add_lines(batch.id, lines)
        began = {
            "status": BatchStatus.IN_PROGRESS,
            "in_progress_at": context.unix_time(),
            "model": model,
            "total": len(lines),
        }
        going_on = await context.ledger.change(batch.id, (BatchStatus.VALIDATING,), **began)
        status = BatchStatus.IN_PROGRESS if going_on else BatchStatus.CANCELLING
        self.batch = replace(batch, status=status, model=model, total=len(lines))

    # ---- answer

    async def _answer(self) -> None:
        try:
            while not self._over:
                await self._refill()
                if not self._running and (self.ending or not (self._queue or self._again)):
                    return
                if not self.ending:
                    self._start()
                await self._collect()
        finally:
            await self._stop()

    async def _refill(self) -> None:
        """From the place where the last page ended. What runs again is held here."""
        if self._read_all or len(self._queue) >= PAGE_LINES:
            return
        page = await self._context.ledger.waiting(self.batch.id, self._last_place, PAGE_LINES)
        self._queue += page
        self._last_place = page[-1].place if page else self._last_place
        self._read_all = len(page) < PAGE_LINES

    def _start(self) -> None:
        now_s = self._context.clock()
        if now_s < self._paused_until_s:
            return
        free = self._free(now_s)
        window = self._window(share(free, self._sharers()), now_s) if free else []
        sites = spread([line.response_tokens for line in window], free)
        if not free and self._is_unknown():
            window = self._window(PAGE_LINES, now_s)
            sites = [""] * len(window)
        for line, site in zip(window, sites, strict=True):
            query_id = f"{self.batch.id}-{line.number}-{line.runs}"
            self._flight[query_id] = site
            task = asyncio.create_task(self._ended(line, query_id, site), name=query_id)
            self._running[task] = line
            task.add_done_callback(self._landed)

    def _landed(self, task: asyncio.Task[Outcome | Put]) -> None:
        self._flight.pop(task.get_name(), None)

    def _free(self, now_s: float) -> list[tuple[Site, int]]:
        starting: dict[str, int] = {}
        for query_id, site in self._flight.items():
            if not self._context.dispatched(query_id):
                starting[site] = starting.get(site, 0) + 1
        return room(self._context.sites(), self.batch.model or "", starting, now_s)

    def _window(self, most: int, now_s: float) -> list[Line]:
        """The lines that start now: those whose turn comes again, then the next in order."""
        limits = self._context.limits
        most = min(most, limits.in_flight // max(1, self._sharers()) - len(self._running))
        held = sum(line.size for line in self._running.values())
        window: list[Line] = []
        while len(window) < most and (line := self._next(now_s)) is not None:
            if held + line.size > limits.in_flight_bytes and (held or window):
                self._queue.appendleft(line)
                break
            held += line.size
            window.append(line)
        return window

    def _next(self, now_s: float) -> Line | None:
        if self._again and self._again[0][0] <= now_s:
            return heappop(self._again)[-1]
        return self._queue.popleft() if self._queue else None

    def _is_unknown(self) -> bool:
        """Whether it is certain that no site serves the model: then each line is told so."""
        known = self._context.known_models()
        return bool(known) and self.batch.model not in known

    async def _collect(self) -> None:
        """Wait for lines to end, for a tick at most, and write down how."""
        if not self._running:
            await asyncio.sleep(TICK_S)
            return
        done, _ = await asyncio.wait(self._running, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
        outcomes, again = [], []
        for task in done:
            ended = task.result()
            if isinstance(ended, Outcome):
                outcomes.append(ended)
            else:
                again.append(ended.line)
                self._put_back(ended)
        if done:
            await self._write(outcomes, again)
            for task in done:
                del self._running[task]

    def _put_back(self, put: Put) -> None:
        until_s = self._context.clock() + put.wait_s
        heappush(self._again, (until_s, put.line.number, put.line))
        if put.all_wait:
            self._paused_until_s = max(self._paused_until_s, until_s)

    async def _write(self, outcomes: list[Outcome], again: list[Line]) -> None:
        """However long the database is away: nothing new starts meanwhile."""
        while True:
            try:
                await self._context.ledger.write(self.batch.id, outcomes, again)
                return
            except AWAY as exc:
                log.warning("outcomes of batch %s wait for the database: %s", self.batch.id, reason(exc))
                await asyncio.sleep(BACKOFF_S)

    async def _stop(self) -> None:
        """What still runs is given up. Its usage was recorded: a later run of the line has another id."""
        left, self._running = self._running, {}
        for task in left:
            task.cancel()
        if not left:
            return
        await asyncio.wait(left)
        ended = [task.result() for task in left if not task.cancelled()]
        outcomes = [each for each in ended if isinstance(each, Outcome)]  # paid for: nobody asks again
        answered = {each.number for each in outcomes}
        again = [replace(line, runs=line.runs + 1) for line in left.values() if line.number not in answered]
        with suppress(LeaseLost, *AWAY):
            await self._context.ledger.write(self.batch.id, outcomes, again)

    # ---- one line

    async def _ended(self, line: Line, query_id: str, site: str) -> Outcome | Put:
        try:
            body = await self._ask(line, query_id, site)
        except (BudgetSpent, AboveQuota) as spent:
            return Outcome(line.number, True, answer_line.refused(line.custom_id, query_id, spent))
        except (TooMany, Overloaded, NoSite, ShuttingDown) as full:
            if isinstance(full, NoSite) and self._free(self._context.clock()):
                return self._broke(line, query_id, full)  # others could run: it is this line
            wait_s = full.retry_after_s or BACKOFF_S
            return Put(replace(line, runs=line.runs + 1), wait_s, all_wait=True)
        except ClientMistake as mistake:
            return Outcome(line.number, True, answer_line.refused(line.custom_id, query_id, mistake))
        except AWAY:
            return Put(line, BACKOFF_S, all_wait=True)
        except Exception as broken:  # noqa: BLE001 - it becomes the line's outcome, once it has had its runs
            return self._broke(line, query_id, broken)
        return Outcome(line.number, False, answer_line.answered(line.custom_id, query_id, body))

    async def _ask(self, line: Line, query_id: str, site: str) -> bytes:
        context, batch = self._context, self.batch
        caller = context.caller(batch.key_id)
        if caller is None:
            raise Unauthenticated("The API key that submitted this batch was revoked.")
        data = await context.files.read(batch.input_file_id, line.begins, line.size)
        wanted = read_line(Raw(line.number, line.begins, data), batch.endpoint, context.limits)
        return await answer_line.ask(
            answer_line.ENDPOINTS[batch.endpoint],
            wanted,
            caller,
            context,
            query_id=query_id,
            preferred_site=site or None,
            within_s=max(1.0, batch.expires_at - context.unix_time()),
        )

    def _broke(self, line: Line, query_id: str, broken: Exception) -> Outcome | Put:
        if not isinstance(broken, MicoError):
            log.error("line %d of batch %s failed", line.number, self.batch.id, exc_info=broken)
        failures = line.failures + 1
        if failures >= self._context.limits.failures:
            return Outcome(line.number, True, answer_line.refused(line.custom_id, query_id, broken))
        again = replace(line, runs=line.runs + 1, failures=failures)
        return Put(again, BACKOFF_S * 2**failures, all_wait=False)
