"""Keys in the database: make, list, revoke, and read those that are valid."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Row, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.domain import Caller
from gateway.store.engine import insert_new
from gateway.store.pepper import Pepper, new_secret
from gateway.store.tables import keys, tenants

DEFAULT_TENANT = "default"
STAMP_BITS = 40


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """A key as people see it. Times are unix seconds; `models` None means every model."""

    id: str
    name: str
    tenant: str
    hint: str
    models: frozenset[str] | None
    admin: bool
    created_at: float
    expires_at: float | None
    revoked_at: float | None

    def valid(self, now: float) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


class StoredKey(NamedTuple):
    digest: bytes
    pepper_id: str
    caller: Caller
    expires_at: float | None


class Marker(NamedTuple):
    """Differs whenever any key was made, changed, revoked or deleted."""

    keys: int
    revoked: int
    stamps: int


@dataclass(frozen=True, slots=True)
class NewKey:
    name: str
    tenant: str
    models: Collection[str] | None
    admin: bool
    expires_at: float | None


async def create(engine: AsyncEngine, pepper: Pepper, new: NewKey, now: float) -> tuple[KeyInfo, str]:
    """The key and its secret, which nobody can see again. A tenant that is not there yet is made."""
    secret = new_secret()
    values: dict[str, Any] = {
        "id": f"key_{secrets.token_hex(8)}",
        "name": new.name,
        "tenant": new.tenant,
        "digest": pepper.digest(secret).hex(),
        "pepper_id": pepper.id,
        "hint": secret[-4:],
        "models": None if new.models is None else sorted(new.models),
        "admin": new.admin,
        "created_at": now,
        "expires_at": new.expires_at,
        "stamp": secrets.randbits(STAMP_BITS),
    }
    async with engine.begin() as connection:
        await connection.execute(
            insert_new(engine.dialect.name, tenants), {"name": new.tenant, "created_at": now}
        )
        await connection.execute(insert(keys), values)
        info = await _get(connection, values["id"])
    assert info is not None
    return info, secret


async def revoke(engine: AsyncEngine, key_id: str, now: float) -> KeyInfo | None:
    """None when there is no such key. The time of a first revocation stays."""
    first = update(keys).where(keys.c.id == key_id, keys.c.revoked_at.is_(None))
    async with engine.begin() as connection:
        await connection.execute(first.values(revoked_at=now, stamp=secrets.randbits(STAMP_BITS)))
        return await _get(connection, key_id)


async def every(engine: AsyncEngine) -> list[KeyInfo]:
    """Oldest first, revoked ones too."""
    async with engine.connect() as connection:
        found = await connection.execute(select(keys).order_by(keys.c.created_at, keys.c.id))
        return [_info(row) for row in found]


async def marker(connection: AsyncConnection) -> Marker:
    stamps = func.coalesce(func.sum(keys.c.stamp), 0)
    found = await connection.execute(
        select(func.count(), func.count(keys.c.revoked_at), stamps).select_from(keys)
    )
    total, revoked, stamped = found.one()
    return Marker(total, revoked, int(stamped))


async def unrevoked(connection: AsyncConnection) -> list[StoredKey]:
    columns = (
        keys.c.id,
        keys.c.tenant,
        keys.c.digest,
        keys.c.pepper_id,
        keys.c.models,
        keys.c.admin,
        keys.c.expires_at,
    )
    found = await connection.execute(select(*columns).where(keys.c.revoked_at.is_(None)))
    return [
        StoredKey(
            digest=bytes.fromhex(row.digest),
            pepper_id=row.pepper_id,
            caller=Caller(key_id=row.id, tenant=row.tenant, models=_models(row.models), admin=row.admin),
            expires_at=row.expires_at,
        )
        for row in found
    ]


async def _get(connection: AsyncConnection, key_id: str) -> KeyInfo | None:
    row = (await connection.execute(select(keys).where(keys.c.id == key_id))).one_or_none()
    return None if row is None else _info(row)


def _info(row: Row[Any]) -> KeyInfo:
    return KeyInfo(
        id=row.id,
        name=row.name,
        tenant=row.tenant,
        hint=row.hint,
        models=_models(row.models),
        admin=row.admin,
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
    )


def _models(names: list[str] | None) -> frozenset[str] | None:
    return None if names is None else frozenset(names)
