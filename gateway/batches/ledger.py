"""Stores batches and their lines in the database. A replica runs a batch while it holds the batch's lease.
Only the holder writes outcomes of lines, and each line gets one outcome.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from itertools import islice
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
    not_,
    or_,
    select,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.batches.files import Page, delete_in_steps, file_of, lock_tenant, page_query, publish
from gateway.batches.order import PREFILL_HEAVY
from gateway.batches.values import (
    UNFINISHED,
    Batch,
    BatchStatus,
    File,
    Line,
    Outcome,
    Outline,
    Purpose,
    RunningLines,
)
from gateway.routing.fleet import PROMPT_TOKEN_WORK
from gateway.store.database import database_time
from gateway.store.tables import batch_lines, batches

ROWS_AT_ONCE: Final = 500
LEASE_S: Final = 15.0
"""Time after which another replica takes over from one that died."""
MICROSECONDS: Final = 1_000_000
IDS_TELL_SINCE: Final = 1_795_996_800.0
"""30 November 2026. Ids created before then are random."""
CLOCKS_DIFFER_S: Final = 86_400.0
NONE_RUN: Final[Mapping[str, RunningLines]] = {}
_WORK: Final = func.sum(  # the SQL form of `work_of`
    1
    + batch_lines.c.response_tokens
    + PROMPT_TOKEN_WORK * (batch_lines.c.prompt_tokens - batch_lines.c.shared_tokens)
)


class LeaseLost(Exception):
    """Another replica holds the lease of the batch now."""


class InputFileNotFound(Exception):
    """The tenant has no such file with the purpose 'batch'."""


class TooManyBatches(Exception):
    """The tenant has reached its limit of unfinished batches."""


class Ledger:
    """The batches of all tenants. `owner` identifies one process of one replica, `clock` returns unix time.

    Every method may raise SQLAlchemy's errors.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        owner: str,
        clock: Callable[[], float],
        lease_s: float = LEASE_S,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self.owner = owner
        self.lease_s = lease_s

    # ---- for clients

    async def create(self, batch: Batch, max_unfinished: int, new_file: File | None = None) -> None:
        """Insert a batch and make a new input file visible, in one transaction.

        Raises InputFileNotFound, and TooManyBatches above `max_unfinished` per tenant.
        """
        async with self._engine.begin() as connection:
            await lock_tenant(connection, batch.tenant)
            if new_file is not None:
                await publish(connection, new_file)
            if await connection.scalar(file_of(batch.tenant, batch.input_file_id, Purpose.BATCH)) is None:
                raise InputFileNotFound
            if int(await connection.scalar(_count_unfinished(batch.tenant)) or 0) >= max_unfinished:
                raise TooManyBatches
            await connection.execute(
                insert(batches), {name: getattr(batch, name) for name in Batch.__slots__}
            )

    async def get(self, tenant: str, batch_id: str) -> Batch | None:
        async with self._engine.connect() as connection:
            query = select(batches).where(batches.c.tenant == tenant, batches.c.id == batch_id)
            row = (await connection.execute(query)).first()
            return None if row is None else await _with_counts(connection, _batch(row))

    async def list_page(self, tenant: str | None, page: Page, id_prefix: str = "") -> list[Batch]:
        """Return the batches of one page and one more if there are more. `tenant` None: of all tenants."""
        conditions = [batches.c.id.startswith(id_prefix, autoescape=True)] if id_prefix else []
        if tenant is not None:
            conditions.append(batches.c.tenant == tenant)
        gone_at = None if page.after is None else _created_at(page.after, self._clock())
        async with self._engine.connect() as connection:
            query = await page_query(connection, batches, conditions, page, gone_at)
            rows = (await connection.execute(query)).all()
            return [await _with_counts(connection, _batch(row)) for row in rows]

    async def cancel(self, tenant: str, batch_id: str) -> bool:
        """Cancel a batch. Return False if the tenant has no such batch that can still be cancelled."""
        cancellable = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
        cancel = (
            update(batches)
            .where(batches.c.tenant == tenant, batches.c.id == batch_id, batches.c.status.in_(cancellable))
            .values(status=BatchStatus.CANCELLING, cancelling_at=self._clock())
        )
        async with self._engine.begin() as connection:
            return bool((await connection.execute(cancel)).rowcount)

    # ---- leases

    async def lease(self, max_batches: int, running: Mapping[str, RunningLines] = NONE_RUN) -> list[Batch]:
        """Renew this owner's leases and take new ones, oldest first, up to `max_batches` in all.

        `running` has the progress of the owner's batches by id. Return all batches that it holds now.
        """
        now = await self._database_time()
        is_ours = batches.c.leased_by == self.owner
        ends = batches.c.leased_until
        free = or_(
            batches.c.leased_by.is_(None),
            ends < now,
            ends > now + 2 * self.lease_s,  # the database's clock was set back
            is_ours,
        )
        claimable = (
            select(batches)
            .where(batches.c.status.in_(UNFINISHED), free)
            .order_by(case((is_ours, 0), else_=1), batches.c.created_at, batches.c.id)
            .limit(max_batches)
        )
        async with self._engine.connect() as connection:
            candidates = [_batch(row) for row in await connection.execute(claimable)]
        return [
            batch
            for batch in candidates
            if await self._take(batch.id, free, now, running.get(batch.id, RunningLines()))
        ]

    async def _database_time(self) -> float:
        async with self._engine.connect() as connection:
            return await database_time(connection, self._clock)

    async def _take(
        self, batch_id: str, free: ColumnElement[bool], now: float, running: RunningLines
    ) -> bool:
        take = (
            update(batches)
            .where(batches.c.id == batch_id, batches.c.status.in_(UNFINISHED), free)
            .values(leased_by=self.owner, leased_until=now + self.lease_s, **running._asdict())
        )
        async with self._engine.begin() as connection:
            return bool((await connection.execute(take)).rowcount)

    async def release(self, batch_id: str) -> None:
        async with self._engine.begin() as connection:
            await connection.execute(
                update(batches).where(self._is_ours(batch_id)).values(leased_by=None, leased_until=None)
            )

    async def change(self, batch_id: str, allowed: Sequence[BatchStatus] = UNFINISHED, **values: Any) -> bool:
        """Change a batch if this owner holds it and its status is in `allowed`. Return whether it did."""
        async with self._engine.begin() as connection:
            return await self._change(connection, batch_id, allowed, values)

    async def end(
        self,
        batch_id: str,
        status: BatchStatus,
        *,
        at: float,
        visible_files: Sequence[File] = (),
        **values: Any,
    ) -> bool:
        """End a batch if this owner holds it, and make its files visible. Return whether it did."""
        values = {**values, "status": status, f"{status.value}_at": at}
        async with self._engine.begin() as connection:
            ended = await self._change(connection, batch_id, UNFINISHED, values)
            for file in visible_files if ended else ():
                await publish(connection, file)
        return ended

    async def _change(
        self,
        connection: AsyncConnection,
        batch_id: str,
        allowed: Sequence[BatchStatus],
        values: dict[str, Any],
    ) -> bool:
        is_ours = and_(self._is_ours(batch_id), batches.c.status.in_(allowed))
        return bool((await connection.execute(update(batches).where(is_ours).values(**values))).rowcount)

    def _is_ours(self, batch_id: str) -> ColumnElement[bool]:
        return and_(batches.c.id == batch_id, batches.c.leased_by == self.owner)

    # ---- lines

    async def add_lines(self, batch_id: str, lines: Iterable[Line]) -> None:
        """Write all lines of a batch that this owner holds, replacing the lines of an earlier try.

        Raises LeaseLost and leaves the lines of the next holder unchanged.
        """
        await self._remove_lines(
            and_(batch_lines.c.batch_id == batch_id, exists().where(self._is_ours(batch_id)))
        )
        rows = (_row(batch_id, line) for line in lines)
        while page := list(islice(rows, ROWS_AT_ONCE)):
            async with self._engine.begin() as connection:
                await self._check_lease(connection, batch_id)
                await connection.execute(insert(batch_lines), page)

    async def unanswered(
        self, batch_id: str, after_place: int, limit: int, prefill_heavy: bool | None = None
    ) -> list[Line]:
        """Return lines without an outcome after `after_place`, of one kind or all, in running order."""
        unanswered = and_(batch_lines.c.batch_id == batch_id, batch_lines.c.outcome.is_(None))
        if prefill_heavy is not None:
            is_heavy = batch_lines.c.prompt_tokens >= PREFILL_HEAVY * batch_lines.c.response_tokens
            unanswered = and_(unanswered, is_heavy if prefill_heavy else not_(is_heavy))
        query = (
            select(batch_lines)
            .where(unanswered, batch_lines.c.place > after_place)
            .order_by(batch_lines.c.place)
            .limit(limit)
        )
        async with self._engine.connect() as connection:
            return [_line(row) for row in await connection.execute(query)]

    async def work_left(self, batch_id: str) -> float:
        """Return the remaining work of the lines without an outcome."""
        unanswered = and_(batch_lines.c.batch_id == batch_id, batch_lines.c.outcome.is_(None))
        async with self._engine.connect() as connection:
            return float(await connection.scalar(select(_WORK).where(unanswered)) or 0.0)

    async def write(self, batch_id: str, outcomes: Sequence[Outcome], retried: Sequence[Line] = ()) -> None:
        """Write outcomes of lines that have none yet, and the counts of runs and failures of `retried` lines.

        Raises LeaseLost, having written nothing.
        """
        line = and_(
            batch_lines.c.batch_id == batch_id,
            batch_lines.c.line == bindparam("number"),
            batch_lines.c.outcome.is_(None),
        )
        answer = update(batch_lines).where(line).values(outcome=bindparam("text"), failed=bindparam("bad"))
        retry = update(batch_lines).where(line).values(runs=bindparam("ran"), failures=bindparam("broke"))
        async with self._engine.begin() as connection:
            await self._check_lease(connection, batch_id)
            if outcomes:
                rows = [{"number": each.number, "text": each.text, "bad": each.failed} for each in outcomes]
                await connection.execute(answer, rows)
            if retried:
                runs = [{"number": each.number, "ran": each.runs, "broke": each.failures} for each in retried]
                await connection.execute(retry, runs)

    async def outcomes(self, batch_id: str) -> AsyncIterator[list[tuple[int, str, Outcome | None]]]:
        """Yield number, custom id and outcome of every line, in pages and in the order of the input file."""
        last = 0
        while True:
            query = (
                select(batch_lines)
                .where(batch_lines.c.batch_id == batch_id, batch_lines.c.line > last)
                .order_by(batch_lines.c.line)
                .limit(ROWS_AT_ONCE // 10)
            )
            async with self._engine.connect() as connection:
                rows = (await connection.execute(query)).all()
            if not rows:
                return
            yield [(row.line, row.custom_id, _outcome(row)) for row in rows]
            last = rows[-1].line

    async def remove_lines(self, batch_id: str) -> int:
        return await self._remove_lines(batch_lines.c.batch_id == batch_id)

    async def _remove_lines(self, where: ColumnElement[bool]) -> int:
        return await delete_in_steps(self._engine, batch_lines, batch_lines.c.line, where, ROWS_AT_ONCE)

    async def _check_lease(self, connection: AsyncConnection, batch_id: str) -> None:
        """Raise LeaseLost if this owner does not hold the batch.

        As the first statement of a transaction that writes lines, it also prevents other replicas from taking
        the batch until the transaction ends.
        """
        hold = update(batches).where(self._is_ours(batch_id)).values(leased_by=self.owner)
        if not (await connection.execute(hold)).rowcount:
            raise LeaseLost(batch_id)

    # ---- after the end

    async def find_expired(self, kept_s: float, limit: int) -> list[str]:
        """Return the ids of batches that have ended and are older than `kept_s`."""
        expired = select(batches.c.id).where(
            batches.c.status.not_in(UNFINISHED), batches.c.created_at < self._clock() - kept_s
        )
        async with self._engine.connect() as connection:
            return list(await connection.scalars(expired.order_by(batches.c.created_at).limit(limit)))

    async def find_with_leftover_lines(self, limit: int) -> list[str]:
        """Return the ids of ended batches that still have lines, because the replica died in between."""
        lines = exists().where(batch_lines.c.batch_id == batches.c.id)
        async with self._engine.connect() as connection:
            ended = select(batches.c.id).where(batches.c.status.not_in(UNFINISHED), lines).limit(limit)
            return list(await connection.scalars(ended))

    async def remove(self, batch_id: str) -> None:
        await self.remove_lines(batch_id)
        async with self._engine.begin() as connection:
            await connection.execute(delete(batches).where(batches.c.id == batch_id))


def new_id(at: float, prefix: str = "batch_") -> str:
    """Return an id that contains its time of creation, so that a list can continue after a deleted batch."""
    return f"{prefix}{int(at * MICROSECONDS):013x}{secrets.token_hex(6)[1:]}"


def _created_at(batch_id: str, now: float) -> float | None:
    """Return the time at which the id of a batch was created, or None if the id is random."""
    found = re.fullmatch(r"[a-z]+_([0-9a-f]{13})[0-9a-f]{11}", batch_id)
    at = 0.0 if found is None else int(found[1], 16) / MICROSECONDS
    return at if IDS_TELL_SINCE <= at < now + CLOCKS_DIFFER_S else None


def _count_unfinished(tenant: str) -> Select[Any]:
    unfinished = and_(batches.c.tenant == tenant, batches.c.status.in_(UNFINISHED))
    return select(func.count()).select_from(batches).where(unfinished)


async def _with_counts(connection: AsyncConnection, batch: Batch) -> Batch:
    """Return `batch` with its outcomes counted, if it has not ended."""
    if batch.ended:
        return batch
    query = (
        select(batch_lines.c.failed, func.count())
        .where(batch_lines.c.batch_id == batch.id, batch_lines.c.failed.is_not(None))
        .group_by(batch_lines.c.failed)
    )
    counts = {bool(failed): count for failed, count in await connection.execute(query)}
    fields = {name: getattr(batch, name) for name in Batch.__slots__}
    return Batch(**{**fields, "completed": counts.get(False, 0), "failed": counts.get(True, 0)})


def _batch(row: Row[Any]) -> Batch:
    fields = {name: row._mapping[name] for name in Batch.__slots__}
    outline = None if row.outline is None else Outline(**row.outline)
    return Batch(**{**fields, "status": BatchStatus(row.status), "outline": outline})


def _line(row: Row[Any]) -> Line:
    fields = {name: row._mapping[name] for name in Line.__slots__ if name != "number"}
    return Line(number=row.line, **fields)


def _row(batch_id: str, line: Line) -> dict[str, Any]:
    fields = {name: getattr(line, name) for name in Line.__slots__ if name != "number"}
    return {"batch_id": batch_id, "line": line.number, **fields}


def _outcome(row: Row[Any]) -> Outcome | None:
    return None if row.outcome is None else Outcome(row.line, bool(row.failed), row.outcome)
