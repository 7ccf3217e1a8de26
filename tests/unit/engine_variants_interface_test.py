"""Variants through the engine's thread and the engine's process: each order is answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from site_engine import messages as m
from site_engine.core.chain import Chain, Variant
from site_engine.core.remaining_curve import RemainingCurve
from site_engine.core.request import Lane, Output, Request, Sampling
from site_engine.engine.engine_thread import EngineThread
from site_engine.engine.process_client import EngineProcess
from site_engine.engine_client import Listener, Prepared
from site_engine.errors import NotServed, Reason, VariantRefused
from site_engine.native import NativeEngine
from site_engine.text.tokenize import PromptTokenizer
from tests.support.fake_engine_process import LETTERS, fake_settings, spawn_fake
from tests.support.site_fakes import VOCABULARY, FakeEngine, FakeTokenizer

WITHIN_S = 30.0


def assigned(model: str) -> m.Assign:
    return m.Assign(
        "a",
        "q",
        model,
        m.TextPrompt("abc"),
        Sampling(max_tokens=2),
        1,
        False,
        RemainingCurve.exactly(2),
        Lane.CHAT,
        0,
        None,
        "shop",
    )


@asynccontextmanager
async def engine(separate: bool) -> AsyncIterator[tuple[NativeEngine, asyncio.Event]]:
    core: Any
    loop = asyncio.get_running_loop()
    if separate:
        core = await EngineProcess.launch(fake_settings(), time.monotonic, spawn_fake)
        await core.ready()
        core.vocabulary = LETTERS
    else:
        core = EngineThread(FakeEngine(), loop.call_soon_threadsafe, time.monotonic)
    prompts = PromptTokenizer(FakeTokenizer(), VOCABULARY, loop.call_soon_threadsafe)
    client, ended = NativeEngine(prompts, core), asyncio.Event()

    def outputs(given: Sequence[Output]) -> None:
        if given[-1].finish is not None:
            ended.set()

    client.start(Listener(outputs, lambda seen: None, lambda reason: None))
    try:
        yield client, ended
    finally:
        await asyncio.to_thread(client.stop)


async def answer(call: Any, *given: Any) -> Any:
    """Return what the call replies with."""
    replied: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    call(*given, replied.set_result)
    return await asyncio.wait_for(replied, WITHIN_S)


@pytest.mark.parametrize("separate", [False, True])
def test_a_variant_is_added_answers_and_is_removed(separate: bool) -> None:
    async def run() -> None:
        async with engine(separate) as (client, ended):
            chain = await answer(client.add_variant, Variant("shop/support", adapter="/srv/support"))
            assert isinstance(chain, Chain)
            assert (chain.id, chain.own_bytes) == ("shop/support", 1_000)
            assert dict(client.variants) == {"shop/support": chain}
            request = Request("r", (97, 98), Sampling(max_tokens=2), chain="shop/support")
            assert await answer(partial(client.submit, Prepared((97, 98), "")), [request]) is None
            await asyncio.wait_for(ended.wait(), WITHIN_S)
            assert await answer(client.remove_variant, "shop/support") is None
            assert not client.variants
            late = Request("late", (97,), Sampling(max_tokens=2), chain="shop/support")
            refused = await answer(partial(client.submit, Prepared((97,), "")), [late])
            assert isinstance(refused, NotServed)
            assert refused.reason is Reason.MODEL_UNKNOWN

    asyncio.run(run())


@pytest.mark.parametrize("separate", [False, True])
def test_refusals_name_their_reason_and_leave_nothing(separate: bool) -> None:
    async def run() -> None:
        async with engine(separate) as (client, _):
            broken = await answer(client.add_variant, Variant("a", adapter="/srv/broken"))
            assert isinstance(broken, VariantRefused)
            assert "holds NaN" in str(broken)
            assert not client.variants
            await answer(client.add_variant, Variant("a", adapter="/srv/fine"))
            again = await answer(client.add_variant, Variant("a", adapter="/srv/fine"))
            assert "served already" in str(again)
            unknown = await answer(client.remove_variant, "b")
            assert "b is not served" in str(unknown)
            assert list(client.variants) == ["a"]

    asyncio.run(run())


def test_orders_that_wait_when_the_process_ends_are_refused() -> None:
    async def run() -> None:
        async with engine(separate=True) as (client, _):
            waiting = asyncio.gather(
                answer(client.add_variant, Variant("a", adapter="/srv/fine")),
                answer(client.remove_variant, "b"),
            )
            await asyncio.sleep(0)  # both are sent
            client._core.kill()  # type: ignore[attr-defined]
            for reply in await waiting:
                assert isinstance(reply, VariantRefused | Chain)
            assert isinstance(await answer(client.remove_variant, "a"), VariantRefused)

    asyncio.run(run())


def test_a_prompt_for_a_variant_is_prepared_for_its_chain() -> None:
    async def run() -> None:
        async with engine(separate=False) as (client, _):
            await answer(client.add_variant, Variant("shop/support", adapter="/srv/support"))
            prepared = await answer(client.prepare, assigned("shop/support"))
            base = await answer(client.prepare, assigned("letters"))
            assert (prepared.chain, base.chain) == ("shop/support", "")

    asyncio.run(run())
