"""The slices of quotas in the database: one round of a replica renews its lease and settles what it holds.

Whoever changes slices of a quota holds the lock on its row. Does not decide who gets what: quotas/shares.py.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar
from uuid import uuid4

from sqlalchemy import Insert, Row, Table, delete, func, select, text, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.quotas.limits import WINDOW_S, Claim, Grant, Kind, LimitId, Scope
from gateway.quotas.meter import month_of
from gateway.quotas.shares import Slice, granted
from gateway.store.engine import reason
from gateway.store.errors import StoreUnavailable
from gateway.store.tables import quota_slices, quotas, replicas

LEASE_S: Final = 15.0
"""A replica that has not renewed for so long is gone; its slices are free after the longest window more."""
ROUND_TIMEOUT_S: Final = 5.0
LIMITS_AT_ONCE: Final = 200
GONE: Final = ""
"""In the place of a replica's name: what those that are gone have used of the month."""

T = TypeVar("T")

Ask = Callable[[LimitId], Claim | None]


class Granted(NamedTuple):
    id: LimitId
    claim: Claim
    grant: Grant


class Left(NamedTuple):
    """What the process before this one, of the same name, held of a limit."""

    id: LimitId
    amount: int
    used: int
    used_at: float


class Round(NamedTuple):
    replicas: int
    grants: list[Granted]


class NameTaken(Exception):
    """Another process renews the leases of this name."""


class SliceTable:
    """Every method raises StoreUnavailable when the database does not answer in time."""

    def __init__(
        self,
        engine: AsyncEngine,
        name: str,
        *,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._name = name
        self._boot_id = uuid4().hex
        self._lease_s = lease_s
        self._clock = clock
        self._mark: tuple[int, int] | None = None

    @property
    def lease_s(self) -> float:
        return self._lease_s

    async def join(self) -> list[Left]:
        """Take this name, and what the process before this one held under it."""

        async def work(connection: AsyncConnection) -> list[Left]:
            await self._renew(connection, take=True)
            mine = select(quota_slices).where(quota_slices.c.replica == self._name)
            found = [*await connection.execute(mine)]
            now = self._clock()
            return [
                Left(id_of(row), row.amount, row.used, row.used_at)
                for row in found
                if row.period in (0, _period(row.kind, now))
            ]

        return await self._transaction(work)

    async def leave(self) -> None:
        """What is held and not used is free at once; what is used, when it can no longer count."""

        async def work(connection: AsyncConnection) -> None:
            mine = replicas.c.name == self._name, replicas.c.boot_id == self._boot_id
            now = await self._database_time(connection)
            left = await connection.execute(update(replicas).where(*mine).values(expires_at=now))
            if left.rowcount:
                held = update(quota_slices).where(quota_slices.c.replica == self._name)
                await connection.execute(held.values(amount=quota_slices.c.used, want=0))

        await self._transaction(work)

    def rename(self) -> None:
        """Another process goes by this name: it keeps it."""
        self._name = f"{self._name}.{self._boot_id[:8]}"

    async def limits(self) -> dict[LimitId, int] | None:
        """None if they are as they were the last time."""

        async def work(
            connection: AsyncConnection,
        ) -> tuple[tuple[int, int], dict[LimitId, int]] | None:
            stamps = func.coalesce(func.sum(quotas.c.stamp), 0)
            count, stamped = (
                await connection.execute(select(func.count(), stamps).select_from(quotas))
            ).one()
            mark = (count, int(stamped))
            if mark == self._mark:
                return None
            return mark, {id_of(row): row.amount for row in await connection.execute(select(quotas))}

        changed = await self._transaction(work)
        if changed is None:
            return None
        self._mark, found = changed  # only now: what did not arrive is asked for again
        return found

    async def round(self, restless: Iterable[LimitId], ask: Ask) -> Round:
        """Renew the lease; settle the slices that are restless here, or that others are short of.

        Raises NameTaken.
        """
        now = self._clock()
        alive, hungry = await self._transaction(self._look)
        wanted = sorted({*restless, *hungry})
        grants: list[Granted] = []
        for start in range(0, len(wanted), LIMITS_AT_ONCE):
            part = wanted[start : start + LIMITS_AT_ONCE]

            async def work(connection: AsyncConnection, part: list[LimitId] = part) -> list[Granted]:
                return await self._settle(connection, part, ask, alive, now)

            grants += await self._transaction(work)
        return Round(len(alive), grants)

    async def _look(self, connection: AsyncConnection) -> tuple[list[str], list[LimitId]]:
        await self._renew(connection)
        now = await self._database_time(connection)
        found = [*await connection.execute(select(replicas))]
        if any(row.expires_at + WINDOW_S < now for row in found):
            await self._bury(connection, now)
        alive = [row.name for row in found if row.expires_at >= now]
        columns = quota_slices.c.scope, quota_slices.c.subject, quota_slices.c.kind
        short = select(*columns).where(quota_slices.c.want > quota_slices.c.amount).distinct()
        return sorted({*alive, self._name}), [id_of(row) for row in await connection.execute(short)]

    async def _renew(self, connection: AsyncConnection, *, take: bool = False) -> None:
        """A write comes first: on SQLite it is the lock."""
        held = replicas.c.name == self._name, replicas.c.boot_id == self._boot_id
        until = await self._database_time(connection) + self._lease_s
        renewed = await connection.execute(update(replicas).where(*held).values(expires_at=until))
        if renewed.rowcount:
            return
        values = {"name": self._name, "boot_id": self._boot_id, "expires_at": until}
        into = upsert(self._engine.dialect.name, replicas, ("boot_id", "expires_at") if take else ())
        if (await connection.execute(into.returning(replicas.c.name), values)).first() is None:
            raise NameTaken(self._name)

    async def _settle(
        self, connection: AsyncConnection, ids: Sequence[LimitId], ask: Ask, alive: list[str], now: float
    ) -> list[Granted]:
        columns = quotas.c.scope, quotas.c.subject, quotas.c.kind
        locked = select(quotas).where(tuple_(*columns).in_(ids)).order_by(*columns).with_for_update()
        if self._engine.dialect.name == "sqlite":
            await self._renew(connection)
        limits = {id_of(row): row.amount for row in await connection.execute(locked)}
        rows = await self._rows(connection, ids)
        grants = []
        for limit_id, limit in limits.items():
            claim = ask(limit_id)
            if claim is not None:
                grants.append(self._grant(limit_id, limit, claim, rows[limit_id], alive))
        if grants:
            into = upsert(
                self._engine.dialect.name, quota_slices, ("period", "amount", "used", "used_at", "want")
            )
            await connection.execute(into, [self._row(each, now) for each in grants])
        return grants

    def _grant(
        self, limit_id: LimitId, limit: int, claim: Claim, rows: list[Row[Any]], alive: list[str]
    ) -> Granted:
        mine = next((row for row in rows if row.replica == self._name), None)
        if mine is None:  # nothing is written down: what was held is not ours any more
            claim = claim._replace(ceiling=0)
        others = [_slice(row, claim.period, alive) for row in rows if row.replica != self._name]
        return Granted(limit_id, claim, granted(limit, self._name, claim, others, alive))

    def _row(self, granted: Granted, now: float) -> dict[str, Any]:
        claim = granted.claim
        return {
            **granted.id._asdict(),
            "replica": self._name,
            "period": claim.period,
            "amount": granted.grant.amount,
            "used": claim.used,
            "used_at": now,
            "want": claim.want,
        }

    async def _rows(
        self, connection: AsyncConnection, ids: Sequence[LimitId]
    ) -> Mapping[LimitId, list[Row[Any]]]:
        columns = quota_slices.c.scope, quota_slices.c.subject, quota_slices.c.kind
        found: dict[LimitId, list[Row[Any]]] = defaultdict(list)
        for row in await connection.execute(select(quota_slices).where(tuple_(*columns).in_(ids))):
            found[id_of(row)].append(row)
        return found

    async def _bury(self, connection: AsyncConnection, now: float) -> None:
        """Replicas that are gone for longer than any minute: of their slices only the month's use is kept."""
        await connection.execute(delete(replicas).where(replicas.c.expires_at + WINDOW_S < now))
        left = quota_slices.c.replica.not_in(select(replicas.c.name)), quota_slices.c.replica != GONE
        rows = await connection.execute(delete(quota_slices).where(*left).returning(quota_slices))
        for row in [*rows]:
            if row.kind == Kind.MONTH:
                await self._keep_spent(connection, row)

    async def _keep_spent(self, connection: AsyncConnection, row: Row[Any]) -> None:
        into = upsert(self._engine.dialect.name, quota_slices, ())
        nothing = {**row._mapping, "replica": GONE, "amount": 0, "used": 0, "want": 0}
        await connection.execute(into, nothing)
        kept = quota_slices.c
        same = kept.scope == row.scope, kept.subject == row.subject, kept.kind == row.kind
        used = func.coalesce(
            select(kept.used).where(*same, kept.replica == GONE, kept.period == row.period).scalar_subquery(),
            0,
        )
        total = int(await connection.scalar(select(used)) or 0) + row.used
        await connection.execute(
            update(quota_slices)
            .where(*same, kept.replica == GONE, kept.period <= row.period)
            .values(period=row.period, amount=total, used=total, used_at=row.used_at)
        )

    async def _database_time(self, connection: AsyncConnection) -> float:
        """One clock for all replicas; of SQLite they share the machine's."""
        if self._engine.dialect.name == "sqlite":
            return self._clock()
        return float(await connection.scalar(text("SELECT extract(epoch FROM clock_timestamp())")) or 0.0)

    async def _transaction(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(ROUND_TIMEOUT_S), self._engine.begin() as connection:
                return await work(connection)
        except TimeoutError as exc:
            raise StoreUnavailable(f"no answer within {ROUND_TIMEOUT_S:g} s") from exc
        except (SQLAlchemyError, OSError) as exc:
            raise StoreUnavailable(reason(exc)) from exc


def id_of(row: Any) -> LimitId:
    return LimitId(Scope(row.scope), row.subject, Kind(row.kind))


def upsert(dialect: str, into: Table, changed: Iterable[str]) -> Insert:
    """INSERT that changes these columns of a row which is there already; with none it leaves it alone."""
    insert = sqlite.insert(into) if dialect == "sqlite" else postgresql.insert(into)
    names = [*changed]
    if not names:
        return insert.on_conflict_do_nothing()
    key = [column.name for column in into.primary_key]
    return insert.on_conflict_do_update(
        index_elements=key, set_={name: insert.excluded[name] for name in names}
    )


def _slice(row: Row[Any], period: int, alive: Sequence[str]) -> Slice:
    """As it counts now: what another month has used counts no more, what is held counts on."""
    past = row.period != period
    amount = 0 if past and row.replica == GONE else row.amount
    return Slice(row.replica, amount, 0 if past else row.used, row.want, row.replica in alive)


def _period(kind: str, now: float) -> int:
    return month_of(now) if kind == Kind.MONTH else 0
