"""Create, rotate, revoke, list and read keys in the database. Every change is audited."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from sqlalchemy import Row, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.domain import Caller
from gateway.store.audit import Act, add_entry
from gateway.store.database import insert_new
from gateway.store.pepper import Pepper, new_secret
from gateway.store.tables import keys, tenants

DEFAULT_TENANT = "default"
STAMP_BITS = 40
MAX_NAME_CHARS = 200
NAME_RULE = f"1 to {MAX_NAME_CHARS} printable characters"


def is_valid_name(text: str) -> bool:
    """Return whether the text may name a key or a tenant, by `NAME_RULE`."""
    return 0 < len(text) <= MAX_NAME_CHARS and text.isprintable()


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """A key without its secret. Times are unix seconds; `models` or `regions` None means every one.

    `first_id` is the first of the keys that replaced one another: they share its quotas.
    """

    id: str
    name: str
    tenant: str
    hint: str
    models: frozenset[str] | None
    admin: bool
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    regions: frozenset[str] | None = None
    first_id: str = ""

    def valid(self, now: float) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


class StoredKey(NamedTuple):
    """A key as `KeyRing` holds it in memory."""

    digest: bytes
    pepper_id: str
    caller: Caller
    expires_at: float | None


class Marker(NamedTuple):
    """Fingerprint of the table: differs after any change of a key or of its tenant."""

    keys: int
    revoked: int
    stamps: int
    tenants: int


@dataclass(frozen=True, slots=True)
class NewKey:
    name: str
    tenant: str
    models: Collection[str] | None
    admin: bool
    expires_at: float | None
    regions: Collection[str] | None = None
    first_id: str | None = None


async def create(
    engine: AsyncEngine, pepper: Pepper, new: NewKey, now: float, act: Act
) -> tuple[KeyInfo, str]:
    """Create a key, and its tenant if missing. Return the key and its secret, which cannot be read again."""
    async with engine.begin() as connection:
        info, secret = await _insert(connection, pepper, new, now)
        await add_entry(
            connection, act, now, action=f"create key {info.id}", before="none", after=_scopes(info)
        )
    return info, secret


async def rotate(
    engine: AsyncEngine, pepper: Pepper, key_id: str, overlap_s: float, *, now: float, act: Act
) -> tuple[KeyInfo, str] | None:
    """Replace a key by one with the same scopes, quotas and lifetime; both are valid for `overlap_s`.

    Returns None when there is no such key, or it is not valid any more.
    """
    async with engine.begin() as connection:
        old = await _get(connection, key_id)
        if old is None or not old.valid(now):
            return None
        lasts_s = None if old.expires_at is None else old.expires_at - old.created_at
        until = None if lasts_s is None else now + lasts_s
        new = NewKey(old.name, old.tenant, old.models, old.admin, until, old.regions, old.first_id or old.id)
        info, secret = await _insert(connection, pepper, new, now)
        ends = min(now + overlap_s, old.expires_at or inf)
        change = update(keys).where(keys.c.id == key_id)
        await connection.execute(change.values(expires_at=ends, stamp=secrets.randbits(STAMP_BITS)))
        after = f"{info.id}; {key_id} ends in {ends - now:.0f} s"
        await add_entry(connection, act, now, action=f"rotate key {key_id}", before=key_id, after=after)
    return info, secret


async def _insert(
    connection: AsyncConnection, pepper: Pepper, new: NewKey, now: float
) -> tuple[KeyInfo, str]:
    secret = new_secret()
    values: dict[str, Any] = {
        "id": f"key_{secrets.token_hex(8)}",
        "name": new.name,
        "tenant": new.tenant,
        "digest": pepper.digest(secret).hex(),
        "pepper_id": pepper.id,
        "hint": secret[-4:],
        "models": None if new.models is None else sorted(new.models),
        "regions": None if new.regions is None else sorted(new.regions),
        "first_id": new.first_id,
        "admin": new.admin,
        "created_at": now,
        "expires_at": new.expires_at,
        "stamp": secrets.randbits(STAMP_BITS),
    }
    tenant = {"name": new.tenant, "created_at": now}
    await connection.execute(insert_new(connection.dialect.name, tenants), tenant)
    await connection.execute(insert(keys), values)
    info = await _get(connection, values["id"])
    assert info is not None
    return info, secret


async def revoke(engine: AsyncEngine, key_id: str, now: float, act: Act) -> KeyInfo | None:
    """Revoke a key; None when there is no such key. A second revocation keeps the time of the first."""
    first = update(keys).where(keys.c.id == key_id, keys.c.revoked_at.is_(None))
    async with engine.begin() as connection:
        change = first.values(revoked_at=now, stamp=secrets.randbits(STAMP_BITS))
        if (await connection.execute(change)).rowcount:
            await add_entry(
                connection, act, now, action=f"revoke key {key_id}", before="valid", after="revoked"
            )
        return await _get(connection, key_id)


async def list_all(engine: AsyncEngine) -> list[KeyInfo]:
    """Return all keys, oldest first, revoked ones too."""
    async with engine.connect() as connection:
        found = await connection.execute(select(keys).order_by(keys.c.created_at, keys.c.id))
        return [_info(row) for row in found]


_MARKER = select(
    func.count(),
    func.count(keys.c.revoked_at),
    func.coalesce(func.sum(keys.c.stamp), 0),
    select(func.coalesce(func.sum(tenants.c.stamp), 0)).scalar_subquery(),
).select_from(keys)


async def marker(connection: AsyncConnection) -> Marker:
    """Read the table's fingerprint: one small query."""
    total, revoked, stamped, changed = (await connection.execute(_MARKER)).one()
    return Marker(total, revoked, int(stamped), int(changed))


async def unrevoked(connection: AsyncConnection) -> list[StoredKey]:
    """Return all keys that are not revoked, expired ones too."""
    columns = (
        keys.c.id,
        keys.c.tenant,
        keys.c.digest,
        keys.c.pepper_id,
        keys.c.models,
        keys.c.regions,
        keys.c.first_id,
        keys.c.admin,
        keys.c.expires_at,
        tenants.c.best_priority,
    )
    valid = select(*columns).join(tenants, tenants.c.name == keys.c.tenant).where(keys.c.revoked_at.is_(None))
    return [
        StoredKey(bytes.fromhex(row.digest), row.pepper_id, _caller(row), row.expires_at)
        for row in await connection.execute(valid)
    ]


def _caller(row: Any) -> Caller:
    return Caller(
        key_id=row.id,
        tenant=row.tenant,
        models=_names(row.models),
        admin=row.admin,
        regions=_names(row.regions),
        first_id=row.first_id or "",
        best_priority=row.best_priority,
    )


async def _get(connection: AsyncConnection, key_id: str) -> KeyInfo | None:
    row = (await connection.execute(select(keys).where(keys.c.id == key_id))).one_or_none()
    return None if row is None else _info(row)


def _info(row: Row[Any]) -> KeyInfo:
    return KeyInfo(
        id=row.id,
        name=row.name,
        tenant=row.tenant,
        hint=row.hint,
        models=_names(row.models),
        admin=row.admin,
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        regions=_names(row.regions),
        first_id=row.first_id or "",
    )


def _scopes(key: KeyInfo) -> str:
    allowed = [
        f"tenant {key.tenant}",
        f"models {', '.join(sorted(key.models)) if key.models is not None else 'all'}",
        f"regions {', '.join(sorted(key.regions)) if key.regions is not None else 'all'}",
    ]
    return "; ".join(allowed + ["admin"] * key.admin)


def _names(names: list[str] | None) -> frozenset[str] | None:
    return None if names is None else frozenset(names)
