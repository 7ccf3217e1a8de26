"""A job in an engine's process goes as one in the site's own, and whatever is shared is freed."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from site_engine.core.training import AdapterShape, Failed, Recipe, Saved, TrainingEvent, TrainingOrder
from site_engine.engine import process_messages as pm
from site_engine.engine.engine_thread import EngineThread
from site_engine.engine.process_training import RemoteTraining, TrainingServer
from site_engine.engine_client import Listener
from site_engine.errors import TrainingRefused
from tests.support.engine_models import engine_for, family

torch.set_num_threads(1)
ROWS = b'{"prompt": "the answer", "completion": " is 42"}\n' * 4
ORDER = TrainingOrder("j", "acme", Recipe(3, 2, 0.01, shape=AdapterShape(2, 4.0)), ROWS, ROWS[:49])
WITHIN_S = 60.0


class Joined:
    """Both sides in this process: an engine's thread, and all messages as bytes between them."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.calls: list[pm.Message] = []
        self.lost = False  # what is sent to the engine comes to nothing
        self.events: list[TrainingEvent] = []
        self.remote = RemoteTraining(self._to_engine, self.loop)
        self.remote.on_event = lambda job_id, event: self.events.append(event)
        self.thread = EngineThread(engine_for(family("llama").served), self._post, time.monotonic)
        self.server = TrainingServer(self.thread.trainer, self._to_site)
        self.thread.start(Listener(_ignored, _ignored, _ignored, self.server.heard))

    def _post(self, call: Callable[[], None]) -> None:
        self.loop.call_soon_threadsafe(call)

    def _to_engine(self, message: pm.Message) -> None:
        self.calls.append(message)
        if self.lost:
            return
        decoded: Any = pm.decode_to_engine(pm.frame(message)[4:])
        self.server.handle(decoded)

    def _to_site(self, message: pm.Message) -> None:
        decoded: Any = pm.decode_from_engine(pm.frame(message)[4:])
        self._post(partial(self.remote.handle, decoded))

    async def train(self, order: TrainingOrder = ORDER) -> TrainingRefused | None:
        answer: asyncio.Future[TrainingRefused | None] = self.loop.create_future()
        self.remote.train(order, answer.set_result)
        return await answer

    async def stop(self) -> Saved | Failed | None:
        answer: asyncio.Future[Saved | Failed | None] = self.loop.create_future()
        self.remote.stop_training("j", answer.set_result)
        return await answer

    async def until(self, holds: Callable[[], object]) -> None:
        while not holds():  # noqa: ASYNC110 - events come from a thread
            await asyncio.sleep(0.005)

    async def ended(self) -> Saved:
        await self.until(lambda: any(isinstance(each, Saved) and each.last for each in self.events))
        return next(each for each in self.events if isinstance(each, Saved) and each.last)


def _ignored(_: object) -> None:
    pass


def shared() -> int:
    """Return how many pieces of content this process shares."""
    links = list(Path("/proc/self/fd").iterdir())
    return sum("memfd:training" in str(each.readlink()) for each in links if each.is_symlink())


def play(scenario: Callable[[Joined], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        joined = Joined()
        try:
            await asyncio.wait_for(scenario(joined), WITHIN_S)
            await asyncio.wait_for(joined.until(lambda: shared() == 0), WITHIN_S)
        finally:
            joined.thread.stop()

    asyncio.run(main())


def test_a_job_stopped_and_resumed_there_ends_as_a_whole_one_here() -> None:
    ends: list[Saved] = []

    async def there(joined: Joined) -> None:
        assert await joined.train() is None
        await joined.until(lambda: joined.events)
        stopped = await joined.stop()
        assert isinstance(stopped, Saved) and not stopped.last
        assert await joined.stop() is None
        joined.events.clear()
        assert await joined.train(replace(ORDER, snapshot=stopped.data)) is None
        ends.append(await joined.ended())

    async def here(joined: Joined) -> None:
        heard = joined.remote.on_event
        joined.thread.listener = Listener(_ignored, _ignored, _ignored, heard)
        joined.thread.trainer.train(ORDER, _ignored)
        ends.append(await joined.ended())

    play(there)
    play(here)
    assert ends[0] == ends[1]


def test_what_is_wrong_with_a_job_comes_back_as_it_is() -> None:
    async def scenario(joined: Joined) -> None:
        refused = await joined.train(replace(ORDER, data=b"{}\n", valid=b""))
        assert refused is not None and not refused.elsewhere
        assert "training_file: line 1" in str(refused)

    play(scenario)


def test_all_that_waits_when_the_process_is_lost_is_answered() -> None:
    async def scenario(joined: Joined) -> None:
        joined.lost = True
        training = asyncio.create_task(joined.train())
        stopping = asyncio.create_task(joined.stop())
        await joined.until(lambda: any(isinstance(each, pm.Train) for each in joined.calls))
        joined.remote.lose("it was killed")
        refused = await training
        assert refused is not None and refused.elsewhere and "it was killed" in str(refused)
        gone = Failed("the engine is lost: it was killed", elsewhere=True)
        assert await stopping == gone  # else the run would wait for an event that never comes
        refused = await joined.train()
        assert refused is not None and refused.elsewhere
        assert await joined.stop() == gone

    play(scenario)


def test_what_is_shared_of_a_job_without_memory_for_all_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    make, made = os.memfd_create, list[str]()

    def make_twice(name: str) -> int:
        made.append(name)
        if len(made) > 2:
            raise OSError(errno.ENOMEM, "no memory")
        return make(name)

    async def scenario(joined: Joined) -> None:
        monkeypatch.setattr(os, "memfd_create", make_twice)
        refused = await joined.train()
        assert refused is not None and refused.elsewhere and "no memory" in str(refused)
        assert shared() == 0

    play(scenario)


@pytest.mark.parametrize("what", [(os, "memfd_create"), (Path, "read_bytes")])
def test_why_a_stopped_job_has_no_state_is_answered(
    monkeypatch: pytest.MonkeyPatch, what: tuple[Any, str]
) -> None:
    def lacking(*_: object) -> Any:
        raise OSError(errno.ENOMEM, "no memory")

    async def scenario(joined: Joined) -> None:
        assert await joined.train(replace(ORDER, recipe=replace(ORDER.recipe, epochs=10_000))) is None
        with monkeypatch.context() as patched:
            patched.setattr(*what, lacking)
            failed = await joined.stop()
        assert isinstance(failed, Failed) and failed.elsewhere

    play(scenario)


def test_a_snapshot_that_cannot_be_read_ends_the_job_here() -> None:
    async def scenario(joined: Joined) -> None:
        joined.lost = True
        joined.remote.handle(pm.JobSaved("j", pm.SavedContent(1, 3, True, "/proc/0/fd/0")))
        await joined.until(lambda: joined.events)
        (failed,) = joined.events
        assert isinstance(failed, Failed) and failed.elsewhere

    play(scenario)
