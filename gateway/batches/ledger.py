"""Batches and their lines in the database. A replica works on a batch while it holds its lease; what came of
a line is written once, and only by the holder.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Row,
    Select,
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.batches.files import Page, paged, remove_in_steps, show, take_turn
from gateway.batches.values import UNENDED, Batch, BatchStatus, File, Line, Outcome, Purpose
from gateway.store.tables import batch_lines, batches, files

ROWS_AT_ONCE: Final = 500
LEASE_S: Final = 15.0
"""A replica that dies is replaced after so long. The replicas' clocks may differ by a few seconds."""


class LeaseLost(Exception):
    """Another replica works on this batch now."""


class NoInput(Exception):
    """The tenant has no such file of queries."""


class TooManyBatches(Exception):
    """So many batches of the tenant are not over yet."""


class Ledger:
    """May raise SQLAlchemy's errors. `owner` is one run of one replica."""

    def __init__(
        self,
        engine: AsyncEngine,
        owner: str,
        clock: Callable[[], float] = time.time,
        lease_s: float = LEASE_S,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self.owner = owner
        self.lease_s = lease_s

    # ---- for whoever submits

    async def create(self, batch: Batch, most: int) -> None:
        """If the tenant has `most` at one time with it, and its file. Raises NoInput or TooManyBatches."""
        async with self._engine.begin() as connection:
            await take_turn(connection, batch.tenant)
            if await connection.scalar(_input_of(batch)) is None:
                raise NoInput
            if int(await connection.scalar(_unended(batch.tenant)) or 0) >= most:
                raise TooManyBatches
            await connection.execute(
                insert(batches), {name: getattr(batch, name) for name in Batch.__slots__}
            )

    async def get(self, tenant: str, batch_id: str) -> Batch | None:
        async with self._engine.connect() as connection:
            theirs = select(batches).where(batches.c.tenant == tenant, batches.c.id == batch_id)
            found = (await connection.execute(theirs)).first()
            return None if found is None else await _counted(connection, _batch(found))

    async def listed(self, tenant: str | None, page: Page) -> list[Batch]:
        """`tenant` None is for operators: everyone's."""
        wanted = [batches.c.tenant == tenant] if tenant is not None else []
        async with self._engine.connect() as connection:
            found = (await connection.execute(await paged(connection, batches, wanted, page))).all()
            return [await _counted(connection, _batch(row)) for row in found]

    async def cancel(self, tenant: str, batch_id: str) -> bool:
        """False when there is none of this tenant that could still be cancelled."""
        cancellable = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
        stop = (
            update(batches)
            .where(batches.c.tenant == tenant, batches.c.id == batch_id, batches.c.status.in_(cancellable))
            .values(status=BatchStatus.CANCELLING, cancelling_at=self._clock())
        )
        async with self._engine.begin() as connection:
            return bool((await connection.execute(stop)).rowcount)

    # ---- leases

    async def lease(self, most: int) -> list[Batch]:
        """The batches that are ours from now on, or still; new ones up to `most`, oldest first."""
        now = self._clock()
        ours = batches.c.leased_by == self.owner
        free = or_(batches.c.leased_by.is_(None), batches.c.leased_until < now, ours)
        claimable = (
            select(batches)
            .where(batches.c.status.in_(UNENDED), free)
            .order_by(case((ours, 0), else_=1), batches.c.created_at, batches.c.id)
            .limit(most)
        )
        async with self._engine.connect() as connection:
            found = [_batch(row) for row in await connection.execute(claimable)]
        return [batch for batch in found if await self._take(batch.id, free, now)]

    async def _take(self, batch_id: str, free: ColumnElement[bool], now: float) -> bool:
        mine = (
            update(batches)
            .where(batches.c.id == batch_id, batches.c.status.in_(UNENDED), free)
            .values(leased_by=self.owner, leased_until=now + self.lease_s)
        )
        async with self._engine.begin() as connection:
            return bool((await connection.execute(mine)).rowcount)

    async def release(self, batch_id: str) -> None:
        async with self._engine.begin() as connection:
            await connection.execute(
                update(batches).where(self._held(batch_id)).values(leased_by=None, leased_until=None)
            )

    async def change(self, batch_id: str, while_: Sequence[BatchStatus] = UNENDED, **values: Any) -> bool:
        """Of a batch that we hold and whose status is one of `while_`; says whether it was."""
        async with self._engine.begin() as connection:
            return await self._change(connection, batch_id, while_, values)

    async def end(
        self, batch_id: str, status: BatchStatus, *, at: float, shown: Sequence[File] = (), **values: Any
    ) -> bool:
        """Of a batch that we hold; whether it was. Its files are seen from then on."""
        values = {**values, "status": status, f"{status.value}_at": at}
        async with self._engine.begin() as connection:
            ended = await self._change(connection, batch_id, UNENDED, values)
            for file in shown if ended else ():
                await show(connection, file)
        return ended

    async def _change(
        self,
        connection: AsyncConnection,
        batch_id: str,
        while_: Sequence[BatchStatus],
        values: dict[str, Any],
    ) -> bool:
        ours = and_(self._held(batch_id), batches.c.status.in_(while_))
        return bool((await connection.execute(update(batches).where(ours).values(**values))).rowcount)

    def _held(self, batch_id: str) -> ColumnElement[bool]:
        return and_(batches.c.id == batch_id, batches.c.leased_by == self.owner)

    # ---- lines

    async def add_lines(self, batch_id: str, lines: Sequence[Line]) -> None:
        """All of a batch that we hold, instead of those that an earlier try may have left. Raises LeaseLost:
        then what the next holder has written is as it was.
        """
        await self._remove_lines(
            and_(batch_lines.c.batch_id == batch_id, exists().where(self._held(batch_id)))
        )
        for start in range(0, len(lines), ROWS_AT_ONCE):
            rows = [_row(batch_id, line) for line in lines[start : start + ROWS_AT_ONCE]]
            async with self._engine.begin() as connection:
                await self._check(connection, batch_id)
                await connection.execute(insert(batch_lines), rows)

    async def waiting(self, batch_id: str, after_place: int, most: int) -> list[Line]:
        """Lines without an outcome, in the order of running."""
        of_it = and_(batch_lines.c.batch_id == batch_id, batch_lines.c.outcome.is_(None))
        next_ones = (
            select(batch_lines)
            .where(of_it, batch_lines.c.place > after_place)
            .order_by(batch_lines.c.place)
            .limit(most)
        )
        async with self._engine.connect() as connection:
            return [_line(row) for row in await connection.execute(next_ones)]

    async def write(self, batch_id: str, outcomes: Sequence[Outcome], again: Sequence[Line] = ()) -> None:
        """Outcomes, each where there is none yet, and what lines that run again have behind them.

        Raises LeaseLost; then nothing was written.
        """
        this = and_(
            batch_lines.c.batch_id == batch_id,
            batch_lines.c.line == bindparam("number"),
            batch_lines.c.outcome.is_(None),
        )
        answered = update(batch_lines).where(this).values(outcome=bindparam("text"), failed=bindparam("bad"))
        put_back = update(batch_lines).where(this).values(runs=bindparam("ran"), failures=bindparam("broke"))
        async with self._engine.begin() as connection:
            await self._check(connection, batch_id)
            if outcomes:
                rows = [{"number": each.number, "text": each.text, "bad": each.failed} for each in outcomes]
                await connection.execute(answered, rows)
            if again:
                runs = [{"number": each.number, "ran": each.runs, "broke": each.failures} for each in again]
                await connection.execute(put_back, runs)

    async def outcomes(self, batch_id: str) -> AsyncIterator[list[tuple[int, str, Outcome | None]]]:
        """Each line: its number, its custom id, its outcome if it has one; in the order of the input file."""
        last = 0
        while True:
            some = (
                select(batch_lines)
                .where(batch_lines.c.batch_id == batch_id, batch_lines.c.line > last)
                .order_by(batch_lines.c.line)
                .limit(ROWS_AT_ONCE // 10)
            )
            async with self._engine.connect() as connection:
                rows = (await connection.execute(some)).all()
            if not rows:
                return
            yield [(row.line, row.custom_id, _outcome(row)) for row in rows]
            last = rows[-1].line

    async def remove_lines(self, batch_id: str) -> int:
        return await self._remove_lines(batch_lines.c.batch_id == batch_id)

    async def _remove_lines(self, which: ColumnElement[bool]) -> int:
        return await remove_in_steps(self._engine, batch_lines, batch_lines.c.line, which, ROWS_AT_ONCE)

    async def _check(self, connection: AsyncConnection, batch_id: str) -> None:
        """The first statement of a transaction that writes lines: it also keeps others from taking the batch
        until the transaction ends.
        """
        mine = update(batches).where(self._held(batch_id)).values(leased_by=self.owner)
        if not (await connection.execute(mine)).rowcount:
            raise LeaseLost(batch_id)

    # ---- after the end

    async def over(self, kept_s: float, most: int) -> list[str]:
        """Batches that ended and are older than they are kept."""
        old = select(batches.c.id).where(
            batches.c.status.not_in(UNENDED), batches.c.created_at < self._clock() - kept_s
        )
        async with self._engine.connect() as connection:
            return list(await connection.scalars(old.order_by(batches.c.created_at).limit(most)))

    async def with_leftovers(self, most: int) -> list[str]:
        """Batches that ended and whose lines are still there: whoever ended them died over it."""
        lines = exists().where(batch_lines.c.batch_id == batches.c.id)
        async with self._engine.connect() as connection:
            ended = select(batches.c.id).where(batches.c.status.not_in(UNENDED), lines).limit(most)
            return list(await connection.scalars(ended))

    async def remove(self, batch_id: str) -> None:
        await self.remove_lines(batch_id)
        async with self._engine.begin() as connection:
            await connection.execute(delete(batches).where(batches.c.id == batch_id))


def new_id() -> str:
    return f"batch_{secrets.token_hex(12)}"


def _input_of(batch: Batch) -> Select[Any]:
    return select(files.c.id).where(
        files.c.tenant == batch.tenant,
        files.c.id == batch.input_file_id,
        files.c.complete,
        files.c.purpose == Purpose.BATCH,
    )


def _unended(tenant: str) -> Select[Any]:
    theirs = and_(batches.c.tenant == tenant, batches.c.status.in_(UNENDED))
    return select(func.count()).select_from(batches).where(theirs)


async def _counted(connection: AsyncConnection, batch: Batch) -> Batch:
    """Of one that has not ended, the outcomes so far."""
    if batch.ended:
        return batch
    by = (
        select(batch_lines.c.failed, func.count())
        .where(batch_lines.c.batch_id == batch.id, batch_lines.c.failed.is_not(None))
        .group_by(batch_lines.c.failed)
    )
    counts = {bool(failed): count for failed, count in await connection.execute(by)}
    fields = {name: getattr(batch, name) for name in Batch.__slots__}
    return Batch(**{**fields, "completed": counts.get(False, 0), "failed": counts.get(True, 0)})


def _batch(row: Row[Any]) -> Batch:
    fields = {name: row._mapping[name] for name in Batch.__slots__}
    return Batch(**{**fields, "status": BatchStatus(fields["status"])})


def _line(row: Row[Any]) -> Line:
    fields = {name: row._mapping[name] for name in Line.__slots__ if name != "number"}
    return Line(number=row.line, **fields)


def _row(batch_id: str, line: Line) -> dict[str, Any]:
    fields = {name: getattr(line, name) for name in Line.__slots__ if name != "number"}
    return {"batch_id": batch_id, "line": line.number, **fields}


def _outcome(row: Row[Any]) -> Outcome | None:
    return None if row.outcome is None else Outcome(row.line, bool(row.failed), row.outcome)
