"""Variants in several engine processes: in all of them alike, whichever are lost or sleep meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from site_engine.core.chain import Chain, Variant
from site_engine.core.request import Finish, Request, Sampling
from site_engine.errors import NotServed, Reason, VariantRefused
from tests.integration.engine_pool_test import asked, launched, launched_with
from tests.integration.pool_sleep_test import sleep, wake
from tests.support.fake_engine_process import fake_settings
from tests.support.heard_engine import WITHIN_S, run


def test_variants_are_in_every_engine_and_in_one_that_is_started_again() -> None:
    async def scenario() -> None:
        async with launched() as heard:

            async def added(variant: Variant) -> Chain | VariantRefused:
                answer: asyncio.Future[Chain | VariantRefused] = asyncio.get_running_loop().create_future()
                heard.pool.add_variant(variant, answer.set_result)
                return await asyncio.wait_for(answer, WITHIN_S)

            assert isinstance(await added(Variant("bad", "/broken")), VariantRefused)
            assert isinstance(await added(Variant("acme", "/acme")), Chain)
            first, second = heard.pool.pids.values()
            os.kill(first, signal.SIGKILL)
            await heard.lost(first)
            await heard.serving(2)
            os.kill(second, signal.SIGKILL)  # then none is left that was told of the variant as it was added
            await heard.lost(second)
            answer: asyncio.Future[NotServed | None] = asyncio.get_running_loop().create_future()
            request = Request("r", (97, 98), Sampling(max_tokens=3), chain="acme")
            heard.pool.submit([request], answer.set_result)
            assert await asyncio.wait_for(answer, WITHIN_S) is None

            def removed(found: VariantRefused | None) -> None:
                gone.append(found)
                heard.changed.set()

            gone: list[VariantRefused | None] = []
            heard.pool.remove_variant("acme", removed)
            await heard.until(lambda: gone)
            assert gone == [None]

    run(scenario())


def test_what_a_variant_has_begun_stays_where_it_is_once_the_variant_is_removed() -> None:
    """No other engine would take it. A variant that sleeps is removed, too, and what it has begun ends."""

    async def scenario() -> None:
        async with launched(iteration_floor_s=0.05) as heard:
            added: asyncio.Future[Chain | VariantRefused] = asyncio.get_running_loop().create_future()
            heard.pool.add_variant(Variant("acme", "/acme"), added.set_result)
            assert isinstance(await asyncio.wait_for(added, WITHIN_S), Chain)
            await heard.submit("a", chain="acme", max_tokens=50)
            await heard.until(lambda: heard.text("a"))
            source = heard.pool.requests.where("a")
            assert source is not None
            removed = asked(partial(heard.pool.remove_variant, "acme"))
            await asyncio.sleep(0)
            assert not heard.pool.requests.move("a", 1 - source)
            assert await asyncio.wait_for(removed, WITHIN_S) is None
            assert not heard.pool.requests.move("a", 1 - source)
            await heard.until(lambda: heard.finishes("a"))
            assert (heard.finishes("a"), heard.text("a")) == ([Finish.LENGTH], ("abc" * 50)[:50])

    run(scenario())


@pytest.mark.parametrize("loss", ["by sleeping", "of an engine"])
def test_a_variant_that_an_engine_refuses_as_it_starts_again_costs_the_others_nothing(
    tmp_path: Path, loss: str
) -> None:
    """It is served no more, in no engine: the base and other variants go on everywhere."""

    async def scenario() -> None:
        async with launched() as heard:
            changing = tmp_path / "changing"
            changing.mkdir()
            for variant in (Variant("changing", str(changing)), Variant("other", "/other")):
                added: asyncio.Future[Chain | VariantRefused] = asyncio.get_running_loop().create_future()
                heard.pool.add_variant(variant, added.set_result)
                assert isinstance(await asyncio.wait_for(added, WITHIN_S), Chain)
            (changing / "broken").touch()
            if loss == "by sleeping":
                await sleep(heard)
                assert await wake(heard) == ""
            else:
                pid = heard.pool.pids[0]
                os.kill(pid, signal.SIGKILL)
                await heard.lost(pid)
                await heard.serving(2)
            assert [(name, str(reason)) for name, reason in heard.refused] == [
                ("changing", f"changing: {changing} holds NaN")
            ]
            for at in range(4):
                assert await heard.submit(f"other {at}", chain="other") is None
                answer = await heard.submit(f"changing {at}", chain="changing")
                assert isinstance(answer, NotServed)
                assert answer.reason is Reason.MODEL_UNKNOWN
            assert (
                await asyncio.wait_for(asked(partial(heard.pool.remove_variant, "changing")), WITHIN_S)
                is None
            )

    run(scenario())


def test_a_variant_that_an_engine_refuses_as_it_starts_is_not_kept_by_one_that_sleeps_on(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        says, changing = tmp_path / "says", tmp_path / "changing"
        changing.mkdir()
        sleeper = fake_settings(sleep="host", served_model=str(says))
        async with launched_with([sleeper, fake_settings(sleep="host")]) as heard:

            async def added() -> Chain | VariantRefused:
                variant = Variant("changing", str(changing))
                return await asyncio.wait_for(asked(partial(heard.pool.add_variant, variant)), WITHIN_S)

            assert isinstance(await added(), Chain)
            pid = heard.pool.pids[1]
            await sleep(heard)
            os.kill(pid, signal.SIGKILL)
            (changing / "broken").touch()
            says.write_text("cuda:0 has 5 bytes free, which is too little")
            assert await wake(heard) == "cuda:0 has 5 bytes free, which is too little"
            assert [name for name, _ in heard.refused] == ["changing"]
            (changing / "broken").unlink()
            says.unlink()
            assert await wake(heard) == ""
            assert isinstance(await added(), Chain)

    run(scenario())
