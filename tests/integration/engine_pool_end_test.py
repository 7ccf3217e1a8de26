"""A pool that ends leaves no engine's process, whatever starts meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

import pytest

from site_engine.engine.process_client import EngineProcess
from site_engine.pool.replica import Replica
from tests.integration.engine_pool_test import launched
from tests.support.child_processes import is_there
from tests.support.heard_engine import WITHIN_S, run

LOOKS_WITHIN_S = 0.5
"""In which a pool that did not ask its event loop would have looked which processes there are."""


def test_an_engine_that_has_just_started_again_ends_with_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with launched() as heard:
            pool, begin, looked = heard.pool, Replica.begin, threading.Event()
            ending = threading.Thread(target=pool.stop)
            started: asyncio.Future[int] = asyncio.get_running_loop().create_future()

            def begin_late(replica: Replica, process: EngineProcess, *more: Any) -> None:
                monkeypatch.setattr(replica.process, "kill", looked.set)
                ending.start()
                looked.wait(LOOKS_WITHIN_S)
                begin(replica, process, *more)
                started.set_result(process.pid)

            monkeypatch.setattr(Replica, "begin", begin_late)
            os.kill(next(iter(pool.pids.values())), signal.SIGKILL)
            pid = await asyncio.wait_for(started, WITHIN_S)
            await asyncio.to_thread(ending.join, WITHIN_S)
            assert not ending.is_alive()
            there = is_there(pid, as_zombie=False)
            if there:  # else the event loop would not close
                os.kill(pid, signal.SIGKILL)
            assert not there

    run(scenario())


def test_an_engine_that_is_lost_while_its_pool_ends_is_not_started_again() -> None:
    async def scenario() -> None:
        async with launched() as heard:
            pid = next(iter(heard.pool.pids.values()))
            heard.pool._stopping = True  # as `stop` does first
            os.kill(pid, signal.SIGKILL)
            await heard.lost(pid)
            assert len(heard.pool.pids) == 1
            assert not heard.pool._tasks

    run(scenario())
