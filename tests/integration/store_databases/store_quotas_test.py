"""Slices of quotas on real databases: replicas that come, share, die and return."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from sqlalchemy import Table, event, insert, select
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.domain import Caller
from gateway.errors import Overloaded
from gateway.quotas.leases import Leases
from gateway.quotas.ledger import SliceFull
from gateway.quotas.limits import WINDOW_S, Kind, LimitId, Scope, WhenAway
from gateway.store.audit import Act, add_entry
from gateway.store.database import lock_table, open_engine
from gateway.store.errors import StoreUnavailable
from gateway.store.orders import OrderTable
from gateway.store.quota_table import QuotaTable
from gateway.store.slices import LIMITS_PER_PAGE, SliceTable
from gateway.store.tables import quota_slices, quotas, replicas
from tests.support.postgres_server import PostgresServer

CALLER = Caller("key-1", "shop")
TOKENS = LimitId(Scope.TENANT, "shop", Kind.TOKENS)
MONTH = LimitId(Scope.TENANT, "shop", Kind.MONTH)
LIVE = LimitId(Scope.TENANT, "shop", Kind.QUERIES)
BUDGET = LimitId(Scope.TENANT, "shop", Kind.BUDGET)


@asynccontextmanager
async def database(url: str, limits: dict[LimitId, int]) -> AsyncIterator[AsyncEngine]:
    engine = open_engine(url)
    try:
        async with engine.begin() as connection:
            rows = [{**each._asdict(), "amount": amount, "stamp": 1} for each, amount in limits.items()]
            await connection.execute(insert(quotas), rows)
        yield engine
    finally:
        await engine.dispose()


async def replica(
    engine: AsyncEngine, name: str, *, lease_s: float = 15.0, when_away: WhenAway = WhenAway.HOLD
) -> Leases:
    """Yield a replica that has joined and leased once; the test runs its rounds."""
    found = Leases(SliceTable(engine, name, lease_s=lease_s), when_away)
    await found.start(background=False)
    return found


def offer(replica: Leases, tokens: int) -> int:
    try:
        replica.quotas.open(CALLER, tokens)
    except SliceFull:
        return 0
    return tokens


async def ask(replica: Leases, tokens: int, *others: Leases) -> int:
    """Offer again after each round, as a query that waits; the other replicas run theirs in between."""
    for _ in range(5):
        if offer(replica, tokens):
            return tokens
        for each in (replica, *others, *others):
            await each.renew()
    return offer(replica, tokens)


def test_quotas_of_many_pages_are_all_read(url: str) -> None:
    async def main() -> None:
        subjects = [f"tenant {number} of Ä-z'\"" for number in range(LIMITS_PER_PAGE)]
        limits = {
            LimitId(Scope.TENANT, subject, kind): number
            for number, subject in enumerate(subjects, 1)
            for kind in (Kind.TOKENS, Kind.REQUESTS)
        }
        async with database(url, limits) as engine:
            assert await SliceTable(engine, "a").limits() == limits

    asyncio.run(main())


def test_two_replicas_never_grant_more_than_the_quota_and_little_less(url: str) -> None:
    async def main() -> None:
        async with database(url, {TOKENS: 1_000}) as engine:
            both = [await replica(engine, name) for name in ("a", "b")]
            granted = 0
            for _ in range(12):  # all of it is asked of one, three times over, then of both
                granted += sum(offer(both[0], 50) for _ in range(5))
                for each in both:
                    await each.renew()
            granted += sum(offer(each, 10) for each in both for _ in range(20))
            assert 950 <= granted <= 1_000

    asyncio.run(main())


def test_a_budget_in_dollars_over_two_replicas_is_exceeded_by_a_twentieth_at_most(url: str) -> None:
    """Where every answer costs three times its forecast, and is cut when no more of it is covered."""
    limit = Kind.BUDGET.counted(250.0)

    def spend(replica: Leases, forecast: int) -> int:
        cost = 0
        with suppress(SliceFull):
            reservation = replica.quotas.open(CALLER, 1)
            with suppress(SliceFull):
                replica.quotas.reserve(reservation, 1, forecast)
                while cost < 3 * forecast:
                    replica.quotas.cover(reservation, 1, cost + forecast // 4)
                    cost += forecast // 4
            replica.quotas.settle(reservation, 1, cost)
        return cost

    async def main() -> None:
        async with database(url, {BUDGET: limit}) as engine:
            both = [await replica(engine, name) for name in ("a", "b")]
            spent = 0
            for turn in range(40):  # one alone, then both in turns
                spent += spend(both[0 if turn < 12 else turn % 2], limit // 50)
                for each in both:
                    await each.renew()
            assert 0.95 * limit <= spent <= 1.05 * limit
            assert [each.quotas.in_use(BUDGET) for each in both] == [spent, spent]

    asyncio.run(main())


def test_a_restarted_replica_goes_on_with_what_its_predecessor_held(url: str) -> None:
    async def main() -> None:
        async with database(url, {TOKENS: 1_000, MONTH: 5_000}) as engine:
            killed = await replica(engine, "a")
            assert offer(killed, 700) == 700
            await killed.renew()
            again = await replica(engine, "a")
            assert again.quotas.in_use(TOKENS) == again.quotas.in_use(MONTH) == 700
            assert [offer(again, tokens) for tokens in (400, 300)] == [0, 300]

    asyncio.run(main())


def test_the_slice_of_a_dead_replica_is_free_again_and_its_month_is_kept(url: str) -> None:
    async def main() -> None:
        async with database(url, {TOKENS: 1_000, MONTH: 1_000}) as engine:
            alive, dead = await replica(engine, "a"), await replica(engine, "b")
            assert await ask(dead, 300, alive) == 300
            await dead.renew()
            await alive.renew()
            assert offer(alive, 701) == 0
            async with engine.begin() as connection:
                gone = replicas.update().where(replicas.c.name == "b")
                await connection.execute(gone.values(expires_at=replicas.c.expires_at - WINDOW_S - 16))
            for _ in range(3):
                assert offer(alive, 701) == 0
                await alive.renew()
            assert offer(alive, 701) == 0  # of the month
            assert offer(alive, 700) == 700
            assert alive.quotas.in_use(MONTH) == 1_000
            assert alive.quotas.in_use(TOKENS) == 700

    asyncio.run(main())


def test_what_a_replica_used_counts_on_after_it_has_left_and_the_rest_is_free(url: str) -> None:
    async def main() -> None:
        async with database(url, {TOKENS: 1_000, LIVE: 100}) as engine:
            alive, leaving = await replica(engine, "a"), Leases(SliceTable(engine, "b"), WhenAway.HOLD)
            await leaving.start()
            assert await ask(leaving, 300, alive) == 300
            await leaving.close()
            for _ in range(3):
                assert offer(alive, 701) == 0
                await alive.renew()
            assert offer(alive, 701) == 0  # within a minute
            assert offer(alive, 300) + sum(offer(alive, 40) for _ in range(9)) == 660

    asyncio.run(main())


def test_an_older_backup_of_the_tables_does_not_give_a_quota_twice(url: str) -> None:
    """The live replicas write what they hold and have used anew, in their first rounds."""

    async def main() -> None:
        async with database(url, {TOKENS: 1_000, MONTH: 1_000}) as engine:
            both = [await replica(engine, name) for name in ("a", "b")]
            async with engine.begin() as connection:
                backup = {each: await saved(connection, each) for each in (replicas, quota_slices)}
            assert await ask(both[0], 800, both[1]) == 800
            for each in both:
                await each.renew()
            async with engine.begin() as connection:
                for table, rows in backup.items():
                    await connection.execute(table.delete())
                    await connection.execute(insert(table), rows)
            for each in both:
                await each.renew()
            assert await ask(both[1], 300, both[0]) == 0
            assert await ask(both[1], 150, both[0]) == 150
            assert both[1].quotas.in_use(MONTH) == 950

    asyncio.run(main())


async def saved(connection: AsyncConnection, table: Table) -> list[dict[str, Any]]:
    return [dict(row) for row in (await connection.execute(select(table))).mappings()]


def test_limits_that_did_not_arrive_are_asked_for_again(url: str) -> None:
    async def main() -> None:
        async with database(url, {TOKENS: 1_000}) as engine:
            table, broken = SliceTable(engine, "a"), [True]

            @event.listens_for(engine.sync_engine, "commit")
            def fail(_: object) -> None:
                if broken.pop():
                    raise OperationalError("COMMIT", {}, OSError("the connection broke"))

            broken.insert(0, False)
            with pytest.raises(StoreUnavailable):
                await table.limits()
            assert await table.limits() == {TOKENS: 1_000}

    asyncio.run(main())


def test_two_replicas_of_one_name_do_not_share_a_slice(url: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with database(url, {TOKENS: 1_000}) as engine:
            both = [await replica(engine, "same") for _ in range(2)]
            for _ in range(4):
                for each in both:
                    await each.renew()
            granted = sum(offer(each, 10) for each in both for _ in range(100))
            assert 0 < granted <= 1_000

    asyncio.run(main())
    assert "another gateway is called same too" in caplog.text


def test_a_limit_that_is_lowered_holds_everywhere(url: str) -> None:
    async def main() -> None:
        async with database(url, {TOKENS: 1_000}) as engine:
            both = [await replica(engine, name) for name in ("a", "b")]
            async with engine.begin() as connection:
                await connection.execute(quotas.update().values(amount=100, stamp=2))
            for _ in range(3):
                for each in both:
                    await each.renew()
            granted = 0
            for _ in range(20):
                for each in both:
                    granted += sum(offer(each, 1) for _ in range(20))
                    await each.renew()
            assert 90 <= granted <= 100

    asyncio.run(main())


def test_a_quota_that_is_set_later_binds_after_one_round(url: str) -> None:
    async def main() -> None:
        async with database(url, {TOKENS: 1_000}) as engine:
            here = await replica(engine, "a")
            async with engine.begin() as connection:
                await connection.execute(insert(quotas), {**LIVE._asdict(), "amount": 2, "stamp": 7})
            assert [offer(here, 1) for _ in range(3)] == [1, 1, 1]
            await here.renew()
            assert [offer(here, 1) for _ in range(3)] == [1, 1, 0]

    asyncio.run(main())


def test_a_round_is_one_short_transaction(url: str) -> None:
    """Rounds run twice a second, on the event loop that answers queries."""

    async def main() -> None:
        async with database(url, {TOKENS: 1_000, MONTH: 5_000, LIVE: 10}) as engine:
            here, done = await replica(engine, "a"), Counter[str]()

            @event.listens_for(engine.sync_engine, "before_cursor_execute")
            def executed(*_: object) -> None:
                done["statements"] += 1

            @event.listens_for(engine.sync_engine, "commit")
            def committed(_: object) -> None:
                done["commits"] += 1

            offer(here, 10)
            await here.renew()
            assert here.quotas.in_use(TOKENS) == 10
            assert done["commits"] == 1
            assert done["statements"] <= 8

    asyncio.run(main())


def test_rounds_at_once_on_many_quotas_do_not_lock_each_other_out(url: str) -> None:
    many = {LimitId(Scope.KEY, f"key-{n}", Kind.TOKENS): 100 for n in range(450)}

    async def main() -> None:
        async with database(url, many) as engine:
            both = [await replica(engine, name) for name in ("a", "b")]
            for _ in range(5):
                await asyncio.gather(*(each.renew() for each in both))
            for limit_id in many:
                claims = [each.quotas.claim(limit_id) for each in both]
                ceilings = [claim.ceiling for claim in claims if claim]
                assert sum(ceilings) <= 100
                assert min(ceilings) > 0

    asyncio.run(main())


@pytest.mark.parametrize("when_away", WhenAway)
def test_without_its_database_a_replica_goes_on_with_what_it_leased(
    postgres: PostgresServer, postgres_url: str, when_away: WhenAway
) -> None:
    async def main() -> None:
        async with database(postgres_url, {TOKENS: 1_000}) as engine:
            here = await replica(engine, "a", when_away=when_away)
            await asyncio.to_thread(postgres.kill)
            try:
                with pytest.raises(StoreUnavailable):
                    await here.renew()
                assert offer(here, 600) == 600
                here._renewed_s = float("-inf")  # the lease has run out
                if when_away is WhenAway.HOLD:
                    assert [offer(here, tokens) for tokens in (500, 400)] == [0, 400]
                else:
                    with pytest.raises(Overloaded, match="lease"):
                        offer(here, 1)
            finally:
                await asyncio.to_thread(postgres.start)
            await here.renew()
            assert here.quotas.in_use(TOKENS) >= 600

    asyncio.run(main())


def test_a_query_waits_for_a_larger_slice_only_while_the_database_answers(
    postgres: PostgresServer, postgres_url: str
) -> None:
    async def main() -> None:
        async with database(postgres_url, {TOKENS: 1_000}) as engine:
            one, two = Leases(SliceTable(engine, "a"), WhenAway.HOLD), await replica(engine, "b")
            await one.start()
            try:
                async with asyncio.timeout(60):
                    while not offer(two, 800):
                        await two.renew()
                        await one.lease_more()
                await asyncio.to_thread(postgres.kill)
                try:
                    async with asyncio.timeout(60):
                        while not one._away:
                            await one.lease_more()
                    with pytest.raises(StopIteration):
                        one.lease_more().send(None)  # done at once, without a wait
                finally:
                    await asyncio.to_thread(postgres.start)
            finally:
                await one.close()

    asyncio.run(main())


@pytest.mark.parametrize("scope", ["region", "tenant"])
def test_quotas_of_a_kind_that_only_a_newer_version_knows_are_left_alone(url: str, scope: str) -> None:
    async def main() -> None:
        async with database(url, {LIVE: 10}) as engine:
            newer = {"scope": scope, "subject": "shop", "kind": "images_per_day"}
            row = {"period": 0, "amount": 1, "used": 0, "used_at": 0.0, "want": 5}
            async with engine.begin() as connection:
                await connection.execute(insert(quotas), {**newer, "amount": 5, "stamp": 7})
                await connection.execute(insert(quota_slices), {**newer, **row, "replica": "a"})
            here = await replica(engine, "a")
            assert [offer(here, 5) for _ in range(11)] == [5] * 10 + [0]
            assert [each.id for each in await QuotaTable(engine).quotas()] == [LIVE]
            async with engine.connect() as connection:
                kinds = select(quota_slices.c.kind).where(quota_slices.c.kind == newer["kind"])
                assert await connection.scalar(kinds) == newer["kind"]
            await here.close()

    asyncio.run(main())


def test_setting_a_quota_reads_those_of_its_subject_alone(url: str) -> None:
    """It read every tenant's quotas and slices twice, under a lock: 91 ms each of a thousand tenants."""
    others = {LimitId(Scope.TENANT, f"other-{number}", Kind.TOKENS): 5 for number in range(3)}
    read: list[str] = []

    async def main() -> None:
        async with database(url, others) as engine:
            table = QuotaTable(engine)
            await table.set_tenant("shop", best_priority=0, act=Act("ops"))

            @event.listens_for(engine.sync_engine, "before_cursor_execute")
            def note(_c: object, _cursor: object, statement: str, *_more: object) -> None:
                if statement.startswith("SELECT quota"):
                    read.append(statement.partition("WHERE")[2])

            found = await table.set_quotas(Scope.TENANT, "shop", {Kind.TOKENS: 10}, Act("ops"))
            assert [each.id.subject for each in found] == ["shop"]
            assert read and all(".subject = " in condition for condition in read)
            assert len(await table.quotas()) == 4

    asyncio.run(main())


def test_a_change_that_waited_for_another_stands_behind_it_in_the_audit(url: str) -> None:
    """The audit is sorted by time: with that of its request a change stood before the one it replaced."""
    now = [1.0]

    async def main() -> None:
        engine = open_engine(url)
        table = QuotaTable(engine, clock=lambda: now[0])
        await table.set_tenant("shop", best_priority=0, act=Act("ops"))
        async with engine.begin() as other:
            await lock_table(other, quotas)
            change = table.set_quotas(Scope.TENANT, "shop", {Kind.TOKENS: 10}, Act("ops"))
            waiting = asyncio.create_task(change)
            await asyncio.sleep(0)  # it has begun
            now[0] = 3.0
            await add_entry(other, Act("ops"), 2.0, action="the first", before="", after="")
        await waiting
        assert [each.at for each in await OrderTable(engine).entries(9)] == [3.0, 2.0, 1.0]
        await engine.dispose()

    asyncio.run(main())
