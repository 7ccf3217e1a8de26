"""The models of a site: variants of its configuration, and those that orders add and remove."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from site_engine.app import serve
from site_engine.config import SiteConfig, VariantConfig
from site_engine.engine.loading import Loaded
from tests.support.site_fakes import CONTEXT_TOKENS, VOCABULARY, FakeEngine, FakeTokenizer
from tests.support.site_gateway import TOKEN, Gateway, Session, assign, serving
from wire import federation_pb2 as pb


def run(scenario: Callable[[Session], Awaitable[None]], **settings: Any) -> None:
    def load(_: SiteConfig) -> Loaded:
        return Loaded(FakeEngine(), FakeTokenizer(), "letters", "r1", CONTEXT_TOKENS, VOCABULARY)

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
            assert (await session.welcome(reads_models=True)).takes_orders
            await scenario(session)
            site.cancel()
            await asyncio.gather(site, return_exceptions=True)

    asyncio.run(whole())


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
        assert "knows no order 'sleep'" in await order(session, "sleep", "v")
        await session.served_models("letters")
        assert not session.received("models")

    run(scenario, models_from=(str(allowed),))


def test_without_models_from_no_order_loads_anything(tmp_path: Path) -> None:
    async def scenario(session: Session) -> None:
        error = await order(session, "add", "v", adapter=str(tmp_path))
        assert error.endswith("is not below models_from of this site, which is nothing")

    run(scenario)
