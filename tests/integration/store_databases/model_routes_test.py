"""Routes are one table for all replicas, over each one's file; every change has its reason in the audit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace
from sqlalchemy import insert

from gateway.errors import BadRequest
from gateway.routing.model_routes import ModelRoute, Shadow, Target, When, in_order
from gateway.store import model_routes
from gateway.store.audit import Act
from gateway.store.database import open_engine
from gateway.store.model_routes import RouteTable, read_file
from gateway.store.rows import record_of
from gateway.store.store import open_store
from gateway.store.tables import model_routes as table
from tests.support.fakes.federation import until
from tests.support.fakes.store import outcome

WHY = Act("key-a", "a test")
A, B = Target("a"), Target("b", when=When.UNAVAILABLE)
CANARY = ModelRoute("chat", (Target("a", 95), Target("c", 5)), Shadow("s", 0.1))


def test_a_change_at_one_replica_holds_at_the_other_and_after_a_restart(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_routes, "REFRESH_S", 0.01)

    async def main() -> None:
        async with open_store(url, tmp_path / "1") as one, open_store(url, tmp_path / "2") as two:
            await one.routes.start()
            await two.routes.start()
            await one.routes.put(CANARY, WHY)
            assert one.routes.current == {"chat": CANARY}, "at once where it was made"
            await until(lambda: two.routes.current == {"chat": CANARY}, "the change at the other replica")
            (off,) = await two.routes.take_out("c", None, WHY)
            await until(lambda: one.routes.current == {"chat": off}, "the canary is off everywhere")
            assert await one.routes.remove("chat", WHY)
            await until(lambda: not two.routes.current, "the end at the other replica")
            assert not await one.routes.remove("chat", WHY)
            acts = [(each.action, each.before, each.after) for each in await one.orders.entries(9)]
            assert acts[::-1] == [
                ("set route chat", "none", "a 95, c 5; shadow s 0.1"),
                ("take c out of route chat", "a 95, c 5; shadow s 0.1", "a 95, c off; shadow s 0.1"),
                ("remove route chat", "a 95, c off; shadow s 0.1", "none"),
            ]
            await one.routes.put(CANARY, WHY)
        async with open_store(url, tmp_path / "1") as again:
            await again.routes.start()
            assert again.routes.current == {"chat": CANARY}

    asyncio.run(main())


def test_changes_at_two_replicas_at_once_all_hold(url: str) -> None:
    models = [f"m{number}" for number in range(8)]
    route = ModelRoute("chat", (A, *(Target(model) for model in models)))

    async def main() -> None:
        engines = [open_engine(url), open_engine(url)]
        tables = [RouteTable(engine) for engine in engines]
        await asyncio.gather(*(each.put(route, WHY) for each in tables * 3))
        turns = zip(tables * 4, models, strict=True)
        await asyncio.gather(*(each.take_out(model, "chat", WHY) for each, model in turns))
        await tables[0].refresh()
        weights = {target.model: target.weight for target in tables[0].current["chat"].targets}
        assert weights == {"a": 1.0, **dict.fromkeys(models, 0.0)}
        for engine in engines:
            await engine.dispose()

    asyncio.run(main())


def test_the_table_holds_over_the_file_and_the_file_again_after_it(url: str) -> None:
    async def main() -> None:
        engine = open_engine(url)
        routes = RouteTable(engine)
        of_file = [CANARY, ModelRoute("other", (A,))]
        await routes.start(of_file)
        assert set(routes.current) == {"chat", "other"} and not routes.stored
        (off,) = await routes.take_out("c", "chat", WHY)
        assert routes.current["chat"] == off != CANARY
        assert await routes.remove("chat", WHY)
        assert routes.current["chat"] == CANARY
        await routes.close()
        await engine.dispose()

    asyncio.run(main())


def test_what_cannot_be_is_refused_and_nothing_is_changed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_routes, "MAX_ROUTES", 2)

    async def main() -> None:
        engine = open_engine(url)
        routes = RouteTable(engine)
        await routes.start()
        await routes.put(CANARY, WHY)
        for chained in (ModelRoute("x", (Target("chat"),)), ModelRoute("c", (A,))):
            with pytest.raises(BadRequest, match="followed twice"):
                await routes.put(chained, WHY)
        await routes.put(ModelRoute("lone", (A,)), WHY)
        with pytest.raises(BadRequest, match="2 routes already"):
            await routes.put(ModelRoute("third", (A,)), WHY)
        await routes.put(replace(CANARY, targets=(A, Target("b", weight=0.0))), WHY)
        before = routes.current
        with pytest.raises(BadRequest, match=r"'chat' .*remove the route"):
            await routes.take_out("a", "chat", WHY)
        assert await routes.take_out("nobody", None, WHY) == []
        assert routes.current == before
        await routes.close()
        await engine.dispose()

    asyncio.run(main())


def test_a_model_is_taken_out_of_a_route_whose_fallback_is_left(url: str) -> None:
    async def main() -> None:
        engine = open_engine(url)
        routes = RouteTable(engine)
        await routes.start()
        await routes.put(ModelRoute("chat", (A, B)), WHY)
        (off,) = await routes.take_out("a", None, WHY)
        assert routes.current == {"chat": off}
        assert [each.model for each in in_order(off.targets, 0.5)] == ["b"]
        await routes.close()
        await engine.dispose()

    asyncio.run(main())


def test_a_model_is_taken_out_although_the_file_and_the_table_do_not_agree(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may name as a target what an operator has made a route, and there may be too many in all."""
    monkeypatch.setattr(model_routes, "MAX_ROUTES", 1)

    async def main() -> None:
        engine = open_engine(url)
        routes = RouteTable(engine)
        await routes.put(ModelRoute("a", (A, Target("c"))), WHY)
        await routes.start([ModelRoute("chat", (A, Target("c")))])
        assert len(await routes.take_out("c", None, WHY)) == 2
        assert {each.without("c") for each in routes.current.values()} == {*routes.current.values()}
        await routes.close()
        await engine.dispose()

    asyncio.run(main())


def test_a_route_that_this_version_does_not_understand_costs_the_others_nothing(url: str) -> None:
    async def main() -> None:
        engine = open_engine(url)
        routes = RouteTable(engine)
        await routes.start()
        await routes.put(CANARY, WHY)
        newer = {"name": "new", "targets": [{"model": "a", "when": "full_moon"}]}
        row = {"name": "new", "route": newer, "who": "w", "reason": "r", "changed_at": 0.0, "stamp": 7}
        async with engine.begin() as connection:
            await connection.execute(insert(table), row)
        await routes.refresh()
        assert set(routes.current) == {"chat"}
        await routes.close()
        await engine.dispose()

    asyncio.run(main())


def test_the_usage_row_has_the_asked_name_and_the_attempts_their_models(url: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with open_store(url, tmp_path) as store:
            ended = outcome("q1")
            attempts = tuple(replace(each, model="b") for each in ended.attempts)
            store.recorder.record(replace(ended, model="b", asked_model="chat", attempts=attempts))
            await store.recorder.flush()
            (explained,) = await store.read.explain("q1")
            assert (explained.usage.model, explained.usage.asked_model) == ("b", "chat")
            assert [attempt.model for attempt in explained.attempts] == ["b"] * len(ended.attempts)
            assert record_of(ended).usage.asked_model == ""

    asyncio.run(main())


def test_a_file_of_routes_is_read_or_refused_with_its_mistake(tmp_path: Path) -> None:
    path = tmp_path / "routes.toml"
    path.write_text(
        '[[route]]\nname = "chat"\n'
        'targets = [{model = "a"}, {model = "b", when = "slower_than", slower_than_s = 2}]\n'
        'shadow = {model = "s", share = 0.05}\n'
    )
    slower = Target("b", when=When.SLOWER_THAN, slower_than_s=2.0)
    assert read_file(path) == [ModelRoute("chat", (A, slower), Shadow("s", 0.05))]
    one_of = '[[route]]\nname = "{}"\ntargets = [{{model = "{}"}}]\n'
    chained = one_of.format("x", "y") + one_of.format("y", "a")
    for text, mistake in (
        ('[[route]]\nname = "x"\ntargets = []', "1 to 16 targets"),
        ('[[route]]\nname = "x"\ntargets = [{model = "a", wieght = 2}]', "wieght"),
        ('[[route]]\nname = "x"\ntargets = [{model = "a"}]\n' * 2, "two routes"),
        (chained, "twice"),
        ("route", "routes.toml"),
    ):  # fmt: skip
        path.write_text(text)
        with pytest.raises(ValueError, match=mistake):
            read_file(path)
