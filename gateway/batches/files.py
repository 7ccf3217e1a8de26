"""Files in the database, in parts of one size: a large one streams in and out, any line of it can be read."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, Row, and_, delete, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.batches.values import DAY_S, HOUR_S, UNENDED, File
from gateway.store.tables import batches, file_parts, files, tenants

PART_BYTES: Final = 64 * 2**10
PARTS_AT_ONCE: Final = 16
"""In one transaction, of writing and of deleting: no other writer waits for long."""
WRITING_WITHIN_S: Final = DAY_S
"""A file that is not complete by then was abandoned."""
RESERVED_WITHIN_S: Final = HOUR_S
"""As long does an upload keep its room, if the replica that it came to died. Longer than any may take."""


class Page(NamedTuple):
    """How a list is asked for. `after` is the id of the last one on the page before."""

    limit: int
    newest_first: bool = True
    after: str | None = None


class InUse(Exception):
    """The batch `batch_id` reads this file."""

    def __init__(self, batch_id: str) -> None:
        super().__init__(batch_id)
        self.batch_id = batch_id


class NoRoom(Exception):
    """The files of this tenant hold `stored` bytes, those that are on their way counted as announced."""

    def __init__(self, stored: int) -> None:
        super().__init__(stored)
        self.stored = stored


class Files:
    """May raise SQLAlchemy's errors. Whoever asks for a file names its tenant; nobody else sees it."""

    def __init__(self, engine: AsyncEngine, clock: Callable[[], float] = time.time) -> None:
        self._engine = engine
        self._clock = clock

    async def begin(self, tenant: str) -> FileWriter:
        """A file that nobody sees until it is finished."""
        async with self._engine.begin() as connection:
            return await self._insert(connection, tenant, 0, WRITING_WITHIN_S)

    async def reserve(self, tenant: str, size: int, most: int) -> FileWriter:
        """As `begin`, if the tenant's files hold at most `most` bytes together with these. Raises NoRoom."""
        theirs = and_(files.c.tenant == tenant, or_(files.c.complete, files.c.expires_at > self._clock()))
        async with self._engine.begin() as connection:
            await take_turn(connection, tenant)
            stored = int(await connection.scalar(select(func.sum(files.c.bytes)).where(theirs)) or 0)
            if stored + size > most:
                raise NoRoom(stored)
            return await self._insert(connection, tenant, size, RESERVED_WITHIN_S)

    async def _insert(
        self, connection: AsyncConnection, tenant: str, size: int, within_s: float
    ) -> FileWriter:
        now = self._clock()
        file = File(f"file-{secrets.token_hex(12)}", tenant, "", "", size, now, now + within_s)
        await connection.execute(insert(files), {**_columns(file), "complete": False})
        return FileWriter(self._engine, file, self._clock)

    async def get(self, tenant: str, file_id: str) -> File | None:
        async with self._engine.connect() as connection:
            found = await connection.execute(select(files).where(_theirs(tenant), files.c.id == file_id))
            return next(map(_file, found), None)

    async def listed(self, tenant: str, purpose: str | None, page: Page) -> list[File]:
        wanted = [_theirs(tenant)] + ([files.c.purpose == purpose] if purpose else [])
        async with self._engine.connect() as connection:
            found = await connection.execute(await paged(connection, files, wanted, page))
            return [_file(row) for row in found]

    async def parts(self, file: File) -> AsyncIterator[bytes]:
        """All of it, a part at a time. Raises LookupError when it is deleted meanwhile."""
        for number in range(-(-file.bytes // PART_BYTES)):
            yield (await self._between(file.id, number, number))[0]

    async def read(self, file_id: str, begins: int, size: int) -> bytes:
        """`size` bytes of it. Raises LookupError when it is not there any more."""
        first, last = begins // PART_BYTES, (begins + size - 1) // PART_BYTES
        data = b"".join(await self._between(file_id, first, last))
        start = begins - first * PART_BYTES
        return data[start : start + size]

    async def delete(self, tenant: str, file_id: str) -> bool:
        """False when there is no such file. Raises InUse while a batch reads it."""
        reading = select(batches.c.id).where(
            batches.c.tenant == tenant, batches.c.input_file_id == file_id, batches.c.status.in_(UNENDED)
        )
        async with self._engine.begin() as connection:
            await take_turn(connection, tenant)
            if batch_id := await connection.scalar(reading.limit(1)):
                raise InUse(batch_id)
            hidden = (
                update(files)
                .where(_theirs(tenant), files.c.id == file_id)
                .values(complete=False, expires_at=self._clock())
            )
            if not (await connection.execute(hidden)).rowcount:
                return False
        await self.remove(file_id)
        return True

    async def remove(self, file_id: str) -> None:
        """Its parts in small steps, then the file: what is left after a crash expires."""
        await remove_in_steps(
            self._engine, file_parts, file_parts.c.part, file_parts.c.file_id == file_id, PARTS_AT_ONCE
        )
        async with self._engine.begin() as connection:
            await connection.execute(delete(files).where(files.c.id == file_id))

    async def expired(self, most: int) -> list[str]:
        """Files whose time is over or that nobody went on writing, unless a batch reads them."""
        read = select(batches.c.input_file_id).where(batches.c.status.in_(UNENDED))
        over = select(files.c.id).where(files.c.expires_at < self._clock(), files.c.id.not_in(read))
        async with self._engine.connect() as connection:
            return list(await connection.scalars(over.order_by(files.c.expires_at).limit(most)))

    async def _between(self, file_id: str, first: int, last: int) -> list[bytes]:
        wanted = (
            select(file_parts.c.data)
            .where(file_parts.c.file_id == file_id, file_parts.c.part.between(first, last))
            .order_by(file_parts.c.part)
        )
        async with self._engine.connect() as connection:
            found = list(await connection.scalars(wanted))
        if len(found) != last - first + 1:
            raise LookupError(f"file {file_id} is not there any more")
        return found


class FileWriter:
    """Takes bytes as they come and holds a megabyte of them at most."""

    def __init__(self, engine: AsyncEngine, file: File, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._waiting = bytearray()
        self._part = 0
        self.id = file.id
        self.tenant = file.tenant
        self.bytes = 0

    async def write(self, data: bytes | bytearray) -> None:
        self._waiting += data
        self.bytes += len(data)
        while len(self._waiting) >= PART_BYTES * PARTS_AT_ONCE:
            await self._store(PARTS_AT_ONCE)

    async def finish(self, filename: str, purpose: str, kept_s: float) -> File:
        """From now on it is there."""
        file = await self.end(filename, purpose, kept_s)
        async with self._engine.begin() as connection:
            await show(connection, file)
        return file

    async def end(self, filename: str, purpose: str, kept_s: float) -> File:
        """Nothing of it is missing; nobody sees it until it is shown."""
        await self._store(PARTS_AT_ONCE)
        now = self._clock()
        return File(self.id, self.tenant, filename, purpose, self.bytes, now, now + kept_s)

    async def discard(self) -> None:
        await Files(self._engine, self._clock).remove(self.id)

    async def _store(self, most: int) -> None:
        starts = range(0, min(len(self._waiting), most * PART_BYTES), PART_BYTES)
        rows = [
            {"file_id": self.id, "part": part, "data": bytes(self._waiting[start : start + PART_BYTES])}
            for part, start in enumerate(starts, self._part)
        ]
        if rows:
            async with self._engine.begin() as connection:
                await connection.execute(insert(file_parts), rows)
            self._part += len(rows)
            del self._waiting[: most * PART_BYTES]


async def take_turn(connection: AsyncConnection, tenant: str) -> None:
    """The lock of a tenant, until this transaction ends. Changes nothing."""
    turn = update(tenants).where(tenants.c.name == tenant).values(stamp=tenants.c.stamp)
    await connection.execute(turn)


async def show(connection: AsyncConnection, file: File) -> None:
    complete = update(files).where(files.c.id == file.id).values(**_columns(file), complete=True)
    await connection.execute(complete)


async def remove_in_steps(
    engine: AsyncEngine, table: Any, key: ColumnElement[Any], which: ColumnElement[bool], step: int
) -> int:
    """Rows of `table` that are `which`, `step` in a transaction, by a key that is unique among them."""
    removed = 0
    while True:
        some = select(key).where(which).limit(step).scalar_subquery()
        async with engine.begin() as connection:
            gone = (await connection.execute(delete(table).where(which, key.in_(some)))).rowcount
        removed += gone
        if gone < step:
            return removed


async def paged(
    connection: AsyncConnection, table: Any, wanted: list[ColumnElement[bool]], page: Page
) -> Any:
    """The rows `wanted`, by age and then by id, one more than the page holds: so that one knows of more."""
    at, key = table.c.created_at, table.c.id
    if page.after is not None:
        since = await connection.scalar(select(at).where(*wanted, key == page.after))
        if since is None:
            raise LookupError(page.after)
        beyond = at < since if page.newest_first else at > since
        same = key < page.after if page.newest_first else key > page.after
        wanted = [*wanted, or_(beyond, and_(at == since, same))]
    by = (at.desc(), key.desc()) if page.newest_first else (at, key)
    return select(table).where(*wanted).order_by(*by).limit(page.limit + 1)


def _theirs(tenant: str) -> ColumnElement[bool]:
    return and_(files.c.tenant == tenant, files.c.complete)


def _columns(file: File) -> dict[str, Any]:
    return {name: getattr(file, name) for name in File.__slots__}


def _file(row: Row[Any]) -> File:
    return File(**{name: row._mapping[name] for name in File.__slots__})
