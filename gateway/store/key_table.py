"""Create, rotate, revoke, list and read keys in the database. Every change is audited."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass
from math import inf
from typing import Any

from sqlalchemy import Row, func, insert, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.domain import SHADOW_TENANT
from gateway.store.audit import Act, add_entry
from gateway.store.database import insert_new
from gateway.store.errors import OtherPepper, TooManyKeys
from gateway.store.key_changes import names, next_number
from gateway.store.pepper import Pepper, new_secret
from gateway.store.tables import keys, tenants

DEFAULT_TENANT = "default"
MAX_KEYS = 1_000_000
"""Keys that are not revoked: every replica holds them in memory."""
MAX_NAME_CHARS = 200
NAME_RULE = f"1 to {MAX_NAME_CHARS} printable characters"


def is_valid_name(text: str) -> bool:
    """Return whether the text may name a key or a tenant, by `NAME_RULE`; SHADOW_TENANT is reserved."""
    return 0 < len(text) <= MAX_NAME_CHARS and text.isprintable() and text != SHADOW_TENANT


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
    """Create a key, and its tenant if missing. Return the key and its secret, which cannot be read again.

    Raises TooManyKeys.
    """
    async with engine.begin() as connection:
        number = await next_number(connection)
        await _require_room(connection)
        info, secret = await _insert(connection, pepper, new, now, number)
        await add_entry(
            connection, act, now, action=f"create key {info.id}", before="none", after=_scopes(info)
        )
    return info, secret


async def rotate(
    engine: AsyncEngine, pepper: Pepper, key_id: str, overlap_s: float, *, now: float, act: Act
) -> tuple[KeyInfo, str] | None:
    """Replace a key by one with the same scopes, quotas and lifetime; both are valid for `overlap_s`.

    Returns None when there is no such key, or it is not valid any more. Raises TooManyKeys, and OtherPepper
    for a key that another pepper made: gateways with that one would take neither key soon.
    """
    async with engine.begin() as connection:
        number = await next_number(connection)
        await _require_room(connection)
        old = await _get(connection, key_id)
        if old is None or not old.valid(now):
            return None
        await _require_own(connection, pepper, key_id)
        first_id = old.first_id or old.id
        lasts_s = await _lifetime_s(connection, first_id)
        until = None if lasts_s is None else now + lasts_s
        new = NewKey(old.name, old.tenant, old.models, old.admin, until, old.regions, first_id)
        info, secret = await _insert(connection, pepper, new, now, number)
        ends = min(now + overlap_s, old.expires_at or inf)
        change = update(keys).where(keys.c.id == key_id)
        await connection.execute(change.values(expires_at=ends, stamp=number))
        after = f"{info.id}; {key_id} ends in {ends - now:.0f} s"
        await add_entry(connection, act, now, action=f"rotate key {key_id}", before=key_id, after=after)
    return info, secret


async def _lifetime_s(connection: AsyncConnection, first_id: str) -> float | None:
    """Return how long the keys that replace one another last, None for ever: that of the newest, since those
    before it end with their overlap.
    """
    lasts = select(keys.c.expires_at - keys.c.created_at)
    newest = lasts.where(func.coalesce(keys.c.first_id, keys.c.id) == first_id).order_by(
        keys.c.created_at.desc(), keys.c.first_id.is_(None)
    )
    found: float | None = await connection.scalar(newest.limit(1))
    return found


async def _require_room(connection: AsyncConnection) -> None:
    count = select(func.count()).select_from(keys).where(keys.c.revoked_at.is_(None))
    if int(await connection.scalar(count) or 0) >= MAX_KEYS:
        raise TooManyKeys(f"there are {MAX_KEYS:,} keys: revoke those that have expired or that nobody uses")


async def _require_own(connection: AsyncConnection, pepper: Pepper, key_id: str) -> None:
    if await connection.scalar(select(keys.c.pepper_id).where(keys.c.id == key_id)) != pepper.id:
        raise OtherPepper(
            f"{key_id} was made with another pepper than the one here, which gateways do not have"
        )


async def _insert(
    connection: AsyncConnection, pepper: Pepper, new: NewKey, now: float, number: int
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
        "stamp": number,
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
        number = await next_number(connection)
        change = first.values(revoked_at=now, stamp=number)
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


async def newest(engine: AsyncEngine, limit: int, before: str | None) -> list[KeyInfo]:
    """Return at most `limit` keys, newest first, that are older than the key `before`, if it is given.

    Raises LookupError where there is no such key.
    """
    listed = select(keys).order_by(keys.c.created_at.desc(), keys.c.id.desc()).limit(limit)
    async with engine.connect() as connection:
        if before is not None:
            key = await _get(connection, before)
            if key is None:
                raise LookupError(before)
            listed = listed.where(tuple_(keys.c.created_at, keys.c.id) < tuple_(key.created_at, key.id))
        return [_info(row) for row in await connection.execute(listed)]


async def _get(connection: AsyncConnection, key_id: str) -> KeyInfo | None:
    row = (await connection.execute(select(keys).where(keys.c.id == key_id))).one_or_none()
    return None if row is None else _info(row)


def _info(row: Row[Any]) -> KeyInfo:
    return KeyInfo(
        id=row.id,
        name=row.name,
        tenant=row.tenant,
        hint=row.hint,
        models=names(row.models),
        admin=row.admin,
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        regions=names(row.regions),
        first_id=row.first_id or "",
    )


def _scopes(key: KeyInfo) -> str:
    allowed = [
        f"tenant {key.tenant}",
        f"models {', '.join(sorted(key.models)) if key.models is not None else 'all'}",
        f"regions {', '.join(sorted(key.regions)) if key.regions is not None else 'all'}",
    ]
    return "; ".join(allowed + ["admin"] * key.admin)
