"""Engines that keep their weights in host memory while their pool sleeps: their processes stay, or are
started anew where they are lost.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
from pathlib import Path

from site_engine.core.request import Finish
from tests.integration.engine_pool_test import Heard, asked, launched, launched_with
from tests.support.child_processes import is_there
from tests.support.fake_engine_process import fake_settings
from tests.support.heard_engine import WITHIN_S, run


async def answered(heard: Heard, name: str) -> None:
    assert await heard.submit(name, max_tokens=9) is None
    await heard.until(lambda: heard.finishes(name))
    assert (heard.finishes(name), heard.text(name)) == ([Finish.LENGTH], "abcabcabc")


async def sleep(heard: Heard) -> None:
    assert await asyncio.wait_for(asked(heard.pool.sleeping.sleep), WITHIN_S) == ""
    assert heard.pool.pids == {}


async def wake(heard: Heard) -> str:
    return await asyncio.wait_for(asked(heard.pool.sleeping.wake), WITHIN_S)


def test_the_processes_stay_and_their_figures_go_on() -> None:
    async def scenario() -> None:
        async with launched(sleep="host") as heard:
            pids = heard.pool.pids
            for turn in range(2):
                await answered(heard, f"before {turn}")
                await sleep(heard)
                assert all(is_there(pid, as_zombie=False) for pid in pids.values())
                heard.pool.request_load()
                figures = heard.loads[-1].figures
                assert figures.kv_free_tokens == heard.facts.kv_tokens
                assert [each.lost for each in figures.devices] == [False, False]
                assert await wake(heard) == ""
                assert heard.pool.pids == pids
                await answered(heard, f"after {turn}")
            await heard.until(lambda: heard.loads[-1].figures.tokens_total == 4 * 9)
            totals = [each.figures.tokens_total for each in heard.loads]
            assert totals == sorted(totals)
            assert heard.broken == []

    run(scenario())


def test_an_engine_without_memory_to_wake_sleeps_on_with_all_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        says = tmp_path / "says"
        ready = fake_settings(sleep="host")
        async with launched_with([ready, fake_settings(sleep="host", served_model=str(says))]) as heard:
            pids = heard.pool.pids
            await sleep(heard)
            says.write_text("cuda:1 has 5 bytes free, which is too little")
            assert await wake(heard) == "cuda:1 has 5 bytes free, which is too little"
            assert (heard.pool.pids, heard.pool.sleeping.asleep) == ({}, True)
            says.unlink()
            assert await wake(heard) == ""
            assert heard.pool.pids == pids
            await answered(heard, "a")

    run(scenario())


def test_an_engine_that_is_killed_asleep_is_started_anew_when_the_pool_wakes() -> None:
    async def scenario() -> None:
        async with launched(sleep="host") as heard:
            pids = heard.pool.pids
            await sleep(heard)
            ended = os.pidfd_open(pids[0])
            os.kill(pids[0], signal.SIGKILL)
            await asyncio.to_thread(select.select, [ended], [], [], WITHIN_S)
            os.close(ended)
            assert await wake(heard) == ""
            assert heard.pool.pids[1] == pids[1]
            assert heard.pool.pids[0] != pids[0]
            await answered(heard, "a")
            await heard.until(lambda: [each.losses for each in heard.loads[-1].figures.devices] == [1, 0])
            assert heard.broken == []

    run(scenario())


def test_a_lone_engine_that_is_killed_as_it_wakes_is_started_anew(tmp_path: Path) -> None:
    async def scenario() -> None:
        says = tmp_path / "says"
        async with launched_with([fake_settings(sleep="host", served_model=str(says))]) as heard:
            (pid,) = heard.pool.pids.values()
            await sleep(heard)
            says.write_text("hang")
            waking = asked(heard.pool.sleeping.wake)
            await asyncio.sleep(0)
            os.kill(pid, signal.SIGKILL)
            assert await asyncio.wait_for(waking, WITHIN_S) == ""
            assert list(heard.pool.pids.values()) != [pid]
            await answered(heard, "a")
            assert heard.broken == []

    run(scenario())


def test_a_pool_ends_while_its_engines_sleep() -> None:
    async def scenario() -> None:
        async with launched(sleep="host") as heard:
            pids = heard.pool.pids
            await sleep(heard)
        assert not any(is_there(pid, as_zombie=False) for pid in pids.values())

    run(scenario())
