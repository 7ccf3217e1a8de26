"""The base and the variants of a site, by orders that come while others are carried out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from site_engine.config import SiteConfig
from site_engine.core.chain import Chain, Variant
from site_engine.errors import VariantRefused
from site_engine.federation.site import Site
from site_engine.group import CHANGING, Group, Wanted
from site_engine.messages import Model, ModelOrder, ModelState
from site_engine.pool.sleeping import PoolSleep
from tests.support.site_fakes import HELLO, FakeClock, FakeEngine

BASE = HELLO.models[0].id


class LoadingEngine:
    """Loads variants when the test says so, and sleeps at once."""

    def __init__(self) -> None:
        self.loading: list[tuple[Variant, Callable[[Chain | VariantRefused], None]]] = []
        self.sleeping = PoolSleep(
            [],
            serves=lambda: False,
            trains=lambda: False,
            start=lambda replica: asyncio.sleep(0),
            restart=lambda replica: None,
            begin=lambda work: self.tasks.append(asyncio.ensure_future(work)),
        )
        self.tasks: list[asyncio.Future[None]] = []

    def add_variant(self, variant: Variant, reply: Callable[[Chain | VariantRefused], None]) -> None:
        self.loading.append((variant, reply))

    def request_load(self) -> None: ...


def test_a_base_does_not_sleep_while_a_variant_is_loaded() -> None:
    """The variant would be lost with the engine, or be announced as asleep for ever."""

    async def main() -> None:
        engine: Any = LoadingEngine()
        site = Site(HELLO, engine, FakeClock(), 1)
        config = SiteConfig(
            site="alpha",
            gateways=("127.0.0.1:1",),
            model="letters",
            devices=("cpu",),
        )
        group = Group(config, engine, site, {"one": Wanted(Variant("one", "/srv/one"))})
        group.load_wanted()
        answers: list[str] = []
        group.carry_out(ModelOrder("1", "sleep", BASE), answers.append)
        assert answers == [CHANGING.format(BASE)]
        ((variant, loaded),) = engine.loading
        loaded(FakeEngine().load_variant(variant)())
        assert {each.id: each.state for each in site.hello().models} == dict.fromkeys(
            (BASE, "one"), ModelState.READY
        )
        group.carry_out(ModelOrder("2", "sleep", BASE), answers.append)
        await asyncio.gather(*engine.tasks)
        assert answers[1:] == [""]
        assert {each.state for each in site.hello().models} == {ModelState.SLEEPING}

    asyncio.run(main())


def test_adapters_of_tenants_are_not_announced_after_an_engine_whose_loss_took_their_folders() -> None:
    """A gateway has only those fetched anew that no site announces, asleep or awake."""

    async def main() -> None:
        engine: Any = LoadingEngine()
        site = Site(HELLO, engine, FakeClock(), 1)
        config = SiteConfig(site="alpha", gateways=("127.0.0.1:1",), model="letters", training=True)
        awake, asleep = (Variant(each, f"/tmp/gone/{each}", tenant="acme") for each in ("awake", "asleep"))
        model = replace(HELLO.models[0], id="asleep", parent=BASE, state=ModelState.SLEEPING, tenant="acme")
        wanted = {"awake": Wanted(awake), "asleep": Wanted(asleep, model)}
        Group(config, engine, site, wanted).load_wanted()
        assert [each.id for each in site.hello().models] == [BASE]
        assert not engine.loading and not wanted

    asyncio.run(main())


@pytest.mark.parametrize(("tenant", "left"), [("", [ModelState.SLEEPING]), ("acme", [])])
def test_a_variant_that_the_engines_drop_sleeps_unless_gateways_have_it_fetched_anew(
    tenant: str, left: list[ModelState]
) -> None:
    """A query for one that sleeps has it loaded again, and is told why it can't be."""

    async def main() -> None:
        engine: Any = LoadingEngine()
        site = Site(HELLO, engine, FakeClock(), 1)
        served: list[Model] = []
        site.set_models = lambda models: served.__setitem__(slice(None), models)
        config = SiteConfig(site="alpha", gateways=("127.0.0.1:1",), model="letters", devices=("cpu",))
        group = Group(config, engine, site, {})
        answers: list[str] = []
        group.add(Variant("one", "/srv/one", tenant=tenant), answers.append)
        ((variant, loaded),) = engine.loading
        loaded(FakeEngine().load_variant(variant)())
        assert answers == [""]
        group.refused("one", VariantRefused("one holds NaN"))
        assert [each.state for each in served if each.id == "one"] == left
        if not left:
            return
        group.wake("one", answers.append)
        _, loaded = engine.loading[-1]
        loaded(VariantRefused("one holds NaN"))
        assert answers[1:] == ["one holds NaN"]

    asyncio.run(main())


def test_a_variant_that_the_waking_engines_drop_keeps_no_others_asleep() -> None:
    async def main() -> None:
        engine: Any = LoadingEngine()
        site = Site(HELLO, engine, FakeClock(), 1)
        config = SiteConfig(site="alpha", gateways=("127.0.0.1:1",), model="letters", devices=("cpu",))
        group = Group(config, engine, site, {})
        for name, tenant in (("theirs", "acme"), ("ours", "")):
            group.add(Variant(name, f"/srv/{name}", tenant=tenant), lambda _: None)
            variant, loaded = engine.loading.pop()
            loaded(FakeEngine().load_variant(variant)())
        answers: list[str] = []
        group.carry_out(ModelOrder("1", "sleep", BASE), answers.append)
        await asyncio.gather(*engine.tasks)
        group.carry_out(ModelOrder("2", "wake", "theirs"), answers.append)
        group.carry_out(ModelOrder("3", "wake", "ours"), answers.append)
        group.refused("theirs", VariantRefused("its folder is gone"))
        await asyncio.gather(*engine.tasks)
        assert answers == ["", "theirs is not served here any more", ""]

    asyncio.run(main())
