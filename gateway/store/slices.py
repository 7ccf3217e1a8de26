"""Store the slices of quotas. In one round a replica renews its lease and settles its slices.

A transaction that changes slices of a quota locks the quota's row. `quotas/shares.py` computes the slices.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeVar
from uuid import uuid4

from sqlalchemy import (
    ColumnElement,
    Insert,
    Row,
    Table,
    and_,
    bindparam,
    delete,
    func,
    select,
    tuple_,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.quotas.limits import WINDOW_S, Claim, Kind, LimitId, Scope
from gateway.quotas.meter import month_of
from gateway.quotas.shares import Slice, granted
from gateway.quotas.slices import GrantedSlice, LeaseRound, NameTaken, PreviousSlice, SlicesUnavailable
from gateway.store.database import database_time, reason
from gateway.store.errors import StoreUnavailable
from gateway.store.tables import quota_slices, quotas, replicas

LEASE_S: Final = 15.0
"""A replica that has not renewed its lease for this long is lost. Its slices are freed WINDOW_S later."""
GONE_KEPT_S: Final = 86_400.0
"""How long a returning replica can still learn that its slices were freed."""
ROUND_TIMEOUT_S: Final = 5.0
LIMITS_PER_TRANSACTION: Final = 200
LIMITS_PER_PAGE: Final = 1_000
GONE: Final = ""
"""Replaces the replica's name in rows that hold the month's use of lost replicas."""


def known(columns: Any) -> ColumnElement[bool]:
    """Match quotas of kinds that this program knows; a newer program may have set others."""
    return and_(columns.scope.in_([*Scope]), columns.kind.in_([*Kind]))


def is_known(row: Any) -> bool:
    """Return whether this program knows the kind of a limit, as `known` does."""
    return row.scope in _SCOPES and row.kind in _KINDS


_SCOPES, _KINDS = {str(each): each for each in Scope}, {str(each): each for each in Kind}
_ID = quota_slices.c.scope, quota_slices.c.subject, quota_slices.c.kind
_LIMIT_ID = quotas.c.scope, quotas.c.subject, quotas.c.kind

# Statements of every round, twice a second: building one costs more than executing it.
_MARK = select(func.count(), func.coalesce(func.sum(quotas.c.stamp), 0)).select_from(quotas)
_LIMITS = (
    select(quotas)
    .where(
        tuple_(*_LIMIT_ID)
        > tuple_(bindparam("after_scope"), bindparam("after_subject"), bindparam("after_kind"))
    )
    .order_by(*_LIMIT_ID)
    .limit(LIMITS_PER_PAGE)
)
"""A page of all limits, including kinds unknown to this program, read by the index alone."""
_IS_SHORT = known(quota_slices.c), quota_slices.c.want > quota_slices.c.amount
_SHORT = select(*_ID).where(*_IS_SHORT).distinct()
_REPLICAS = select(
    replicas,
    select(func.count()).select_from(quotas).scalar_subquery().label("limits"),
    select(func.coalesce(func.sum(quotas.c.stamp), 0)).scalar_subquery().label("stamps"),
    select(quota_slices.c.kind).where(*_IS_SHORT).exists().label("any_short"),
)
"""All replicas, including this one, with the marks that show whether anything else must be read."""


def _among_subjects(columns: Any) -> ColumnElement[bool]:
    """Match the limits of `subjects` by the index. Matching tuples alone would scan the table."""
    return and_(columns.scope.in_([*Scope]), columns.subject.in_(bindparam("subjects", expanding=True)))


_AMONG_IDS = _among_subjects(quotas.c), tuple_(*_LIMIT_ID).in_(bindparam("ids", expanding=True))
_LOCKED = select(quotas).where(*_AMONG_IDS).order_by(*_LIMIT_ID).with_for_update()
_SLICES = select(quota_slices).where(_among_subjects(quota_slices.c))
"""Includes slices of other kinds of these subjects, even unknown kinds: listing each id takes longer than
reading them.
"""
_RENEWED = (
    update(replicas)
    .where(replicas.c.name == bindparam("own"), replicas.c.boot_id == bindparam("boot"))
    .values(expires_at=bindparam("until"))
)
_RENEWED_AS_WRITTEN = _RENEWED.where(replicas.c.expires_at == bindparam("written"))
_RENEWED_AS_GONE = _RENEWED.where(replicas.c.expires_at < 0.0)

T = TypeVar("T")

ClaimOf = Callable[[LimitId], Claim | None]


class _RoundState(NamedTuple):
    """State read before a round settles: the database's time, live replicas, scarce limits and quotas."""

    now: float
    alive: list[str]
    short: list[LimitId]
    mark: tuple[int, int]
    limits: dict[LimitId, int] | None


class SlicesAway(StoreUnavailable, SlicesUnavailable):
    """The database is unreachable. Both StoreUnavailable and SlicesUnavailable, since leasing imports no
    store.
    """


class SliceTable:
    """Slices by replica. Every method raises SlicesAway when the database does not answer in time."""

    def __init__(
        self,
        engine: AsyncEngine,
        name: str,
        *,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.time,
        heard: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`clock` returns the machine's unix time, for SQLite. `heard` is called with each reading of the
        database's time.
        """
        self._engine = engine
        self._name = name
        self._boot_id = uuid4().hex
        self._lease_s = lease_s
        self._clock = clock
        self._heard = heard
        self._mark: tuple[int, int] | None = None
        self._renewed_until = 0.0
        self._back_since = float("-inf")  # since the database is reachable again, or replaced
        self._tables_changed = False
        self._freed = False
        self._patience = asyncio.Timeout(None)  # for the transaction in progress
        dialect = engine.dialect.name
        self._put = upsert(dialect, quota_slices, ("period", "amount", "used", "used_at", "want"))

    @property
    def lease_s(self) -> float:
        return self._lease_s

    async def join(self) -> list[PreviousSlice]:
        """Claim this name and return the slices that the previous process held under it."""

        async def work(connection: AsyncConnection) -> list[PreviousSlice]:
            await self._renew(connection, take=True)
            own = select(quota_slices).where(known(quota_slices.c), quota_slices.c.replica == self._name)
            found = [*await connection.execute(own)]
            now = await self._database_time(connection)
            return [
                PreviousSlice(id_of(row), row.amount, row.used, now - row.used_at)
                for row in found
                if not row.period or (Kind(row.kind).is_monthly and row.period == month_of(now))
            ]

        return await self._transaction(work)

    async def leave(self) -> None:
        """Release the unused part of the slices now. The used part is freed when it no longer counts."""

        async def work(connection: AsyncConnection) -> None:
            own = replicas.c.name == self._name, replicas.c.boot_id == self._boot_id
            now = await self._database_time(connection)
            left = await connection.execute(update(replicas).where(*own).values(expires_at=now))
            if left.rowcount:
                slices = update(quota_slices).where(quota_slices.c.replica == self._name)
                await connection.execute(slices.values(amount=quota_slices.c.used, want=0))

        await self._transaction(work)

    def rename(self) -> None:
        """Continue under another name, because another process uses this one."""
        self._name = f"{self._name}.{self._boot_id[:8]}"

    async def limits(self) -> dict[LimitId, int]:
        """Return all limits; later rounds report changes since this call."""

        async def work(connection: AsyncConnection) -> tuple[tuple[int, int], dict[LimitId, int]]:
            return await _mark(connection), await self._limits(connection)

        self._mark, found = await self._transaction(work)  # set only on success: a failed read is repeated
        return found

    async def round(self, unsettled: Iterable[LimitId], claim_of: ClaimOf) -> LeaseRound:
        """Renew the lease. Settle the limits that are `unsettled` here or that another replica is short of.

        Raises NameTaken.
        """
        own = set(unsettled)

        async def first(connection: AsyncConnection) -> tuple[_RoundState, list[LimitId], list[GrantedSlice]]:
            state = await self._read_state(connection)
            if self._tables_changed or self._freed:  # slices of an earlier state grant nothing
                return state, [], []
            wanted = sorted(own.union(state.short))
            chunk = wanted[:LIMITS_PER_TRANSACTION]
            return state, wanted, await self._settle(connection, chunk, claim_of, state)

        state, wanted, grants = await self._transaction(first)
        for start in range(LIMITS_PER_TRANSACTION, len(wanted), LIMITS_PER_TRANSACTION):
            chunk = wanted[start : start + LIMITS_PER_TRANSACTION]

            async def work(connection: AsyncConnection, chunk: list[LimitId] = chunk) -> list[GrantedSlice]:
                await self._renew(connection)
                return await self._settle(connection, chunk, claim_of, state)

            grants += await self._transaction(work)
        self._mark = state.mark
        changed, self._tables_changed = self._tables_changed, False
        freed, self._freed = self._freed, False
        return LeaseRound(tuple(state.alive), grants, state.limits, changed, freed)

    async def _read_state(self, connection: AsyncConnection) -> _RoundState:
        now = await self._renew(connection)
        found = [*await connection.execute(_REPLICAS)]
        if any(row.expires_at > now + 2 * self._lease_s for row in found):
            await self._shorten_leases(connection, now)
        if any(_is_gone(row.expires_at, now) for row in found) and now >= self._back_since + self._lease_s:
            await self._remove_gone_replicas(connection, now)
        alive = sorted({self._name, *(row.name for row in found if row.expires_at >= now)})
        short = [id_of(row) for row in await connection.execute(_SHORT)] if found[0].any_short else []
        mark = found[0].limits, int(found[0].stamps)
        limits = None if mark == self._mark else await self._limits(connection)
        return _RoundState(now, alive, short, mark, limits)

    async def _renew(self, connection: AsyncConnection, *, take: bool = False) -> float:
        """Renew the lease and return the database's time.

        Writes first, because on SQLite the write takes the lock. A lease that differs from the last one
        written was restored from a backup with its slices, or the last write failed. A missing lease is not
        in the backup, or was removed after GONE_KEPT_S.
        """
        now = await self._database_time(connection)
        until, written = now + self._lease_s, self._renewed_until
        values = {"own": self._name, "boot": self._boot_id, "until": until}
        self._renewed_until = until
        if now > written > 0.0:
            self._back_since = now
        if (await connection.execute(_RENEWED_AS_WRITTEN, values | {"written": written})).rowcount:
            return now
        if (await connection.execute(_RENEWED_AS_GONE, values)).rowcount:
            self._freed = True
            return now
        if (await connection.execute(_RENEWED, values)).rowcount:
            self._tables_changed = True
            return now
        is_back = written > 0.0 and not take
        self._freed |= is_back and now - written > WINDOW_S + GONE_KEPT_S
        self._tables_changed = is_back and not self._freed
        row = {"name": self._name, "boot_id": self._boot_id, "expires_at": until}
        into = upsert(self._engine.dialect.name, replicas, ("boot_id", "expires_at") if take else ())
        if (await connection.execute(into.returning(replicas.c.name), row)).first() is None:
            raise NameTaken(self._name)
        return now

    async def _settle(
        self,
        connection: AsyncConnection,
        ids: Sequence[LimitId],
        claim_of: ClaimOf,
        state: _RoundState,
    ) -> list[GrantedSlice]:
        if not ids:
            return []
        among = {"ids": ids, "subjects": [*{each.subject for each in ids}]}
        limits = {id_of(row): row.amount for row in await connection.execute(_LOCKED, among)}
        rows: dict[LimitId, list[Row[Any]]] = defaultdict(list)
        for row in filter(is_known, await connection.execute(_SLICES, among)):
            rows[id_of(row)].append(row)
        grants = []
        for limit_id, limit in limits.items():
            claim = claim_of(limit_id)
            if claim is not None:
                grants.append(self._grant(limit_id, limit, claim, rows[limit_id], state.alive))
        if grants:
            await connection.execute(self._put, [self._row(each, state.now) for each in grants])
        return grants

    def _grant(
        self, limit_id: LimitId, limit: int, claim: Claim, rows: list[Row[Any]], alive: list[str]
    ) -> GrantedSlice:
        own = next((row for row in rows if row.replica == self._name), None)
        if own is None:  # no row: this replica does not hold the slice any more
            claim = claim._replace(ceiling=0)
        others = [_slice(row, claim.period, alive) for row in rows if row.replica != self._name]
        return GrantedSlice(limit_id, claim, granted(limit, self._name, claim, others, alive))

    def _row(self, granted: GrantedSlice, now: float) -> dict[str, Any]:
        claim = granted.claim
        return {
            **granted.id._asdict(),
            "replica": self._name,
            "period": claim.period,
            "amount": granted.grant.amount,
            "used": claim.used,
            "used_at": now,
            "want": granted.grant.want,
        }

    async def _shorten_leases(self, connection: AsyncConnection, now: float) -> None:
        """Shorten leases that end later than one lease from now: the database's clock was set back."""
        too_late = replicas.c.expires_at > now + self._lease_s
        await connection.execute(update(replicas).where(too_late).values(expires_at=now + self._lease_s))

    async def _remove_gone_replicas(self, connection: AsyncConnection, now: float) -> None:
        """Free the slices of replicas lost for longer than WINDOW_S. Only the month's use is kept, under
        GONE.

        A negative `expires_at` is the time since which a replica counts as lost.
        """
        until = replicas.c.expires_at
        await connection.execute(delete(replicas).where(until < 0.0, -until + GONE_KEPT_S < now))
        gone = update(replicas).where(until >= 0.0, until + WINDOW_S < now)
        await connection.execute(gone.values(expires_at=-now))
        held = select(replicas.c.name).where(until >= 0.0)
        orphaned = quota_slices.c.replica.not_in(held), quota_slices.c.replica != GONE
        rows = await connection.execute(delete(quota_slices).where(*orphaned).returning(quota_slices))
        for row in [*rows]:
            if row.kind in [kind for kind in Kind if kind.is_monthly]:
                await self._add_month_use(connection, row)

    async def _add_month_use(self, connection: AsyncConnection, row: Row[Any]) -> None:
        into = upsert(self._engine.dialect.name, quota_slices, ())
        empty = {**row._mapping, "replica": GONE, "amount": 0, "used": 0, "want": 0}
        await connection.execute(into, empty)
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

    async def _limits(self, connection: AsyncConnection) -> dict[LimitId, int]:
        """Read the limits in pages, each with its own timeout. Other tasks run between the pages."""
        found: dict[LimitId, int] = {}
        after = {"after_scope": "", "after_subject": "", "after_kind": ""}
        while rows := (await connection.execute(_LIMITS, after)).all():
            found.update({id_of(row): row.amount for row in rows if is_known(row)})
            last = rows[-1]
            after = {"after_scope": last.scope, "after_subject": last.subject, "after_kind": last.kind}
            self._patience.reschedule(asyncio.get_running_loop().time() + ROUND_TIMEOUT_S)
        return found

    async def _database_time(self, connection: AsyncConnection) -> float:
        now = await database_time(connection, self._clock)
        self._heard(now)
        return now

    async def _transaction(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(ROUND_TIMEOUT_S) as self._patience, self._engine.begin() as connection:
                return await work(connection)
        except TimeoutError as exc:
            raise SlicesAway(f"no answer within {ROUND_TIMEOUT_S:g} s") from exc
        except (SQLAlchemyError, OSError) as exc:
            raise SlicesAway(reason(exc)) from exc


async def _mark(connection: AsyncConnection) -> tuple[int, int]:
    count, stamped = (await connection.execute(_MARK)).one()
    return count, int(stamped)


def id_of(row: Any) -> LimitId:
    """Return the id of the limit that a row belongs to."""
    return LimitId(_SCOPES[row.scope], row.subject, _KINDS[row.kind])


def upsert(dialect: str, into: Table, changed: Iterable[str]) -> Insert:
    """Return an INSERT that updates the `changed` columns of an existing row, or skips the row if there are
    none.
    """
    insert = sqlite.insert(into) if dialect == "sqlite" else postgresql.insert(into)
    names = [*changed]
    if not names:
        return insert.on_conflict_do_nothing()
    key = [column.name for column in into.primary_key]
    return insert.on_conflict_do_update(
        index_elements=key, set_={name: insert.excluded[name] for name in names}
    )


def _is_gone(until: float, now: float) -> bool:
    """Return whether to remove a replica whose lease ended, or that was marked as lost, at `until`."""
    return (until + WINDOW_S if until >= 0.0 else -until + GONE_KEPT_S) < now


def _slice(row: Row[Any], period: int, alive: Sequence[str]) -> Slice:
    """Convert a row: use of another month no longer counts, the held amount does."""
    past = row.period != period
    amount = 0 if past and row.replica == GONE else row.amount
    return Slice(row.replica, amount, 0 if past else row.used, row.want, row.replica in alive)
