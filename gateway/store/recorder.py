"""Record usage, decisions and events write-behind: `record` never waits, and each record is stored once.

The journal is the queue. Whether a segment was written a moment ago, before an outage of the database or
before a `kill -9`, it takes one path: read, insert what is missing, commit, remove.

What a long outage of the database costs, in this order: above DECISIONS_SHARE of the journal queries are
recorded without their decisions, most of a record; above 1 - IN_FLIGHT_SHARE `has_room` is false, so that the
gateway rejects new queries and keeps the rest for those in flight, and site events are only logged. Records
that do not fit are logged and counted.

When the disk is full, records go to the journal's reserve, without their decisions, and from there to the
database. `has_room` is false once half of the reserve is used, and while a record is in memory only, since
nothing on the disk can be written, and the database fails, too.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from gateway.outcome import Outcome
from gateway.site_events import Event
from gateway.store import reserve
from gateway.store.errors import RecordsRefused, StoreError, StoreUnavailable
from gateway.store.journal import LIMIT_BYTES, SEGMENT_BYTES, Journal
from gateway.store.rows import EventRow, Record, event_row, from_line, record_of, to_line
from gateway.store.writer import Writer
from gateway.tasks import cancel, is_cancelled

logger = logging.getLogger(__name__)

FLUSH_S: Final = 0.25
SYNC_S: Final = 0.2
"""A power loss may lose the records of this time. `kill -9` loses none."""
RETRY_S: Final = (0.5, 5.0)
CLOSE_S: Final = 10.0
DECISIONS_SHARE: Final = 1 / 4
IN_FLIGHT_SHARE: Final = 1 / 16
"""The part of the journal that is reserved for queries in flight."""
MEMORY_LINES: Final = 4_096
"""Lines held in memory while the disk refuses them: `kill -9` would lose these."""


@dataclass(frozen=True, slots=True)
class RecorderHealth:
    """State of the recorder. `failing_since` is unix time; `lost` counts records that are in the log only,
    `without_decisions` those whose decisions were dropped.
    """

    pending: int
    journal_bytes: int
    journal_limit_bytes: int
    failing_since: float | None
    lost: int
    without_decisions: int


class Recorder:
    """Journals records in `folder` and stores them through `writer` in the background."""

    def __init__(
        self,
        folder: Path,
        writer: Writer,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        limit_bytes: int = LIMIT_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._writer = writer
        self._segment_bytes = segment_bytes
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._journal: Journal | None = None
        self._memory: deque[bytes] = deque()
        self._flushing = asyncio.Lock()
        self._flush_wanted = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._retry_s = RETRY_S[0]
        self._failing_since: float | None = None
        self._lost = 0
        self._without_decisions = 0
        self._dropping = False
        self._boot_id = secrets.token_hex(8)
        self._events = 0

    async def start(self, *, background: bool = True) -> None:
        """Open the journal, with the records that an earlier process left. Raises JournalTaken."""
        self._journal = await asyncio.to_thread(
            Journal, self._folder, segment_bytes=self._segment_bytes, limit_bytes=self._limit_bytes
        )
        if self.pending:
            logger.info("replaying %d records of an earlier process", self.pending)
            self._flush_wanted.set()
        if background:
            self._tasks = [
                asyncio.create_task(self._flush_for_ever()),
                asyncio.create_task(self._sync_for_ever()),
            ]

    async def close(self) -> None:
        """Store what is possible within CLOSE_S; the rest stays in the journal for the next start."""
        await cancel(*self._tasks)
        self._tasks = []
        if self._journal is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._flush_or_log()
        journal = self._journal
        try:
            self._move_memory_to_journal(journal)
        except OSError as exc:
            while self._memory:
                self._log_lost(self._memory.popleft().decode(), exc)
        if self.pending:
            logger.warning("%d records stay in %s until the next start", self.pending, self._folder)
        self._journal = None
        try:
            await asyncio.to_thread(journal.sync, journal.unsynced())
        except OSError:
            logger.exception("the disk may not have the last records yet; they are in %s", self._folder)
        finally:
            journal.close()

    def record(self, outcome: Outcome, cloud: str = "") -> None:
        """Record how a query ended. Never blocks and never fails the query. `cloud` is the cloud of its site.

        Once there is no room, a query that used no tokens is not recorded; the decisions go before that.
        """
        journal = self._started
        if not (self.has_room or outcome.prompt_tokens or outcome.completion_tokens):
            return
        try:
            line = to_line(self._bounded(record_of(outcome, cloud), journal))
        except (ValueError, TypeError, msgspec.MsgspecError) as exc:
            self._log_lost(repr(outcome), exc)
            return
        self._append(journal, line)

    def _bounded(self, record: Record, journal: Journal) -> Record:
        """Drop the decisions of a record while the journal needs its room for usage."""
        dropping = journal.size_bytes >= self._limit_bytes * DECISIONS_SHARE or journal.reserve_files_used > 0
        if dropping is not self._dropping:
            self._dropping = dropping
            logger.warning(
                "decisions are %s: the journal holds %d of %d bytes",
                "dropped, usage is kept" if dropping else "kept again",
                journal.size_bytes,
                self._limit_bytes,
            )
        if not dropping or not record.decisions:
            return record
        self._without_decisions += 1
        return Record(record.usage, ())

    def record_event(self, event: Event, replica: str) -> None:
        """Record a site event. Never blocks, and uses no room that usage needs."""
        journal = self._started
        if self.has_room:
            self._events += 1
            row = event_row(f"{self._boot_id}-{self._events:08x}", event, replica)
            self._append(journal, to_line(row))
        else:
            logger.warning("an event is in this log only, the journal is full: %s %s", event.site, event.text)

    def _append(self, journal: Journal, line: bytes) -> None:
        try:
            journal.append(line)
        except OSError as exc:
            self._keep_in_memory(line, exc)
        self._flush_wanted.set()

    def _keep_in_memory(self, line: bytes, error: OSError) -> None:
        if len(self._memory) < MEMORY_LINES:
            self._memory.append(line)
        else:
            self._log_lost(line.decode(), error)

    def _log_lost(self, record: str, error: Exception) -> None:
        self._lost += 1
        logger.error("usage is in this log only (%s): %s", error, record)

    async def flush(self) -> bool:
        """Store everything pending. Return False when the database or the disk failed."""
        journal = self._started
        async with self._flushing:
            with suppress(OSError):
                self._move_memory_to_journal(journal)
            try:
                await self._store_memory()
                unreadable = await self._store_sealed(journal)
                if not (unreadable and journal.reserve_files_used):  # a file of the reserve is filled first
                    journal.seal()
                    unreadable = await self._store_sealed(journal)
            except (StoreUnavailable, OSError) as exc:
                self._failed(str(exc))
                return False
            if not unreadable:
                self._succeeded()
            return not unreadable

    async def _store_sealed(self, journal: Journal) -> list[Path]:
        """Return the segments that the disk does not let go; they hold up no other."""
        return [path for path in journal.sealed if not await self._store_segment(journal, path)]

    async def _store_segment(self, journal: Journal, path: Path) -> bool:
        """Store and remove a segment. Return False if the disk does not let it go."""
        try:
            await self._store(await asyncio.to_thread(journal.read, path))
            await journal.remove(path)
        except OSError as exc:
            self._failed(f"journal: {exc}")
            return False
        return True

    def _move_memory_to_journal(self, journal: Journal) -> None:
        """Append the lines held in memory to the journal. Raises OSError while the disk refuses them."""
        while self._memory:
            journal.append(self._memory[0])
            self._memory.popleft()

    async def _store_memory(self) -> None:
        lines = list(self._memory)
        if lines:
            await self._store([line.rstrip(b"\n") for line in lines])
            for _ in lines:
                self._memory.popleft()

    async def _store(self, lines: Sequence[bytes]) -> None:
        records = [record for line in lines if (record := self._readable(line)) is not None]
        if not records:
            return
        try:
            await self._writer.write(records)
        except RecordsRefused:
            for record in records:
                await self._store_alone(record)

    async def _store_alone(self, record: Record | EventRow) -> None:
        try:
            await self._writer.write([record])
        except RecordsRefused as exc:
            self._set_aside(to_line(record).rstrip(b"\n"), exc)

    def _readable(self, line: bytes) -> Record | EventRow | None:
        try:
            return from_line(line)
        except (msgspec.MsgspecError, ValueError) as exc:
            self._set_aside(line, exc)
            return None

    def _set_aside(self, line: bytes, error: Exception) -> None:
        kept = self._started.set_aside(line)
        where = "kept in refused.lines" if kept else "refused.lines is full, so it is in this log only"
        self._lost += 1
        logger.error("a record cannot be stored (%s); %s: %s", error, where, line.decode("utf-8", "replace"))

    def _failed(self, error: str) -> None:
        if self._failing_since is None:
            self._failing_since = self._clock()
            logger.error("usage is not stored now, it waits in the journal: %s", error)

    def _succeeded(self) -> None:
        if self._failing_since is not None:
            logger.warning("usage is stored again, after %.0f s", self._clock() - self._failing_since)
        self._failing_since = None
        self._retry_s = RETRY_S[0]

    async def _flush_for_ever(self) -> None:
        while not is_cancelled():
            await self._flush_wanted.wait()
            await asyncio.sleep(FLUSH_S)  # collects a batch
            self._flush_wanted.clear()
            if not await self._flush_or_log() and not is_cancelled():
                await asyncio.sleep(self._retry_s)
                self._retry_s = min(2 * self._retry_s, RETRY_S[1])
                self._flush_wanted.set()

    async def _flush_or_log(self) -> bool:
        try:
            return await self.flush()
        except Exception as exc:
            logger.exception("a flush went wrong in an unforeseen way")
            self._failed(f"{type(exc).__name__}: {exc}")
            return False

    async def _sync_for_ever(self) -> None:
        journal = self._started
        while True:
            await asyncio.sleep(SYNC_S)
            if paths := journal.unsynced():
                try:
                    await asyncio.to_thread(journal.sync, paths)
                except OSError as exc:
                    self._failed(f"journal: {exc}")
                    self._flush_wanted.set()  # which says when it is over, also where nothing is pending

    @property
    def _started(self) -> Journal:
        if self._journal is None:
            raise StoreError("this store was opened without recording, or is closed")
        return self._journal

    @property
    def pending(self) -> int:
        """Return the number of records that are not in the database yet."""
        return len(self._memory) + (self._journal.lines if self._journal else 0)

    @property
    def has_room(self) -> bool:
        """Return whether the gateway may admit new queries."""
        if self._journal is None:
            return False
        return (
            self._journal.size_bytes < self._limit_bytes * (1 - IN_FLIGHT_SHARE)
            and self._journal.reserve_files_used <= reserve.FILES / 2
            and len(self._memory) < MEMORY_LINES / 2
            and not (self._memory and self._failing_since is not None)
        )

    @property
    def health(self) -> RecorderHealth:
        return RecorderHealth(
            pending=self.pending,
            journal_bytes=self._journal.size_bytes if self._journal else 0,
            journal_limit_bytes=self._limit_bytes,
            failing_since=self._failing_since,
            lost=self._lost,
            without_decisions=self._without_decisions,
        )
