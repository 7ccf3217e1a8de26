"""The models of a site: variants of its configuration, and those that orders add and remove."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from site_engine import group
from site_engine.app import event_loop_factory, serve
from site_engine.config import SiteConfig, VariantConfig
from site_engine.engine.loading import Loaded
from tests.support.site_fakes import FakeEngine, fake_loaded
from tests.support.site_gateway import TOKEN, Gateway, Session, assign, serving
from wire import federation_pb2 as pb


def run(
    scenario: Callable[[Session], Awaitable[None]],
    engine: FakeEngine | None = None,
    reads_held: bool = True,
    **settings: Any,
) -> None:
    def load(_: SiteConfig) -> Loaded:
        return fake_loaded(engine, weights_bytes=5_000)

    async def whole() -> None:
        async with serving(Gateway()) as gateway:
            config = SiteConfig(
                site="alpha/letters",
                model="letters",
                gateways=(gateway.address,),
                token=TOKEN,
                slots=2,
                **settings,
            )
            site = asyncio.create_task(serve(config, load))
            session = await gateway.joined()
            assert (await session.welcome(reads_models=True, reads_held=reads_held)).takes_orders
            await scenario(session)
            site.cancel()
            await asyncio.gather(site, return_exceptions=True)

    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(whole())


async def order(session: Session, kind: str, model: str, **folder: str) -> str:
    """Return the error of an order, empty if it was carried out."""
    order_id = str(len(session.received("ordered")))
    await session.send(order=pb.ModelOrder(order_id=order_id, kind=kind, model=model, **folder))
    await session.until(lambda: [e for e in session.received("ordered") if e.order_id == order_id])
    return str(session.received("ordered")[-1].error)


async def ask(session: Session, attempt_id: str, model: str) -> str:
    body = assign(attempt_id, "abc", max_tokens=5)
    body["assign"].model = model
    await session.send(**body)
    await session.finished(attempt_id)
    return session.text(attempt_id)


def test_variants_of_the_configuration_are_served_and_a_broken_one_costs_the_others_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(session: Session) -> None:
        base, one, _ = await session.served_models("letters", "one", "two")
        assert (one.parent, one.revision, one.own_bytes) == ("letters", "r1+/srv/one", 1_000)
        assert one.features == base.features and one.context_tokens == base.context_tokens
        assert await ask(session, "a", "two") == "abcab"

    variants = (
        VariantConfig("one", adapter="/srv/one"),
        VariantConfig("bad", adapter="/srv/broken"),
        VariantConfig("letters", adapter="/srv/one"),
        VariantConfig("two", model="/srv/two"),
    )
    run(scenario, variants=variants)
    assert "bad is not served: bad: /srv/broken holds NaN" in caplog.text
    assert "letters is not served as a variant: it is the base" in caplog.text


def test_an_order_adds_a_variant_and_another_removes_it(tmp_path: Path) -> None:
    (tmp_path / "support").mkdir()

    async def scenario(session: Session) -> None:
        folder = str(tmp_path / "support")
        assert not await order(session, "add", "support", adapter=folder)
        assert (await session.served_models("letters", "support"))[1].revision == f"r1+{folder}"
        assert await ask(session, "a", "support") == "abcab"
        error = await order(session, "add", "support", adapter=folder)
        assert error == "support is served here already; remove it first"
        assert not await order(session, "remove", "support")
        await session.served_models("letters")
        body = assign("b")
        body["assign"].model = "support"
        await session.send(**body)
        assert (await session.wait_for("rejected"))[0].reason == pb.Rejected.MODEL_UNKNOWN
        assert await ask(session, "c", "letters") == "abcab"

    run(scenario, models_from=(str(tmp_path),))


def test_an_order_loads_only_from_the_folders_that_the_site_allows(tmp_path: Path) -> None:
    allowed, outside = tmp_path / "allowed", tmp_path / "allowed-not"
    for each in (allowed, outside, allowed / "broken"):
        each.mkdir()
    (allowed / "link").symlink_to(outside)
    (allowed / "loop").symlink_to(allowed / "loop")

    async def scenario(session: Session) -> None:
        for folder in (outside, allowed / "link", allowed / ".." / "allowed-not", Path("/etc")):
            error = await order(session, "add", "v", adapter=str(folder))
            assert error == f"{folder.resolve()} is not below models_from of this site, which is {allowed}"
        assert "there is no folder" in await order(session, "add", "v", adapter=str(allowed / "absent"))
        assert await order(session, "add", "v", adapter=str(allowed / "broken")) == (
            f"v: {allowed / 'broken'} holds NaN"
        )
        for odd in ("nul\0", "x" * 5_000, "loop/x", "a/" * 3_000):
            error = await order(session, "add", "v", adapter=f"{allowed}/{odd}")
            assert "is no folder of this site" in error or "there is no folder" in error
        assert "is the base" in await order(session, "remove", "letters")
        assert await order(session, "remove", "v") == "v is not served here"
        assert "one folder" in await order(session, "add", "v", adapter="/a", folder="/b")
        assert "printable" in await order(session, "add", "v\n", adapter=str(allowed / "broken"))
        assert "knows no order 'move'" in await order(session, "move", "v")
        for kind in ("sleep", "wake"):
            assert await order(session, kind, "v") == "v is not served here"
        assert "sleeps only where `devices`" in await order(session, "sleep", "letters")
        assert not await order(session, "wake", "letters")
        await session.served_models("letters")
        assert not session.received("models")

    run(scenario, models_from=(str(allowed),))


def test_an_order_loads_from_the_hub_only_what_the_site_allows() -> None:
    commit = "0" * 40

    async def scenario(session: Session) -> None:
        for repository in ("other/x", "acme-evil/x", "tools/support-2", "../acme/x"):
            error = await order(session, "add", "v", adapter=f"hf:{repository}@{commit}")
            allowed = "is not of models_from of this site, which has hf:acme/, hf:tools/support"
            assert error == f"hf:{repository}@{commit} {allowed}"
        assert "is not below models_from" in await order(session, "add", "v", adapter="/srv/x")
        for number, repository in enumerate(("acme/x", "tools/support")):
            assert not await order(session, "add", str(number), adapter=f"hf:{repository}@{commit}")
            await session.served_models("letters", *map(str, range(number + 1)))

    run(scenario, models_from=("hf:acme/", "hf:tools/support"))


def test_without_models_from_no_order_loads_anything(tmp_path: Path) -> None:
    async def scenario(session: Session) -> None:
        error = await order(session, "add", "v", adapter=str(tmp_path))
        assert error.endswith("is not below models_from of this site, which is nothing")

    run(scenario)


VARIANTS = (VariantConfig("one", adapter="/srv/one"), VariantConfig("two", adapter="/srv/two"))


async def states(session: Session, **wanted: int) -> None:
    """Wait until the site has said that these models are in these states."""

    def reported() -> dict[str, int]:
        latest = session.received("models") or session.received("hello")
        return {each.id: each.state for each in latest[-1].models} if latest else {}

    await session.until(lambda: wanted.items() <= reported().items())


async def start(session: Session, attempt_id: str, model: str) -> None:
    body = assign(attempt_id, "abc", max_tokens=5)
    body["assign"].model = model
    await session.send(**body)


def test_a_variant_sleeps_and_wakes_by_order() -> None:
    engine = FakeEngine()

    async def scenario(session: Session) -> None:
        await states(session, letters=pb.Model.READY, one=pb.Model.READY, two=pb.Model.READY)
        for _ in range(2):  # a second order changes nothing
            assert not await order(session, "sleep", "one")
            await states(session, one=pb.Model.SLEEPING, two=pb.Model.READY)
            assert set(engine.variants) == {"two"}
        assert await ask(session, "a", "two") == "abcab"
        for _ in range(2):
            assert not await order(session, "wake", "one")
            await states(session, one=pb.Model.READY)
            assert set(engine.variants) == {"one", "two"}
        assert not await order(session, "sleep", "one")
        assert not await order(session, "remove", "one")
        await session.served_models("letters", "two")

    run(scenario, engine, variants=VARIANTS)


def test_a_wake_is_known_to_take_time_however_short_it_was() -> None:
    """0 says that nobody knows. By the event loop's clock, which counts milliseconds, a wake could take 0."""

    async def scenario(session: Session) -> None:
        await states(session, one=pb.Model.READY)
        for _ in range(5):
            assert not await order(session, "sleep", "one")
            assert not await order(session, "wake", "one")
            await states(session, one=pb.Model.READY)
            (one,) = (each for each in session.received("models")[-1].models if each.id == "one")
            assert 0.0 < one.wake_s < 60.0

    run(scenario, variants=VARIANTS)


def test_gateways_are_told_which_adapters_wait_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "RESIDENTS_EVERY_S", 0.0)
    engine = FakeEngine(adapter_slots=True)

    def waiting(session: Session) -> set[str] | None:
        told = session.received("models")
        if not told:  # what served at the beginning was told in the greeting
            return None
        return {each.id for each in told[-1].models for block in each.blocks if block.in_host}

    async def scenario(session: Session) -> None:
        base, one, _ = await session.served_models("letters", "one", "two")
        assert [(each.kind, each.bytes) for each in base.blocks] == [(pb.Block.BASE, 5_000)]
        assert [(each.kind, each.bytes) for each in one.blocks] == [(pb.Block.ADAPTER, 1_000)]
        for resident in ({"/srv/two"}, {"/srv/one", "/srv/two"}, set()):
            engine.resident = frozenset(resident)
            wanted = {each.id for each in VARIANTS if each.adapter not in resident}
            await session.until(lambda wanted=wanted: waiting(session) == wanted)

    run(scenario, engine, variants=VARIANTS)


def test_queries_for_a_variant_that_sleeps_wake_it_and_wait() -> None:
    engine = FakeEngine()

    async def scenario(session: Session) -> None:
        await session.served_models("letters", "one", "two")
        assert not await order(session, "sleep", "one")
        engine.may_load.clear()
        for attempt_id in "abc":
            await start(session, attempt_id, "one")
        assert {each.attempt_id for each in await session.wait_for("held", 3)} == set("abc")
        await states(session, one=pb.Model.WAKING)
        assert await ask(session, "other", "two") == "abcab"
        await session.send(cancel=pb.Cancel(attempt_id="b"))
        assert await session.finished("b") == pb.Delta.CANCELLED
        for kind in ("sleep", "remove"):
            assert "another order for one" in await order(session, kind, "one")
        engine.may_load.set()
        for attempt_id in "ac":
            assert await session.finished(attempt_id) == pb.Delta.LENGTH
            assert session.text(attempt_id) == "abcab"
        await states(session, one=pb.Model.READY)
        assert not session.received("rejected")
        assert {each.attempt_id for each in session.received("accepted")} == {"other", "a", "c"}

    run(scenario, engine, variants=VARIANTS)


def test_a_query_that_meets_its_variant_going_to_sleep_is_not_lost() -> None:
    """Orders and queries as they come: each query is answered, whatever state its variant is in."""

    async def scenario(session: Session) -> None:
        await session.served_models("letters", "one", "two")
        for number in range(60):
            kind = "sleep" if number % 2 else "wake"
            await start(session, f"before-{number}", "one")
            sent = pb.ModelOrder(order_id=str(number), kind=kind, model="one")
            await session.send(order=sent)
            await start(session, f"after-{number}", "one")
            if number % 7 == 0:
                await session.finished(f"after-{number}")
        for number in range(60):
            for name in (f"before-{number}", f"after-{number}"):
                assert await session.finished(name) == pb.Delta.LENGTH
                assert session.text(name) == "abcab"
        assert not session.received("rejected")

    run(scenario, FakeEngine(max_pending=1000), variants=VARIANTS)


def test_queries_for_a_variant_that_cannot_wake_are_refused_with_the_reason_and_it_sleeps_on() -> None:
    engine = FakeEngine()

    async def scenario(session: Session) -> None:
        await session.served_models("letters", "one", "two")
        assert not await order(session, "sleep", "one")
        engine.no_memory = True
        await start(session, "a", "one")
        (refusal,) = await session.wait_for("rejected")
        assert refusal.reason == pb.Rejected.FULL
        assert refusal.message == "one sleeps here and cannot be woken: one does not fit the memory"
        assert await order(session, "wake", "one") == "one does not fit the memory"
        await states(session, one=pb.Model.SLEEPING)
        engine.no_memory = False
        assert await ask(session, "b", "one") == "abcab"

    run(scenario, engine, variants=VARIANTS)


def test_an_older_gateway_is_refused_at_once_while_the_variant_wakes() -> None:
    async def scenario(session: Session) -> None:
        await session.served_models("letters", "one", "two")
        assert not await order(session, "sleep", "one")
        await states(session, one=pb.Model.SLEEPING)
        await start(session, "a", "one")
        (refusal,) = await session.wait_for("rejected")
        assert (refusal.reason, refusal.message) == (pb.Rejected.FULL, "one sleeps here, and wakes now")
        await states(session, one=pb.Model.READY)
        assert await ask(session, "b", "one") == "abcab"
        assert not session.received("held")

    run(scenario, reads_held=False, variants=VARIANTS)
