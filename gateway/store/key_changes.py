"""Read the keys that changed since the last look, and a fingerprint that shows whether any was missed.

A change of a key or a tenant takes its number in its own transaction and holds the counter's row until the
commit: whoever reads a number can read every change up to it.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Collection, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.domain import Caller
from gateway.store.tables import change_counters, keys, tenants

BEFORE_ALL: Final = 2**40
"""Numbers begin above; stamps of before changes were numbered are random, and below."""
ROWS_PER_PAGE: Final = 500
"""Converting a row takes the event loop 10 to 20 µs: other tasks run between the pages."""

_COUNTER: Final = "keys"
_FINGERPRINT = (
    select(
        func.count(),
        func.coalesce(func.sum(keys.c.stamp), 0),
        select(func.coalesce(func.sum(tenants.c.stamp), 0)).scalar_subquery(),
    )
    .select_from(keys)
    .where(keys.c.revoked_at.is_(None))
)
_LAST = select(change_counters.c.number).where(change_counters.c.name == _COUNTER)
_KEYS = select(
    keys.c.id,
    keys.c.tenant,
    keys.c.digest,
    keys.c.pepper_id,
    keys.c.models,
    keys.c.regions,
    keys.c.first_id,
    keys.c.admin,
    keys.c.expires_at,
    keys.c.revoked_at,
    keys.c.stamp,
    tenants.c.best_priority,
).join(tenants, tenants.c.name == keys.c.tenant)


class StoredKey(NamedTuple):
    """A key as `KeyRing` holds it in memory."""

    digest: bytes
    caller: Caller
    expires_at: float | None
    stamp: int


class KeyRow(NamedTuple):
    """A key as it is stored now. `revoked`: it is not valid any more."""

    key: StoredKey
    pepper_id: str
    revoked: bool


class Fingerprint(NamedTuple):
    """Differs after any change of a key that is not revoked, or of a tenant, also one made by SQL."""

    keys: int
    stamps: int
    tenants: int


async def next_number(connection: AsyncConnection) -> int:
    """Take the number of a change. Writers go one after the other from here until they commit."""
    insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    first = insert(change_counters).values(name=_COUNTER, number=BEFORE_ALL + 1)
    step = first.on_conflict_do_update(
        index_elements=[change_counters.c.name], set_={"number": change_counters.c.number + 1}
    )
    number: int = (await connection.execute(step.returning(change_counters.c.number))).scalar_one()
    return number


async def last_number(connection: AsyncConnection) -> int:
    """Return the number of the newest change."""
    return int(await connection.scalar(_LAST) or BEFORE_ALL)


async def fingerprint(connection: AsyncConnection) -> Fingerprint:
    """Read the fingerprint: the database looks at every key, a million in a tenth of a second."""
    count, stamps, changed = (await connection.execute(_FINGERPRINT)).one()
    return Fingerprint(count, int(stamps), int(changed))


async def changed_tenants(connection: AsyncConnection, number: int) -> dict[str, int]:
    """Return the stamps of the tenants that changed after the change of this number."""
    found = select(tenants.c.name, tenants.c.stamp).where(tenants.c.stamp > number)
    return {row.name: row.stamp for row in await connection.execute(found)}


def unrevoked(connection: AsyncConnection) -> AsyncIterator[list[KeyRow]]:
    """Yield pages of all keys that are not revoked, expired ones too."""
    return _pages(connection, keys.c.revoked_at.is_(None))


def changed_keys(
    connection: AsyncConnection, number: int, of: Collection[str]
) -> AsyncIterator[list[KeyRow]]:
    """Yield pages of the keys that changed after the change of this number, and of all keys `of` tenants."""
    changed = keys.c.stamp > number
    return _pages(connection, or_(changed, keys.c.tenant.in_(of)) if of else changed)


async def _pages(connection: AsyncConnection, where: ColumnElement[bool]) -> AsyncIterator[list[KeyRow]]:
    rows: Sequence[Any] = ()
    after = ""
    while not after or len(rows) == ROWS_PER_PAGE:
        page = _KEYS.where(where, keys.c.id > after).order_by(keys.c.id).limit(ROWS_PER_PAGE)
        rows = (await connection.execute(page)).all()
        after = rows[-1].id if rows else after
        yield [_key_row(row) for row in rows]
        if not rows:
            return


def _key_row(row: Any) -> KeyRow:
    (
        key_id,
        tenant,
        digest,
        pepper_id,
        models,
        regions,
        first_id,
        admin,
        expires_at,
        revoked_at,
        stamp,
        best,
    ) = row
    caller = Caller(
        key_id=key_id,
        tenant=sys.intern(tenant),
        models=names(models),
        admin=admin,
        regions=names(regions),
        first_id=first_id or "",
        best_priority=best,
    )
    key = StoredKey(bytes.fromhex(digest), caller, expires_at, stamp)
    return KeyRow(key, pepper_id, revoked_at is not None)


def names(listed: list[str] | None) -> frozenset[str] | None:
    """Return the names of a scope; keys with the same scope share one set."""
    return None if listed is None else _shared(tuple(listed))


@lru_cache(maxsize=1024)
def _shared(listed: tuple[str, ...]) -> frozenset[str]:
    return frozenset(listed)
