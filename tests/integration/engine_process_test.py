"""The engine's process and the site's: the end of each is noticed by the other, and nothing is left of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from site_engine.core.request import Finish, Request, Sampling
from site_engine.engine.engine_thread import STALLED_AFTER_S
from site_engine.engine.process_client import EngineProcess
from site_engine.engine.process_spawn import spawn
from site_engine.errors import ConfigError, NotServed, Reason
from tests.support.child_processes import child_processes, is_there
from tests.support.fake_engine_process import LETTERS, UNSERVABLE, fake_settings, spawn_fake
from tests.support.heard_engine import WITHIN_S, HeardEngine, run
from tests.support.site_fakes import FakeClock

SLOW_S = 3600.0
PARENT = """
import asyncio, sys, time
from site_engine.engine.process_client import EngineProcess
from tests.support.fake_engine_process import spawn_fake, fake_settings
async def main():
    process = await EngineProcess.launch(fake_settings(), time.monotonic, spawn_fake)
    await process.ready()
    print(process.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


class Heard(HeardEngine):
    """An engine's process, and everything that it reports."""

    @property
    def process(self) -> EngineProcess:
        return self.engine


@asynccontextmanager
async def launched(clock: Callable[[], float] = time.monotonic, **settings: object) -> AsyncIterator[Heard]:
    process = await EngineProcess.launch(fake_settings(**settings), clock, spawn_fake)
    heard = Heard(process)
    try:
        await process.ready()
        process.vocabulary = LETTERS
        process.start(heard.listener())
        yield heard
    finally:
        await asyncio.to_thread(process.stop)


async def gone(pid: int, *, reaped: bool = True) -> None:
    """Wait until there is no such process. `reaped`: nor what is left of one that nobody has waited for."""
    async with asyncio.timeout(WITHIN_S):
        while is_there(pid, as_zombie=reaped):  # noqa: ASYNC110 - nothing reports the end of another's child
            await asyncio.sleep(0.01)


def test_an_engine_that_has_stopped_keeps_no_connection_though_its_end_was_not_read() -> None:
    async def scenario() -> None:
        async with launched() as heard:
            transport = heard.process._transport
            transport.pause_reading()
            await asyncio.to_thread(heard.process.stop)
            assert transport.is_closing()

    run(scenario())


def test_a_process_that_is_killed_fails_its_requests_and_is_reported_once() -> None:
    async def scenario() -> None:
        async with launched(slots=1, iteration_floor_s=0.2) as heard:
            await heard.submit("runs", max_tokens=60)
            await heard.submit("waits", max_tokens=60)
            await heard.until(lambda: len(heard.text("runs")) >= 3)
            os.kill(heard.process.pid, signal.SIGKILL)
            await heard.until(lambda: heard.broken)
            assert heard.finishes("runs") == heard.finishes("waits") == [Finish.FAILED]
            failed = heard.outputs[-2]
            assert str(heard.process.pid) in failed.error
            assert failed.completion_tokens == len(heard.text("runs")) >= 3
            late = await heard.submit("late")
            assert isinstance(late, NotServed)
            assert late.reason is Reason.INTERNAL
            decided: list[list[bool]] = []
            heard.process.release([("waits",)], decided.append)
            assert decided == [[False]]
            heard.process.cancel(["runs"])
            heard.process.request_load()
            await gone(heard.process.pid)
        assert len(heard.broken) == 1

    run(scenario())


def test_a_process_whose_start_is_given_up_has_ended() -> None:
    async def scenario() -> None:
        before = child_processes()
        launching = asyncio.create_task(EngineProcess.launch(fake_settings(), time.monotonic, spawn_fake))
        await asyncio.sleep(0)
        assert child_processes() != before
        launching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await launching
        assert child_processes() == before

    run(scenario())


def test_what_waits_for_an_answer_when_the_process_dies_is_refused() -> None:
    async def scenario() -> None:
        async with launched() as heard:
            os.kill(heard.process.pid, signal.SIGSTOP)
            waiting = asyncio.create_task(heard.submit("r"))
            decided: list[list[bool]] = []
            heard.process.release([("r",), ("nobody",)], decided.append)
            await asyncio.sleep(0)
            os.kill(heard.process.pid, signal.SIGKILL)
            answer = await waiting
            assert isinstance(answer, NotServed)
            assert heard.finishes("r") == []
            assert decided == [[False, False]]

    run(scenario())


def test_a_process_that_says_nothing_has_stalled_until_it_goes_on() -> None:
    async def scenario() -> None:
        clock = FakeClock()
        async with launched(clock) as heard:
            os.kill(heard.process.pid, signal.SIGSTOP)
            await asyncio.sleep(0.05)  # what it had sent is read
            said = len(heard.loads)
            waited_s = 0.0
            while not heard.process.stalled_s():
                clock.now, waited_s = clock.now + 0.25, waited_s + 0.25
            assert STALLED_AFTER_S < waited_s <= STALLED_AFTER_S + 1.0
            os.kill(heard.process.pid, signal.SIGCONT)
            heard.process.request_load()
            await heard.until(lambda: len(heard.loads) > said)
            assert heard.process.stalled_s() == 0.0
            assert heard.broken == []

    run(scenario())


def test_signals_are_for_the_sites_process() -> None:
    async def scenario() -> None:
        async with launched() as heard:
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(heard.process.pid, number)
            await heard.submit("r", max_tokens=5)
            await heard.until(lambda: heard.finishes("r"))
            assert heard.text("r") == "abcab"
        assert heard.process._process.returncode == 0
        assert heard.broken == []

    run(scenario())


def test_a_stop_string_ends_an_answer_at_once_and_frees_its_slot() -> None:
    async def scenario() -> None:
        async with launched(slots=1, iteration_floor_s=0.002) as heard:
            await heard.submit("r", "abcdefgh", max_tokens=50, stop=("ef",))
            await heard.until(lambda: heard.finishes("r"))
            last = heard.outputs[-1]
            assert (heard.text("r"), last.finish, last.stop_sequence) == ("abcd", Finish.STOP, "ef")
            assert last.completion_tokens == 6
            await heard.submit("next", max_tokens=3)
            await heard.until(lambda: heard.finishes("next"))
            assert heard.finishes("r") == [Finish.STOP]
            assert heard.text("next") == "abc"

    run(scenario())


def test_an_answer_that_its_delivered_text_has_ended_is_not_released() -> None:
    """It goes on from another site, and has its end when the engine admits it, before that is asked more."""

    async def scenario() -> None:
        async with launched(slots=1, iteration_floor_s=0.002) as heard:
            await heard.submit("first", max_tokens=40)
            await heard.until(lambda: heard.text("first"))
            sampling = Sampling(max_tokens=9, stop=("bc",))
            decided: asyncio.Future[list[bool]] = asyncio.get_running_loop().create_future()
            heard.process.submit([Request("r", (97, 98, 99), sampling, resumed=(97, 98, 99))], lambda _: None)
            heard.process.release([["r"]], decided.set_result)
            assert await asyncio.wait_for(decided, WITHIN_S) == [False]
            assert (heard.text("r"), heard.finishes("r")) == ("a", [Finish.STOP])
            await heard.submit("next", max_tokens=3)
            await heard.until(lambda: heard.finishes("next"))
            assert heard.finishes("r") == [Finish.STOP]

    run(scenario())


def test_a_model_that_cannot_be_loaded_is_named() -> None:
    async def scenario() -> None:
        process = await EngineProcess.launch(fake_settings(model=UNSERVABLE), time.monotonic, spawn_fake)
        with pytest.raises(ConfigError, match="this model cannot be served"):
            await process.ready()
        await gone(process.pid)

    run(scenario())


def test_a_process_that_is_ready_has_read_what_a_first_grammar_needs() -> None:
    async def scenario() -> None:
        process = await EngineProcess.launch(fake_settings(), time.monotonic, spawn_fake)
        try:
            described = await process.described()
            facts = await process.ready()
            assert (described.context_tokens, described.vocab_size, described.eos_token_ids) == (
                facts.context_tokens,
                facts.vocab_size,
                facts.eos_token_ids,
            )
            (part,) = process.start_parts
            assert part.name == "engine's grammars" and part.began_s <= part.ended_s <= time.monotonic()
        finally:
            await asyncio.to_thread(process.stop)

    asyncio.run(scenario())


def test_a_process_that_dies_while_it_loads_is_named() -> None:
    async def scenario() -> None:
        ending = partial(spawn, (sys.executable, "-c", "import sys; sys.exit(3)"))
        process = await EngineProcess.launch(fake_settings(), time.monotonic, ending)
        with pytest.raises(ConfigError, match="could not be loaded"):
            await process.ready()
        await gone(process.pid)

    run(scenario())


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_nothing_is_left_of_an_engine_whose_site_is_killed() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=environment) as parent:
        try:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            assert Path(f"/proc/{pid}").exists()
        finally:
            parent.kill()
    run(gone(pid, reaped=False))
