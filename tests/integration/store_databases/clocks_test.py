"""Clocks that are wrong, step or differ: nothing is refused, deleted or granted twice because of them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from gateway.batches.files import Files
from gateway.batches.ledger import Ledger
from gateway.domain import Caller
from gateway.errors import BudgetSpent
from gateway.quotas.leases import Leases
from gateway.quotas.ledger import SliceFull
from gateway.quotas.limits import Kind, LimitId, Scope, WhenAway
from gateway.quotas.meter import month_of, month_start
from gateway.store.clock import LASTS_S, DatabaseClock
from gateway.store.database import open_engine
from gateway.store.retention import Retention, RetentionPeriods
from gateway.store.rows import record_of
from gateway.store.slices import SliceTable
from gateway.store.writer import DatabaseWriter
from tests.integration.store_databases.store_contract_test import outcome
from tests.integration.store_databases.store_quotas_test import database
from tests.laws.batches_test import batch

CALLER = Caller("key-1", "shop")
TOKENS = LimitId(Scope.TENANT, "shop", Kind.TOKENS)
MONTH = LimitId(Scope.TENANT, "shop", Kind.MONTH)
DAY_S = 86_400.0


class Machine:
    """A machine: its monotonic time, and the unix time that it believes."""

    def __init__(self, unix_time: float = 0.0) -> None:
        self.passed_s = 1_000.0
        self.ahead_s = (unix_time or time.time()) - self.passed_s

    def monotonic(self) -> float:
        return self.passed_s

    def unix_time(self) -> float:
        return self.passed_s + self.ahead_s

    def clock(self) -> DatabaseClock:
        return DatabaseClock(clock=self.monotonic, wall=self.unix_time)


def test_the_databases_clock_counts_whatever_the_machines_says() -> None:
    machine = Machine()
    clock, now = machine.clock(), machine.unix_time()
    machine.ahead_s += 401 * DAY_S
    assert abs(clock() - now) < 1
    clock.read(now + 30.0)
    assert clock() == pytest.approx(now + 30.0)
    machine.passed_s += 10.0
    assert clock() == pytest.approx(now + 40.0)
    clock.read(now + 35.0)
    assert clock() == pytest.approx(now + 35.0), "a clock that was set back ends nothing too early"


@pytest.mark.parametrize("step_s", [120.0, DAY_S, 401 * DAY_S])
def test_a_step_ahead_of_the_databases_clock_counts_only_once_it_has_lasted(step_s: float) -> None:
    machine = Machine()
    clock, began = machine.clock(), machine.unix_time()
    clock.read(began)
    for _ in range(3):  # it goes, and comes back
        clock.read(clock() + step_s)
        machine.passed_s += 60.0
        clock.read(began + machine.passed_s - 1_000.0)
    assert clock() == pytest.approx(began + 180.0)
    clock.read(clock() + step_s)
    machine.passed_s += LASTS_S - 1.0
    clock.read(clock() + step_s)
    assert clock() == pytest.approx(began + 180.0 + LASTS_S - 1.0)
    machine.passed_s += 1.0
    clock.read(clock() + step_s)
    assert clock() == pytest.approx(began + 180.0 + LASTS_S + step_s)


def test_a_replica_that_is_401_days_ahead_deletes_nothing(postgres_url: str) -> None:
    async def main() -> None:
        engine, ahead = open_engine(postgres_url), Machine(time.time() + 401 * DAY_S)
        try:
            rows = [record_of(outcome(f"q{n}", received_at=time.time())) for n in range(100)]
            await DatabaseWriter(engine).write(rows)
            clock = ahead.clock()
            await SliceTable(engine, "ahead", clock=ahead.unix_time, heard=clock.read).join()
            assert await Retention(engine, RetentionPeriods(), clock=clock).sweep() == 0
            machine = Machine(time.time() + 401 * DAY_S)
            assert await Retention(engine, RetentionPeriods(), clock=machine.unix_time).sweep() > 0, (
                "or it would"
            )
        finally:
            await engine.dispose()

    asyncio.run(main())


@pytest.mark.usefixtures("within_a_month")
@pytest.mark.parametrize("step_s", [-3_600.0, -2 * DAY_S, 3_600.0, 401 * DAY_S])
def test_a_step_of_the_machines_clock_refuses_nothing(url: str, step_s: float) -> None:
    """On SQLite that machine's clock is the database's, too."""

    async def main() -> None:
        machine = Machine()
        async with database(url, {TOKENS: 1_000, MONTH: 100_000}) as engine:
            clock = machine.clock()
            table = SliceTable(engine, "a", clock=machine.unix_time, heard=clock.read)
            leases = Leases(table, WhenAway.HOLD, clock=machine.monotonic, unix_time=clock)
            await leases.start(background=False)
            leases.quotas.settle(leases.quotas.open(CALLER, 900), 900)
            await leases.renew()
            machine.ahead_s += step_s
            await leases.renew()
            assert leases.quotas.in_use(TOKENS) == leases.quotas.in_use(MONTH) == 900
            with pytest.raises(SliceFull) as full:
                leases.quotas.open(CALLER, 200)
            assert 0 < (full.value.refusal.retry_after_s or 0) <= 61
            machine.passed_s += 61.5
            await leases.renew()
            leases.quotas.settle(leases.quotas.open(CALLER, 900), 900)
            assert leases.quotas.in_use(MONTH) == 1_800

    asyncio.run(main())


def test_a_month_ends_once_at_every_replica_by_the_databases_clock(  # noqa: C901 - one story
    url: str,
) -> None:
    """The replicas' own clocks are days apart; what one used is known to the other in both months."""

    async def main() -> None:
        ends_at = month_start(month_of(time.time()) + 1)
        machines = [Machine(ends_at - 30.0 + skew_s) for skew_s in (-90.0, 90.0)]
        passed_s = [0.0]

        def database_time() -> float:
            return ends_at - 30.0 + passed_s[0]

        async with database(url, {MONTH: 1_000}) as engine:
            replicas = []
            for number, machine in enumerate(machines):
                clock = machine.clock()
                table = SliceTable(engine, f"r{number}", clock=database_time, heard=clock.read)
                table._database_time = in_database_time(clock, database_time)  # type: ignore[method-assign]
                leases = Leases(table, WhenAway.HOLD, clock=machine.monotonic, unix_time=clock)
                await leases.start(background=False)
                replicas.append(leases)

            async def spend(wanted: int) -> int:
                spent = 0
                for _ in range(60):
                    for each in replicas:
                        try:
                            each.quotas.settle(each.quotas.open(CALLER, wanted), wanted)
                            spent += wanted
                        except SliceFull:
                            pass
                        await each.renew()
                return spent

            def pass_time(seconds: float) -> None:
                passed_s[0] += seconds
                for machine in machines:
                    machine.passed_s += seconds

            assert 950 <= await spend(10) <= 1_000
            for each in replicas:
                with pytest.raises(SliceFull) as full:
                    each.quotas.open(CALLER, 100)
                assert isinstance(full.value.refusal, BudgetSpent)
            pass_time(29.0)
            assert await spend(50) == 0
            pass_time(1.5)
            assert 950 <= await spend(10) <= 1_000
            pass_time(3_600.0)
            assert await spend(50) == 0

    def in_database_time(clock: DatabaseClock, now: object) -> object:
        async def read(_: object) -> float:
            clock.read(now())  # type: ignore[operator]
            return now()  # type: ignore[operator, no-any-return]

        return read

    asyncio.run(main())


def test_a_batch_is_leased_by_the_databases_clock(url: str) -> None:
    """Of two replicas whose clocks are an hour apart, neither takes what the other holds."""

    async def main() -> None:
        engine, now = open_engine(url), time.time()
        try:
            files = Files(engine, lambda: now)
            file = await (await files.begin("t")).finish("in.jsonl", "batch", 1_000.0)
            skews_s = (0.0, 0.0) if engine.dialect.name == "sqlite" else (3_600.0, -3_600.0)
            one, two = (
                Ledger(engine, f"r{skew_s}-{n}", lambda skew_s=skew_s: now + skew_s)
                for n, skew_s in enumerate(skews_s)
            )
            await one.create(replace(batch(created_at=now), input_file_id=file.id), 9)
            assert len(await one.lease(5)) == 1
            assert await two.lease(5) == []
            assert len(await one.lease(5)) == 1
        finally:
            await engine.dispose()

    asyncio.run(main())


def test_a_batch_of_a_dead_replica_is_taken_over_though_the_clock_was_set_back(url: str) -> None:
    async def main() -> None:
        engine, ahead_s = open_engine(url), [3_600.0]
        try:
            files = Files(engine, time.time)
            file = await (await files.begin("t")).finish("in.jsonl", "batch", 1_000.0)
            dead, other = (
                Ledger(engine, name, lambda: time.time() + ahead_s[0]) for name in ("dead", "other")
            )

            async def hour_ahead() -> float:
                return time.time() + ahead_s[0]

            dead._database_time = other._database_time = hour_ahead  # type: ignore[method-assign]
            await dead.create(replace(batch(created_at=time.time()), input_file_id=file.id), 9)
            assert len(await dead.lease(5)) == 1
            ahead_s[0] = 0.0
            assert len(await other.lease(5)) == 1
        finally:
            await engine.dispose()

    asyncio.run(main())
