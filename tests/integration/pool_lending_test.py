"""Engines of several pools on one device: those awake hold memory of those asleep, which get it back to wake,
whichever process ends meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from site_engine.core.request import Finish
from site_engine.pool import lending
from tests.integration.engine_pool_test import Heard, asked, launched_with
from tests.support.fake_engine_process import FREED_BYTES, FULL, fake_settings, holds
from tests.support.heard_engine import WITHIN_S, run


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "LOOK_EVERY_S", 0.02)


@asynccontextmanager
async def bases(folder: Path, count: int) -> AsyncIterator[list[Heard]]:
    async with AsyncExitStack() as stack:
        shared = {"devices": ("cpu",), "sleep": "host", "share_sleeping_memory": True, "kv_tokens": 64}
        settings = [fake_settings(served_model=str(folder / f"base{at}"), **shared) for at in range(count)]
        each = (stack.enter_async_context(launched_with([one])) for one in settings)
        yield list(await asyncio.gather(*each))


async def sleep(heard: Heard) -> None:
    assert await asyncio.wait_for(asked(heard.pool.sleeping.sleep), WITHIN_S) == ""


async def wake(heard: Heard) -> str:
    return await asyncio.wait_for(asked(heard.pool.sleeping.wake), WITHIN_S)


async def held(folder: Path, size_bytes: int) -> None:
    """Wait until the engines hold so much."""
    async with asyncio.timeout(WITHIN_S):
        while sum(each for each in holds(folder) if each > 0) != size_bytes:  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0.005)


async def answers(heard: Heard, name: str) -> None:
    await heard.submit(name, max_tokens=9)
    await heard.until(lambda: heard.finishes(name))
    assert (heard.finishes(name), heard.text(name)) == ([Finish.LENGTH], "abcabcabc")


def pid_of(heard: Heard) -> int:
    (pid,) = heard.pool.pids.values()
    return pid


def test_memory_is_lent_while_a_base_sleeps_and_back_before_it_wakes_whoever_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with bases(tmp_path, 3) as (first, second, third):
            await sleep(third)
            await held(tmp_path, FREED_BYTES)  # by both that are awake
            await sleep(second)
            await held(tmp_path, 2 * FREED_BYTES)  # of both that sleep

            (tmp_path / f"stranger.{os.getpid()}").write_text("1")
            assert await wake(third) == FULL
            await held(tmp_path, 2 * FREED_BYTES + 1)  # it sleeps on, and lends again
            (tmp_path / f"stranger.{os.getpid()}").unlink()

            os.kill(pid_of(first), signal.SIGSTOP)
            monkeypatch.setattr(lending, "GIVEN_BACK_WITHIN_S", 0.05)
            assert await wake(third) == "others on auto have not given its memory back in time"
            os.kill(pid_of(first), signal.SIGCONT)
            monkeypatch.setattr(lending, "GIVEN_BACK_WITHIN_S", WITHIN_S)
            await held(tmp_path, 2 * FREED_BYTES)

            assert await wake(third) == ""
            await held(tmp_path, FREED_BYTES)
            await answers(third, "a")
            await killed_while_others_wait(first, second, third, tmp_path)

    run(scenario())


async def killed_while_others_wait(first: Heard, second: Heard, third: Heard, folder: Path) -> None:
    """Wake one while the only one awake is killed, which holds all; then one that is killed asleep."""
    await sleep(third)
    await held(folder, 2 * FREED_BYTES)
    os.kill(pid_of(first), signal.SIGSTOP)
    waking = asyncio.create_task(wake(second))
    await asyncio.sleep(0)
    os.kill(pid_of(first), signal.SIGKILL)
    assert await waking == ""
    await answers(second, "b")
    await held(folder, FREED_BYTES)
    assert await wake(third) == ""
    await answers(third, "c")
    pid = pid_of(third)
    await sleep(third)
    await held(folder, FREED_BYTES)
    os.kill(pid, signal.SIGKILL)
    assert await wake(third) == ""
    assert pid_of(third) != pid
    await held(folder, 0)
    await answers(third, "d")


ALONE = """
import asyncio
from site_engine.pool import lending

async def hold(size_bytes):
    print(size_bytes, flush=True)

async def main():
    {side}
    await asyncio.Event().wait()

asyncio.run(main())
"""


@contextmanager
def site(side: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process with one side of the lending; it ends with the context, however that ends."""
    command = [sys.executable, "-c", ALONE.format(side=side)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_lease_ends_with_the_site_of_either_side() -> None:
    device = f"test-{os.getpid()}"

    async def scenario() -> None:
        told = asyncio.Queue[int]()
        borrower = lending.Borrower(device, told.put)
        with site(f"lender = lending.Lender({device!r}, 700)") as lends:
            assert await asyncio.wait_for(told.get(), WITHIN_S) == 700
            lends.kill()
        assert await asyncio.wait_for(told.get(), WITHIN_S) == 0
        borrower.close()
        with site(f"borrower = lending.Borrower({device!r}, hold)") as borrows:
            assert borrows.stdout is not None
            lender = lending.Lender(device, 700)
            line = await asyncio.wait_for(asyncio.to_thread(borrows.stdout.readline), WITHIN_S)
            assert (line, lender.held_bytes) == ("700\n", 700)
            borrows.kill()
        assert await lender.take_back()
        assert lender.awaits_end  # its engine ends a moment later
        lender.close()

    run(scenario())
