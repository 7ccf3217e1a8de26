"""The store's contract, on every database that it supports."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from gateway.domain import Caller
from gateway.operator_orders import Order
from gateway.outcome import Status
from gateway.quotas.limits import Kind, Scope
from gateway.store import keys, retention
from gateway.store.audit import Act, add_entry
from gateway.store.database import open_engine
from gateway.store.errors import StoreError
from gateway.store.keys import REFRESH_S, REFRESH_TIMEOUT_S, KeyRing
from gateway.store.orders import OrderTable
from gateway.store.pepper import SECRET_LENGTH, Pepper, new_secret
from gateway.store.queries import OperatorReads, TotalBy
from gateway.store.quota_table import QuotaTable
from gateway.store.retention import DAY_S, Retention, RetentionPeriods
from gateway.store.rows import EventRow, event_of, record_of
from gateway.store.snapshots import ReplicaSummary, SnapshotTable
from gateway.store.store import open_store
from gateway.store.writer import DatabaseWriter
from tests.support.fakes.store import RECEIVED_AT, outcome


def test_a_key_opens_until_it_is_revoked(url: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with open_store(url, tmp_path) as store:
            info, secret = await store.keys.create_key("ci", models=["demo"], admin=True)
            assert store.keys.authenticate(secret) == Caller(info.id, "default", frozenset({"demo"}), True)
            assert await store.keys.list_keys() == [info]
            revoked = await store.keys.revoke_key(info.id)
            assert revoked is not None and revoked.revoked_at is not None
            assert store.keys.authenticate(secret) is None
            assert await store.keys.revoke_key(info.id) == revoked
            assert await store.keys.revoke_key("key_of_nobody") is None

    asyncio.run(main())


def test_a_secret_is_neither_stored_nor_guessable_from_what_is(url: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with open_store(url, tmp_path) as store:
            info, secret = await store.keys.create_key("me")
            assert len(secret) == SECRET_LENGTH
            assert secret not in repr(await store.keys.list_keys())
            assert secret.endswith(info.hint)
            assert len(info.hint) == 4

    asyncio.run(main())


@pytest.mark.parametrize(
    "secret", ["", "mico-", "sk-123", "mico-" + "x" * 43, "mico-" + "\ud800" * 43, "x" * 10**6]
)
def test_any_other_string_opens_nothing(secret: str, tmp_path: Path) -> None:
    ring = KeyRing(open_engine("sqlite:///unused.db"), Pepper.of_folder(tmp_path))
    assert ring.authenticate(secret) is None


def test_a_key_expires_without_a_look_at_the_database(url: str, tmp_path: Path) -> None:
    async def main() -> None:
        now = 1000.0
        engine = open_engine(url)
        ring = KeyRing(engine, Pepper.of_folder(tmp_path), clock=lambda: now)
        _, secret = await ring.create_key("short", expires_at=1060.0)
        assert ring.authenticate(secret) is not None
        now = 1060.0
        assert ring.authenticate(secret) is None
        await engine.dispose()

    asyncio.run(main())


def test_a_change_by_one_process_reaches_another_by_itself(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command creates and revokes a key beside two replicas that refresh on demand."""
    monkeypatch.setattr(keys, "REFRESH_S", 3_600.0)
    monkeypatch.setattr(keys, "LOOK_UP_TIMEOUT_S", 60.0)

    async def main() -> None:
        pepper = "p" * 32
        async with (
            open_store(url, tmp_path / "a", pepper=pepper) as one,
            open_store(url, tmp_path / "b", pepper=pepper) as two,
            open_store(url, tmp_path / "a", pepper=pepper, serving=False) as command,
        ):
            info, secret = await command.keys.create_key("new")
            assert one.keys.authenticate(secret) is None
            for replica in (one, two):
                caller = await replica.keys.look_up(secret)
                assert caller is not None and caller.key_id == info.id
            await command.keys.revoke_key(info.id)
            for replica in (one, two):
                await replica.keys.next_refresh()
                assert replica.keys.authenticate(secret) is None

    assert REFRESH_S + REFRESH_TIMEOUT_S < 5.0
    asyncio.run(main())


def test_a_flood_of_wrong_keys_is_one_query_per_rest(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "REFRESH_S", 7_200.0)
    monkeypatch.setattr(keys, "MIN_REFRESH_INTERVAL_S", 3_600.0)
    monkeypatch.setattr(keys, "LOOK_UP_TIMEOUT_S", 0.05)
    looks = 0
    real_refresh = KeyRing.refresh

    async def counted(self: KeyRing, **options: bool) -> None:
        nonlocal looks
        looks += 1
        await real_refresh(self, **options)

    async def main() -> None:
        async with open_store(url, tmp_path) as store:
            monkeypatch.setattr(KeyRing, "refresh", counted)
            for _ in range(3):
                found = await asyncio.gather(*(store.keys.look_up(new_secret()) for _ in range(200)))
                assert set(found) == {None}

    asyncio.run(main())
    assert looks == 1


def test_what_operators_do_to_keys_by_sql_holds_too(url: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with open_store(url, tmp_path) as store:
            (first, secret), (second, other) = [await store.keys.create_key(name) for name in ("a", "b")]
            engine = open_engine(url)
            async with engine.begin() as connection:
                await connection.execute(text(f"UPDATE keys SET revoked_at = 1 WHERE id = '{first.id}'"))
            await store.keys.refresh()
            assert store.keys.authenticate(secret) is None
            assert store.keys.authenticate(other) is not None
            async with engine.begin() as connection:
                await connection.execute(text(f"DELETE FROM keys WHERE id = '{second.id}'"))
            await store.keys.refresh()
            assert store.keys.authenticate(other) is None
            await engine.dispose()

    asyncio.run(main())


def test_an_unknown_key_hurries_the_look_at_the_database(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "REFRESH_S", 3_600.0)
    looked = asyncio.Event()
    real_refresh = KeyRing.refresh

    async def refresh_and_signal(self: KeyRing, **options: bool) -> None:
        await real_refresh(self, **options)
        looked.set()

    async def main() -> None:
        async with (
            open_store(url, tmp_path) as store,
            open_store(url, tmp_path, serving=False) as command,
        ):
            _, secret = await command.keys.create_key("new")
            monkeypatch.setattr(KeyRing, "refresh", refresh_and_signal)
            assert store.keys.authenticate(secret) is None
            async with asyncio.timeout(60):
                await looked.wait()
            assert store.keys.authenticate(secret) is not None

    asyncio.run(main())


def test_keys_of_another_pepper_do_not_open_and_are_reported(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with open_store(url, tmp_path, pepper="a" * 32) as store:
            _, secret = await store.keys.create_key("me")
        async with open_store(url, tmp_path, pepper="b" * 32) as store:
            assert store.keys.authenticate(secret) is None

    asyncio.run(main())
    assert "1 keys were made with another pepper" in caplog.text


def test_a_short_pepper_is_refused_and_a_made_one_lasts(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="at least 32 characters"):
        Pepper("secret")
    assert Pepper.of_folder(tmp_path).id == Pepper.of_folder(tmp_path).id
    assert (tmp_path / "key-pepper").stat().st_mode & 0o777 == 0o600


def test_answers_and_rows_are_as_many_and_say_the_same(url: str, tmp_path: Path) -> None:
    async def main() -> None:
        answered = [
            outcome(f"q{n}", attempts=n % 3, model=f"m{n % 2}", received_at=RECEIVED_AT + n)
            for n in range(250)
        ]
        async with open_store(url, tmp_path) as store:
            for each in answered:
                store.recorder.record(each)
            assert await store.recorder.flush()
            assert await store.read.count_usage() == 250
            (explained,) = await store.read.explain("request of q5")
            assert explained.attempts == answered[5].attempts
            assert explained.usage == record_of(answered[5]).usage
            assert await store.read.explain("q5") == [explained]
            for answer_id in ("chatcmpl-q5", "cmpl-q5", "resp_q5", "msg_q5", "rerank-q5"):
                assert await store.read.explain(answer_id) == [explained]
            assert await store.read.explain("unknown") == []

    asyncio.run(main())


def test_totals_add_up_by_tenant_model_site_and_cloud(url: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with open_store(url, tmp_path) as store:
            for n in range(10):
                one = outcome(f"q{n}", tenant=f"t{n % 2}", received_at=RECEIVED_AT + n, attempts=n % 2)
                store.recorder.record(one, "aws" if one.site else "")
            assert await store.recorder.flush()
            tenants = await store.read.totals(TotalBy.TENANT)
            assert [(t.name, t.queries, t.prompt_tokens, t.completion_tokens) for t in tenants] == [
                ("t0", 5, 60, 170),
                ("t1", 5, 60, 170),
            ]
            late = await store.read.totals(TotalBy.SITE, since=RECEIVED_AT + 7)
            assert {t.name: t.queries for t in late} == {"": 1, "aws/one": 2}
            assert [t.name for t in await store.read.totals(TotalBy.MODEL)] == ["demo"]
            clouds = await store.read.totals(TotalBy.CLOUD)
            assert {t.name: t.queries for t in clouds} == {"": 5, "aws": 5}

    asyncio.run(main())


def test_one_request_id_used_twice_is_two_rows_newest_first(url: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with open_store(url, tmp_path) as store:
            for n in range(2):
                store.recorder.record(outcome(f"q{n}", request_id="mine", received_at=RECEIVED_AT + n))
            assert await store.recorder.flush()
            assert [each.usage.query_id for each in await store.read.explain("mine")] == ["q1", "q0"]
            store.recorder.record(outcome("q0-1", received_at=RECEIVED_AT - 1))
            assert await store.recorder.flush()
            assert [each.usage.query_id for each in await store.read.explain("cmpl-q0")] == ["q0", "q0-1"]

    asyncio.run(main())


def test_a_record_that_the_database_refuses_costs_no_other(url: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with open_store(url, tmp_path) as store:
            store.recorder.record(outcome("a"))
            store.recorder.record(outcome("b", completion_tokens=2**70))
            store.recorder.record(outcome("c"))
            assert await store.recorder.flush()
            assert await store.read.count_usage() == 2
            assert store.recorder.health.lost == 1

    asyncio.run(main())


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    offers=st.lists(st.lists(st.integers(0, 9), min_size=1), max_size=6),
    texts=st.fixed_dictionaries({name: st.text() for name in ("request_id", "model", "error")}),
)
def test_whatever_is_offered_again_stays_one_row(
    url: str, offers: list[list[int]], texts: dict[str, str]
) -> None:
    async def main() -> None:
        engine = open_engine(url)
        writer = DatabaseWriter(engine)
        before = await OperatorReads(engine).count_usage()
        run = f"{before}-"
        for batch in offers:
            await writer.write([record_of(outcome(run + str(n), attempts=n % 3, **texts)) for n in batch])
        different = {n for batch in offers for n in batch}
        assert await OperatorReads(engine).count_usage() == before + len(different)
        await engine.dispose()

    asyncio.run(main())


def test_commands_work_beside_a_gateway_and_record_nothing(url: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with open_store(url, tmp_path), open_store(url, tmp_path, serving=False) as command:
            with pytest.raises(StoreError, match="without recording"):
                command.recorder.record(outcome(status=Status.FAILED))
            assert await command.read.count_usage() == 0

    asyncio.run(main())


def test_replicas_read_what_the_others_said_last(url: str) -> None:
    async def main() -> None:
        engine = open_engine(url)
        snapshots = SnapshotTable(engine)
        assert await snapshots.exchange(ReplicaSummary("g1", 10_000.0, {"ended_per_min": 1.0})) == []
        (seen,) = await snapshots.exchange(ReplicaSummary("g2", 10_000.5, {"ended_per_min": 2.0}))
        assert seen == ReplicaSummary("g1", 10_000.0, {"ended_per_min": 1.0})
        (seen,) = await snapshots.exchange(ReplicaSummary("g1", 10_002.0, {"ended_per_min": 3.0}))
        assert seen.replica == "g2"
        assert (
            await snapshots.exchange(ReplicaSummary("g2", 20_000.0, {})) == []
        )  # who is gone for hours is forgotten
        await engine.dispose()

    asyncio.run(main())


def test_minutes_of_a_clock_that_was_set_back_since_are_not_kept(url: str) -> None:
    async def main() -> None:
        engine = open_engine(url)
        snapshots = SnapshotTable(engine)
        for minute in (100, 160, 161, 102, 101):  # another replica's is written first
            await snapshots.save(minute, {"minute": minute})
        assert [minute for minute, _ in await snapshots.since(0)] == [100, 101, 102]
        await engine.dispose()

    asyncio.run(main())


def test_operators_who_act_at_once_follow_each_other(url: str) -> None:
    orders = [Order("a", "weight", f"{percent}", "ops", "", 1.0) for percent in range(10, 90, 10)]

    async def main() -> None:
        engines = [open_engine(url), open_engine(url)]
        books, tables = [OrderTable(each) for each in engines], [QuotaTable(each) for each in engines]
        entries = await asyncio.gather(
            *(
                book.change("a", "weight", order, action="weight", who="ops", reason="", now=1.0)
                for book, order in zip(books * 4, orders, strict=True)
            )
        )
        (last,) = await books[0].orders()
        values = {order.value for order in orders if order != last} | {"default"}
        assert {entry.before for entry in entries} == {f"weight: {value}" for value in values}
        await tables[0].set_tenant("shop", best_priority=0, act=Act("ops"))
        found = await asyncio.gather(
            *(table.set_quotas(Scope.TENANT, "shop", {Kind.TOKENS: 10}, Act("ops")) for table in tables * 4)
        )
        assert [len(each) for each in found] == [1] * 8
        for engine in engines:
            await engine.dispose()

    asyncio.run(main())


def test_the_audit_is_kept_for_its_own_time(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "ROWS_PER_STEP", 2)
    monkeypatch.setattr(retention, "PAUSE_S", 0.0)

    async def main() -> None:
        engine = open_engine(url)
        async with engine.begin() as connection:
            for day in range(9):
                await add_entry(connection, Act("ops"), day * DAY_S, action=f"act {day}", before="", after="")
        keeping = Retention(engine, RetentionPeriods(audit_days=5), clock=lambda: 8.5 * DAY_S)
        assert await keeping.sweep() == 4
        assert await keeping.sweep() == 0
        left = [entry.action for entry in await OrderTable(engine).entries(20)]
        assert left == [f"act {day}" for day in (8, 7, 6, 5, 4)]
        await engine.dispose()

    asyncio.run(main())


def event(day: float, site: str = "a", replica: str = "g1") -> EventRow:
    return EventRow(
        f"{site} {replica} {day:g}", day * DAY_S, site, "state", f"day {day:g}", bool(day % 2), replica
    )


def test_events_of_a_site_are_kept_once_and_read_newest_first(url: str) -> None:
    async def main() -> None:
        engine = open_engine(url)
        rows = [event(day, site, replica) for day in range(5) for site in "ab" for replica in ("g1", "g2")]
        writer = DatabaseWriter(engine)
        await writer.write([record_of(outcome("q")), *rows[:7]])
        await writer.write([*rows, record_of(outcome("q"))])
        read = OperatorReads(engine)
        assert await read.count_usage() == 1
        found = (await read.site("a", 4)).events
        assert [each.at / DAY_S for each in found] == [4, 4, 3, 3]
        assert found[:2] == [event(4, "a", "g2"), event(4, "a")]  # of one time: by their ids
        assert await read.site("nobody", 4) == ([], [])
        seen = await read.events_of_replica("g2", 3 * DAY_S, 9)
        assert sorted(seen, key=lambda each: each.site)[:2] == [
            event_of(event(4, "a", "g2")),
            event_of(event(3, "a", "g2")),
        ]
        assert len(seen) == 4
        await engine.dispose()

    asyncio.run(main())


def test_events_of_sites_go_when_they_are_too_old_whoever_sweeps(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "ROWS_PER_STEP", 3)
    monkeypatch.setattr(retention, "PAUSE_S", 0.0)

    async def main() -> None:
        engine = open_engine(url)
        await DatabaseWriter(engine).write([event(day) for day in range(40)])
        keeping = Retention(engine, RetentionPeriods(site_events_days=10), clock=lambda: 40 * DAY_S)
        assert sum(await asyncio.gather(*(keeping.sweep() for _ in range(4)))) == 30
        assert await keeping.sweep() == 0
        assert [each.at / DAY_S for each in (await OperatorReads(engine).site("a", 99)).events] == [
            *range(39, 29, -1)
        ]
        await engine.dispose()

    asyncio.run(main())


def test_only_what_is_too_old_goes_and_decisions_go_first(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "ROWS_PER_STEP", 5)
    monkeypatch.setattr(retention, "PAUSE_S", 0.0)

    async def main() -> None:
        engine = open_engine(url)
        days = [record_of(outcome(f"q{n}", attempts=3, received_at=n * DAY_S)) for n in range(60)]
        await DatabaseWriter(engine).write(days)
        keeping = Retention(
            engine, RetentionPeriods(usage_days=40, decisions_days=10), clock=lambda: 60 * DAY_S
        )
        removed = await asyncio.gather(*(keeping.sweep() for _ in range(4)))
        assert sum(removed) == 20 + 3 * 50
        assert await keeping.sweep() == 0
        read = OperatorReads(engine)
        assert await read.count_usage() == 40
        assert [len(e.attempts) for n in (19, 20, 49, 50) for e in await read.explain(f"q{n}")] == [0, 0, 3]
        await engine.dispose()

    asyncio.run(main())
