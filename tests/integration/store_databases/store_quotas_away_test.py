"""A month's quota counts what a replica used once, however long it was away from the database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from sqlalchemy import delete, insert, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.quotas.leases import Leases
from gateway.quotas.limits import WINDOW_S, WhenAway
from gateway.quotas.meter import month_of
from gateway.store.quota_table import QuotaTable
from gateway.store.slices import GONE, GONE_KEPT_S, LEASE_S, SliceTable
from gateway.store.tables import quota_slices, quotas, replicas
from tests.integration.store_databases.store_quotas_test import MONTH, ask, database, offer, replica, saved

pytestmark = pytest.mark.usefixtures("within_a_month")
AWAY_S = LEASE_S + WINDOW_S + 10.0
"""For longer than a replica's slices are kept for it."""


class LaterTable(SliceTable):
    """Slices in a database whose clock is `ahead_s()` ahead."""

    ahead_s: Callable[[], float]

    async def _database_time(self, connection: AsyncConnection) -> float:
        return await super()._database_time(connection) + self.ahead_s()


class Passing:
    """Time that passes for all replicas when the test says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def replica(self, engine: AsyncEngine, name: str) -> Leases:
        table = LaterTable(engine, name)
        table.ahead_s = lambda: self.seconds
        found = Leases(table, WhenAway.HOLD)
        await found.start(background=False)
        return found


async def spent(engine: AsyncEngine) -> int:
    return sum(each.in_use for each in await QuotaTable(engine).quotas())


async def renew(*all_of_them: Leases) -> None:
    for _ in range(3):
        for each in all_of_them:
            await each.renew()


def test_an_outage_of_the_database_counts_nothing_of_the_month_twice(url: str) -> None:
    async def main() -> None:
        later = Passing()
        async with database(url, {MONTH: 1_000}) as engine:
            both = [await later.replica(engine, name) for name in ("a", "b")]
            for one, other in (both, both[::-1]):
                assert await ask(one, 300, other) == 300
            await renew(*both)
            later.seconds += AWAY_S
            await renew(*both)
            assert offer(both[1], 10) == 10
            await renew(*both)
            assert await spent(engine) == 610
            assert await ask(both[0], 350, both[1]) == 350

    asyncio.run(main())


async def free_slices(later: Passing, _: AsyncEngine, alive: Leases) -> None:
    for _round in range(10):
        later.seconds += AWAY_S / 10
        await alive.renew()


async def change_quota(later: Passing, engine: AsyncEngine, alive: Leases) -> None:
    async with engine.begin() as connection:
        await connection.execute(update(quotas).values(amount=2_000, stamp=2))
    await free_slices(later, engine, alive)


async def forget_freed(later: Passing, _: AsyncEngine, alive: Leases) -> None:
    """The database remembers no more that the slices were freed."""
    for passed_s in (AWAY_S, GONE_KEPT_S):
        later.seconds += passed_s
        for _round in range(4):  # in its first lease after a time away it frees nothing
            await alive.renew()
            later.seconds += LEASE_S / 2


@pytest.mark.parametrize("meanwhile", [free_slices, change_quota, forget_freed])
def test_a_replica_that_was_cut_off_counts_nothing_of_the_month_twice(
    url: str, meanwhile: Callable[[Passing, AsyncEngine, Leases], Awaitable[None]]
) -> None:
    async def main() -> None:
        later = Passing()
        async with database(url, {MONTH: 1_000}) as engine:
            alive, away = [await later.replica(engine, name) for name in ("a", "b")]
            assert await ask(away, 300, alive) == 300
            await renew(away, alive)
            await meanwhile(later, engine, alive)
            assert offer(away, 10) == 10
            await renew(away, alive)
            assert await spent(engine) == 310
            assert away.quotas.in_use(MONTH) == 310
            assert await ask(away, 650, alive) == 650

    asyncio.run(main())


def test_a_backup_from_before_a_replica_began_forgets_nothing_that_it_used(url: str) -> None:
    async def main() -> None:
        later = Passing()
        async with database(url, {MONTH: 1_000}) as engine:
            one = await later.replica(engine, "a")
            async with engine.begin() as connection:
                backup = {each: await saved(connection, each) for each in (replicas, quota_slices)}
            both = [one, await later.replica(engine, "b")]
            for each, other in (both, both[::-1]):
                assert await ask(each, 300, other) == 300
            await renew(*both)
            async with engine.begin() as connection:
                for table, rows in backup.items():
                    await connection.execute(delete(table))
                    await connection.execute(insert(table), rows)
            later.seconds += AWAY_S
            await renew(*both)
            assert await spent(engine) == 600

    asyncio.run(main())


def test_a_replica_whose_name_another_took_does_not_count_its_month_again(url: str) -> None:
    async def main() -> None:
        async with database(url, {MONTH: 1_000}) as engine:
            first = await replica(engine, "same")
            assert offer(first, 300) == 300
            await first.renew()
            second = await replica(engine, "same")
            await renew(first, second)
            assert await spent(engine) == 300

    asyncio.run(main())


def test_what_replicas_that_are_gone_used_last_month_is_not_in_use_now(url: str) -> None:
    async def main() -> None:
        async with database(url, {MONTH: 1_000}) as engine:
            this_month = month_of(time.time())
            row = {**MONTH._asdict(), "used_at": 0.0, "want": 0}
            async with engine.begin() as connection:
                for name, used, period in ((GONE, 500, this_month - 1), ("a", 300, this_month)):
                    slice_ = {**row, "replica": name, "amount": used, "used": used, "period": period}
                    await connection.execute(insert(quota_slices), slice_)
            assert await spent(engine) == 300

    asyncio.run(main())
