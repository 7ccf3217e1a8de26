"""Stores files in the database in parts of one size: they stream in and out, and any line can be read."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, Row, Select, and_, delete, func, insert, or_, select, union_all, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.batches.values import DAY_S, HOUR_S, UNFINISHED, File, Purpose
from gateway.store.tables import batches, file_parts, files, tenants, tuning_jobs

PART_BYTES: Final = 64 * 2**10
PARTS_AT_ONCE: Final = 16
"""Parts written or deleted in one transaction, so that no other writer waits for long."""
WRITING_WITHIN_S: Final = DAY_S
"""Time to write a file. One that is incomplete after that was abandoned."""
MAX_DISCARDED: Final = 1_000
NEVER: Final = 1e12
RESERVED_WITHIN_S: Final = HOUR_S
"""Time for which an upload keeps its reserved bytes if its replica died; longer than an upload may take."""


class Page(NamedTuple):
    """A page of a list. `after` is the id of the last entry on the previous page."""

    limit: int
    newest_first: bool = True
    after: str | None = None


class FileInUse(Exception):
    """The batch or the job of fine-tuning `reader` reads the file."""

    def __init__(self, reader: str) -> None:
        super().__init__(reader)
        self.reader = reader


class StorageFull(Exception):
    """The tenant's files hold `stored` bytes, including the announced bytes of running uploads."""

    def __init__(self, stored: int) -> None:
        super().__init__(stored)
        self.stored = stored


class Files:
    """The files of all tenants. A tenant sees only its own. Every method may raise SQLAlchemy's errors."""

    def __init__(self, engine: AsyncEngine, clock: Callable[[], float] = time.time) -> None:
        self._engine = engine
        self._clock = clock
        self._discarded: set[str] = set()  # not removed yet

    async def begin(self, tenant: str) -> FileWriter:
        """Begin a file that is invisible until it is finished."""
        async with self._engine.begin() as connection:
            return await self._insert(connection, tenant, 0, WRITING_WITHIN_S)

    async def reserve(self, tenant: str, size: int, max_bytes: int) -> FileWriter:
        """Begin a file of `size` bytes. Raises StorageFull if the tenant would then have over `max_bytes`."""
        await self._remove_discarded()
        counted = and_(files.c.tenant == tenant, or_(files.c.complete, files.c.expires_at > self._clock()))
        async with self._engine.begin() as connection:
            await lock_tenant(connection, tenant)
            stored = int(await connection.scalar(select(func.sum(files.c.bytes)).where(counted)) or 0)
            if stored + size > max_bytes:
                raise StorageFull(stored)
            return await self._insert(connection, tenant, size, RESERVED_WITHIN_S)

    async def _insert(
        self, connection: AsyncConnection, tenant: str, size: int, within_s: float
    ) -> FileWriter:
        now = self._clock()
        file = File(f"file-{secrets.token_hex(12)}", tenant, "", "", size, now, now + within_s)
        await connection.execute(insert(files), {**_columns(file), "complete": False})
        return FileWriter(self, self._engine, file, self._clock)

    async def get(self, tenant: str, file_id: str) -> File | None:
        async with self._engine.connect() as connection:
            rows = await connection.execute(select(files).where(_visible_to(tenant), files.c.id == file_id))
            return next(map(_file, rows), None)

    async def list_page(self, tenant: str, purpose: str | None, page: Page) -> list[File]:
        conditions = [_visible_to(tenant)] + ([files.c.purpose == purpose] if purpose else [])
        async with self._engine.connect() as connection:
            rows = await connection.execute(await page_query(connection, files, conditions, page))
            return [_file(row) for row in rows]

    async def parts(self, file: File) -> AsyncIterator[bytes]:
        """Yield the content, one part at a time. Raises LookupError if the file is deleted meanwhile."""
        for number in range(-(-file.bytes // PART_BYTES)):
            yield (await self._read_parts(file.id, number, number))[0]

    async def read(self, file_id: str, begins: int, size: int) -> bytes:
        """Read `size` bytes from offset `begins`. Raises LookupError if the file was deleted."""
        first, last = begins // PART_BYTES, (begins + size - 1) // PART_BYTES
        data = b"".join(await self._read_parts(file_id, first, last))
        start = begins - first * PART_BYTES
        return data[start : start + size]

    async def delete(self, tenant: str, file_id: str) -> bool:
        """Delete a file. Return False if there is none. Raises FileInUse while a batch or a job reads it."""
        reading = select(batches.c.id).where(
            batches.c.tenant == tenant, batches.c.input_file_id == file_id, batches.c.status.in_(UNFINISHED)
        )
        training = select(tuning_jobs.c.id).where(
            tuning_jobs.c.tenant == tenant,
            tuning_jobs.c.finished_at.is_(None),
            or_(tuning_jobs.c.training_file_id == file_id, tuning_jobs.c.validation_file_id == file_id),
        )
        async with self._engine.begin() as connection:
            await lock_tenant(connection, tenant)
            if reader := await connection.scalar(union_all(reading, training).limit(1)):
                raise FileInUse(reader)
            hide = (
                update(files)
                .where(_visible_to(tenant), files.c.id == file_id)
                .values(complete=False, expires_at=self._clock())
            )
            if not (await connection.execute(hide)).rowcount:
                return False
        await self.remove(file_id)
        return True

    async def remove(self, file_id: str) -> None:
        """Remove the parts in small steps, then the file. After a crash the rest expires."""
        await delete_in_steps(
            self._engine, file_parts, file_parts.c.part, file_parts.c.file_id == file_id, PARTS_AT_ONCE
        )
        async with self._engine.begin() as connection:
            await connection.execute(delete(files).where(files.c.id == file_id))

    async def discard(self, file_id: str) -> None:
        """Remove a file that was begun. One that a full disk keeps is removed before the next upload, so that
        its reserved bytes do not count until they expire.
        """
        try:
            await self.remove(file_id)
        except (SQLAlchemyError, OSError):
            if len(self._discarded) < MAX_DISCARDED:
                self._discarded.add(file_id)
            raise

    async def _remove_discarded(self) -> None:
        for file_id in [*self._discarded]:
            await self.remove(file_id)
            self._discarded.discard(file_id)

    async def find_expired(self, limit: int) -> list[str]:
        """Return the ids of files that have expired or were abandoned, except those that are read."""
        unfinished = tuning_jobs.c.finished_at.is_(None)
        in_use = union_all(
            select(batches.c.input_file_id).where(batches.c.status.in_(UNFINISHED)),
            select(tuning_jobs.c.training_file_id).where(unfinished),
            select(tuning_jobs.c.validation_file_id).where(
                unfinished, tuning_jobs.c.validation_file_id.is_not(None)
            ),
        )
        expired = select(files.c.id).where(files.c.expires_at < self._clock(), files.c.id.not_in(in_use))
        async with self._engine.connect() as connection:
            return list(await connection.scalars(expired.order_by(files.c.expires_at).limit(limit)))

    async def _read_parts(self, file_id: str, first: int, last: int) -> list[bytes]:
        query = (
            select(file_parts.c.data)
            .where(file_parts.c.file_id == file_id, file_parts.c.part.between(first, last))
            .order_by(file_parts.c.part)
        )
        async with self._engine.connect() as connection:
            parts = list(await connection.scalars(query))
        if len(parts) != last - first + 1:
            raise LookupError(f"file {file_id} is not there any more")
        return parts


class FileWriter:
    """Writes one file as its bytes arrive; buffers one megabyte at most."""

    def __init__(self, files: Files, engine: AsyncEngine, file: File, clock: Callable[[], float]) -> None:
        self._files = files
        self._engine = engine
        self._clock = clock
        self._buffer = bytearray()
        self._part = 0
        self.id = file.id
        self.tenant = file.tenant
        self.bytes = 0

    async def write(self, data: bytes | bytearray) -> None:
        self._buffer += data
        self.bytes += len(data)
        while len(self._buffer) >= PART_BYTES * PARTS_AT_ONCE:
            await self._store(PARTS_AT_ONCE)

    async def finish(self, filename: str, purpose: str, kept_s: float) -> File:
        """Complete the file and make it visible."""
        file = await self.complete(filename, purpose, kept_s)
        async with self._engine.begin() as connection:
            await publish(connection, file)
        return file

    async def flush(self) -> None:
        """Write the rest of the bytes. The file stays invisible, and expires unless `keep` is called."""
        await self._store(PARTS_AT_ONCE)

    async def complete(self, filename: str, purpose: str, kept_s: float) -> File:
        """Write the rest of the bytes. The file stays invisible until `publish`."""
        await self._store(PARTS_AT_ONCE)
        now = self._clock()
        return File(self.id, self.tenant, filename, purpose, self.bytes, now, now + kept_s)

    async def discard(self) -> None:
        await self._files.discard(self.id)

    async def _store(self, max_parts: int) -> None:
        starts = range(0, min(len(self._buffer), max_parts * PART_BYTES), PART_BYTES)
        rows = [
            {"file_id": self.id, "part": part, "data": bytes(self._buffer[start : start + PART_BYTES])}
            for part, start in enumerate(starts, self._part)
        ]
        if rows:
            async with self._engine.begin() as connection:
                await connection.execute(insert(file_parts), rows)
            self._part += len(rows)
            del self._buffer[: max_parts * PART_BYTES]


async def lock_tenant(connection: AsyncConnection, tenant: str) -> None:
    """Lock the tenant's row until this transaction ends. The update changes nothing."""
    lock = update(tenants).where(tenants.c.name == tenant).values(stamp=tenants.c.stamp)
    await connection.execute(lock)


def file_of(tenant: str, file_id: str, purpose: Purpose) -> Select[Any]:
    """Select the id of a tenant's file, if it is complete and has this purpose."""
    return select(files.c.id).where(_visible_to(tenant), files.c.id == file_id, files.c.purpose == purpose)


async def publish(connection: AsyncConnection, file: File) -> None:
    """Make a completed file visible to its tenant."""
    complete = update(files).where(files.c.id == file.id).values(**_columns(file), complete=True)
    await connection.execute(complete)


async def keep(connection: AsyncConnection, file_id: str, size: int) -> None:
    """Keep an invisible file until it is removed."""
    kept = update(files).where(files.c.id == file_id).values(bytes=size, expires_at=NEVER)
    await connection.execute(kept)


async def expire(connection: AsyncConnection, file_ids: Sequence[str], at: float) -> None:
    """Have files removed some time after this, if nobody does it before."""
    await connection.execute(update(files).where(files.c.id.in_(file_ids)).values(expires_at=at))


async def delete_in_steps(
    engine: AsyncEngine, table: Any, key: ColumnElement[Any], where: ColumnElement[bool], step: int
) -> int:
    """Delete the rows that match `where`, `step` rows per transaction. `key` is unique among them.

    Returns the number of rows deleted.
    """
    removed = 0
    while True:
        some = select(key).where(where).limit(step).scalar_subquery()
        async with engine.begin() as connection:
            deleted = (await connection.execute(delete(table).where(where, key.in_(some)))).rowcount
        removed += deleted
        if deleted < step:
            return removed


async def page_query(
    connection: AsyncConnection,
    table: Any,
    conditions: list[ColumnElement[bool]],
    page: Page,
    gone_at: float | None = None,
) -> Any:
    """Select the rows of one page, by age and then by id, and one row more, which shows that there are more.

    `conditions`: those of the whole list. `gone_at`: when the row `page.after` was created, in case it was
    deleted. Raises LookupError if it does not exist, and that is None.
    """
    at, key = table.c.created_at, table.c.id
    if page.after is not None:
        found = await connection.scalar(select(at).where(*conditions, key == page.after))
        since = gone_at if found is None else found
        if since is None:
            raise LookupError(page.after)
        beyond = at < since if page.newest_first else at > since
        same = key < page.after if page.newest_first else key > page.after
        conditions = [*conditions, or_(beyond, and_(at == since, same))]
    by = (at.desc(), key.desc()) if page.newest_first else (at, key)
    return select(table).where(*conditions).order_by(*by).limit(page.limit + 1)


def _visible_to(tenant: str) -> ColumnElement[bool]:
    return and_(files.c.tenant == tenant, files.c.complete)


def _columns(file: File) -> dict[str, Any]:
    return {name: getattr(file, name) for name in File.__slots__}


def _file(row: Row[Any]) -> File:
    return File(**{name: row._mapping[name] for name in File.__slots__})
