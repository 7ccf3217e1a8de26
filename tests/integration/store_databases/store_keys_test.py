"""Many keys: a replica reads those that changed, in pages, and never holds up what else the process does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.store import key_changes, key_table
from gateway.store.audit import Act
from gateway.store.database import open_engine
from gateway.store.errors import TooManyKeys
from gateway.store.keys import KeyRing
from gateway.store.pepper import Pepper, new_secret
from gateway.store.store import open_store
from gateway.store.tables import keys, tenants

PEPPER = "p" * 32
ACT = Act("test", "test")
PAGE = 50


async def write_keys(engine: AsyncEngine, count: int, tenant: str = "shop") -> dict[str, str]:
    """Insert keys as a program of before numbered changes did; return their secrets by id."""
    pepper = Pepper(PEPPER)
    secrets = {f"key_{tenant}{number:06d}": new_secret() for number in range(count)}
    rows = [
        {
            "id": key_id,
            "name": "many",
            "tenant": tenant,
            "digest": pepper.digest(secret).hex(),
            "pepper_id": pepper.id,
            "hint": "",
            "admin": False,
            "created_at": 1.0,
            "stamp": number,
        }
        for number, (key_id, secret) in enumerate(secrets.items(), 1)
    ]
    async with engine.begin() as connection:
        await connection.execute(insert(tenants), {"name": tenant, "created_at": 1.0})
        await connection.execute(insert(keys), rows)
    return secrets


def test_a_change_of_one_key_reads_one_key(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_changes, "ROWS_PER_PAGE", PAGE)

    async def main() -> None:
        engine = open_engine(url)
        secrets = await write_keys(engine, 10 * PAGE + 7)
        ring = KeyRing(engine, Pepper(PEPPER))
        await ring.refresh()
        assert all(ring.authenticate(secret) is not None for secret in secrets.values())
        async with open_store(url, tmp_path, pepper=PEPPER, serving=False) as other:
            before = {key_id: ring.still_valid(key_id) for key_id in secrets}
            revoked, *rest = secrets
            await other.keys.revoke_key(revoked)
            rotated = await other.keys.rotate_key(rest[0], 60.0)
            assert rotated is not None
            await ring.refresh()
        assert ring.still_valid(revoked) is None
        assert ring.authenticate(secrets[revoked]) is None
        assert ring.authenticate(rotated[1]) is not None
        assert all(ring.still_valid(key_id) is before[key_id] for key_id in rest[1:])  # not read again
        await engine.dispose()

    asyncio.run(main())


def test_a_tenant_reads_its_own_keys(url: str, tmp_path: Path) -> None:
    async def main() -> None:
        engine = open_engine(url)
        shop, bank = await write_keys(engine, 3), await write_keys(engine, 3, "bank")
        ring = KeyRing(engine, Pepper(PEPPER))
        await ring.refresh()
        async with open_store(url, tmp_path, pepper=PEPPER, serving=False) as other:
            before = {key_id: ring.still_valid(key_id) for key_id in bank}
            await other.quotas.set_tenant("shop", best_priority=7, act=ACT)
            await ring.refresh(check=False)
        assert {caller.best_priority for key_id in shop if (caller := ring.still_valid(key_id))} == {7}
        assert all(ring.still_valid(key_id) is before[key_id] for key_id in bank)
        await engine.dispose()

    asyncio.run(main())


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE keys SET revoked_at = 1 WHERE id = 'key_shop000000'",
        "DELETE FROM keys WHERE id = 'key_shop000000'",
        "UPDATE keys SET expires_at = 1, stamp = 12345678 WHERE id = 'key_shop000000'",  # an older program's
    ],
)
def test_a_change_without_a_number_is_found_by_the_fingerprint(url: str, change: str) -> None:
    async def main() -> None:
        engine = open_engine(url)
        secrets = await write_keys(engine, 5)
        ring = KeyRing(engine, Pepper(PEPPER))
        await ring.refresh()
        async with engine.begin() as connection:
            await connection.execute(text(change))
        await ring.refresh()
        valid = [key_id for key_id in secrets if ring.still_valid(key_id)]
        assert valid == [*secrets][1:]
        await engine.dispose()

    asyncio.run(main())


def test_a_database_that_was_set_back_is_read_anew(url: str, tmp_path: Path) -> None:
    """As after the restoration of a backup: the numbers of changes begin again."""

    async def main() -> None:
        async with open_store(url, tmp_path, pepper=PEPPER, serving=False) as other:
            made = [await other.keys.create_key(f"k{number}") for number in range(3)]
            engine = open_engine(url)
            ring = KeyRing(engine, Pepper(PEPPER))
            await ring.refresh()
            async with engine.begin() as connection:
                await connection.execute(text("UPDATE change_counters SET number = number - 2"))
                await connection.execute(text(f"DELETE FROM keys WHERE id = '{made[2][0].id}'"))
            await ring.refresh()
            assert ring.authenticate(made[2][1]) is None
            await other.keys.revoke_key(made[0][0].id)
            await ring.refresh(check=False)
            assert ring.authenticate(made[0][1]) is None
            assert ring.authenticate(made[1][1]) is not None
            await engine.dispose()

    asyncio.run(main())


def test_all_keys_are_read_in_pages_between_which_others_run(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_changes, "ROWS_PER_PAGE", PAGE)
    steps: list[int] = []
    real = key_changes._key_row

    async def main() -> None:
        engine = open_engine(url)
        await write_keys(engine, 10 * PAGE)
        turn = 0

        async def take_turns() -> None:
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        def noted(row: Any) -> Any:
            steps.append(turn)
            return real(row)

        monkeypatch.setattr(key_changes, "_key_row", noted)
        others = asyncio.create_task(take_turns())
        await KeyRing(engine, Pepper(PEPPER)).refresh()
        others.cancel()
        await asyncio.gather(others, return_exceptions=True)
        await engine.dispose()

    asyncio.run(main())
    assert len(steps) == 10 * PAGE
    assert max(steps.count(turn) for turn in set(steps)) <= PAGE


def test_no_more_keys_are_made_than_replicas_can_hold(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_table, "MAX_KEYS", 3)

    async def main() -> None:
        async with open_store(url, tmp_path, pepper=PEPPER, serving=False) as store:
            made = [await store.keys.create_key(f"k{number}") for number in range(3)]
            with pytest.raises(TooManyKeys, match="there are 3 keys: revoke"):
                await store.keys.create_key("one too many")
            await store.keys.revoke_key(made[0][0].id)
            assert await store.keys.rotate_key(made[1][0].id, 60.0) is not None
            with pytest.raises(TooManyKeys):
                await store.keys.rotate_key(made[2][0].id, 60.0)
            assert len(await store.keys.list_keys()) == 4

    asyncio.run(main())
