"""Store tenants, and the quotas of tenants and keys that operators set. Every change is audited.

Does not count what is in use: `slices.py` and `gateway/quotas` do.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, and_, case, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.quotas.limits import Kind, LimitId, Scope
from gateway.quotas.meter import month_of
from gateway.store.audit import Act, add_entry
from gateway.store.database import database_time, insert_new, lock_table
from gateway.store.errors import StoreError
from gateway.store.key_changes import next_number
from gateway.store.slices import id_of, known
from gateway.store.tables import keys, quota_slices, quotas, tenants

_ID = quotas.c.scope, quotas.c.subject, quotas.c.kind
_SLICE_ID = quota_slices.c.scope, quota_slices.c.subject, quota_slices.c.kind
STAMP_BITS: Final = 40
MAX_AMOUNT: Final = 2**53
"""Largest integer that JSON carries exactly."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant. No query of it gets a priority better (lower) than `best_priority`."""

    name: str
    created_at: float
    best_priority: int


class Quota(NamedTuple):
    """A quota. `in_use` is the sum over all replicas, as each stored it last in this month."""

    id: LimitId
    amount: int
    in_use: int


class UnknownSubject(StoreError):
    """There is no such tenant or key."""


class QuotaTable:
    """Methods may raise SQLAlchemy's errors: the callers are people."""

    def __init__(self, engine: AsyncEngine, *, clock: Callable[[], float] = time.time) -> None:
        self._engine = engine
        self._clock = clock

    async def tenants(self, limit: int | None = None, after: str | None = None) -> list[Tenant]:
        """List tenants by name: at most `limit`, those that follow the name `after`, if given."""
        listed = select(tenants).order_by(tenants.c.name).limit(limit)
        if after is not None:
            listed = listed.where(tenants.c.name > after)
        async with self._engine.connect() as connection:
            found = await connection.execute(listed)
            return [Tenant(row.name, row.created_at, row.best_priority) for row in found]

    async def set_tenant(self, name: str, *, best_priority: int | None, act: Act) -> Tenant:
        """Create or change a tenant; None leaves its best priority as it is, 0 of a new one."""
        async with self._engine.begin() as connection:
            number = await next_number(connection)
            now = self._clock()  # after other changes have ended, so that the audit is in their order
            new = {"name": name, "created_at": now}
            before = await connection.scalar(select(tenants.c.best_priority).where(tenants.c.name == name))
            await connection.execute(insert_new(connection.dialect.name, tenants), new)
            if best_priority is None:
                best_priority = before or 0
            change = update(tenants).where(tenants.c.name == name)
            await connection.execute(change.values(best_priority=best_priority, stamp=number))
            was = "none" if before is None else f"best priority {before}"
            after = f"best priority {best_priority}"
            await add_entry(connection, act, now, action=f"set tenant {name}", before=was, after=after)
            row = (await connection.execute(select(tenants).where(tenants.c.name == name))).one()
        return Tenant(row.name, row.created_at, row.best_priority)

    async def quotas(self) -> list[Quota]:
        async with self._engine.connect() as connection:
            return await self._quotas(connection)

    async def most_used(self, limit: int) -> list[Quota]:
        """Return at most `limit` quotas, those first of which the largest share is in use."""
        async with self._engine.connect() as connection:
            return await self._quotas(connection, most_used=limit)

    async def set_quotas(
        self, scope: Scope, subject: str, amounts: Mapping[Kind, int | None], act: Act
    ) -> list[Quota]:
        """Set some quotas of a tenant or a key; None lifts one.

        Takes effect within seconds. Raises UnknownSubject.
        """
        async with self._engine.begin() as connection:
            await lock_table(connection, quotas)  # two operators may set them at once
            now = self._clock()
            subject = await _known(connection, scope, subject)
            before = _text(await self._of(connection, scope, subject))
            kinds = [kind.value for kind in amounts]
            await connection.execute(delete(quotas).where(*_on(quotas.c, scope, subject, kinds)))
            rows = [
                {"scope": scope, "subject": subject, "kind": kind, "amount": amount, "stamp": _stamp()}
                for kind, amount in amounts.items()
                if amount is not None
            ]
            if rows:
                await connection.execute(insert(quotas), rows)
            lifted = [kind.value for kind, amount in amounts.items() if amount is None]
            await connection.execute(delete(quota_slices).where(*_on(quota_slices.c, scope, subject, lifted)))
            found = await self._of(connection, scope, subject)
            action = f"set quotas of {scope.value} {subject}"
            await add_entry(connection, act, now, action=action, before=before, after=_text(found))
        return found

    async def _of(self, connection: AsyncConnection, scope: Scope, subject: str) -> list[Quota]:
        return await self._quotas(connection, quotas.c.scope == scope, quotas.c.subject == subject)

    async def _quotas(
        self, connection: AsyncConnection, *only: ColumnElement[bool], most_used: int | None = None
    ) -> list[Quota]:
        """Return quotas with their use, which the database adds up: many rows would hold the event loop."""
        month = month_of(await database_time(connection, self._clock))
        counts = quota_slices.c.period.in_([0, month])  # 0: of a kind without a calendar
        same = (ours == theirs for ours, theirs in zip(_ID, _SLICE_ID, strict=True))
        in_use = func.coalesce(func.sum(quota_slices.c.used), 0)
        listed = select(quotas, in_use.label("in_use")).outerjoin(quota_slices, and_(*same, counts))
        listed = listed.where(known(quotas.c), *only).group_by(*_ID)
        if most_used is not None:
            share = case((quotas.c.amount == 0, 1.0), else_=1.0 * in_use / quotas.c.amount)
            listed = listed.order_by(share.desc()).limit(most_used)
        found = await connection.execute(listed.order_by(*_ID))
        return [Quota(id_of(row), row.amount, int(row.in_use)) for row in found]


async def _known(connection: AsyncConnection, scope: Scope, subject: str) -> str:
    """Return the subject of quotas: a tenant's name, or the first id of a key. Raises UnknownSubject."""
    if scope is Scope.TENANT:
        name = await connection.scalar(select(tenants.c.name).where(tenants.c.name == subject))
        if name is None:
            raise UnknownSubject(f"there is no tenant {subject!r}")
        return subject
    first = func.coalesce(keys.c.first_id, keys.c.id)
    found = await connection.scalar(select(first).where(keys.c.id == subject))
    if found is None:
        raise UnknownSubject(f"there is no key {subject!r}")
    return str(found)


def _on(columns: Any, scope: Scope, subject: str, kinds: Collection[str]) -> tuple[ColumnElement[bool], ...]:
    return columns.scope == scope, columns.subject == subject, columns.kind.in_(kinds)


def _text(found: Collection[Quota]) -> str:
    shown = [(each.id.kind, each.id.kind.shown(each.amount)) for each in found]
    return "; ".join(f"{kind.value} {amount}" for kind, amount in shown) or "none"


def _stamp() -> int:
    return secrets.randbits(STAMP_BITS)
