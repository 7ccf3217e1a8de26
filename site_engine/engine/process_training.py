"""Training by an engine in a process of its own: orders to it, events and replies from it.

Files and snapshots have up to gigabytes, behind which no token may wait: they don't cross in messages. One
process puts them in memory of its own that the other reads, by a path below /proc.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

from site_engine.core.training import Failed, Saved, StepDone, TrainingEvent, TrainingOrder
from site_engine.engine import process_messages as pm
from site_engine.engine_client import TrainingEngine
from site_engine.errors import TrainingRefused

log = logging.getLogger(__name__)

NO_ROOM = Failed("there is no memory for its snapshot", elsewhere=True)


class SharedContent:
    """Content in memory, which a process of the same user reads at `path` until `close`. Linux only."""

    def __init__(self, content: bytes) -> None:
        """Copy the content. Raises OSError if there is no memory for it."""
        self._descriptor = os.memfd_create("training")
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        try:
            with open(self._descriptor, "wb", closefd=False) as file:
                file.write(content)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._descriptor)


class _Asked(NamedTuple):
    """A job that waits for the engine's answer."""

    contents: list[SharedContent]
    reply: Callable[[TrainingRefused | None], None]


class RemoteTraining:
    """The site's side, on the event loop's thread. `on_event` receives the events of jobs by job id."""

    def __init__(self, send: Callable[[pm.Message], None], loop: asyncio.AbstractEventLoop) -> None:
        self.on_event: Callable[[str, TrainingEvent], None] = lambda job_id, event: None
        self._send, self._loop = send, loop
        self._next_call = count(1)
        self._asked: dict[int, _Asked] = {}
        self._stopping: dict[int, Callable[[Saved | Failed | None], None]] = {}
        self._lost = ""
        self._files = ThreadPoolExecutor(1, "training")  # one: what is stored stays in its order

    def train(self, order: TrainingOrder, reply: Callable[[TrainingRefused | None], None]) -> None:
        def share() -> list[SharedContent]:
            with ExitStack() as made:  # without memory for all of them none stays
                contents = [
                    made.enter_context(closing(SharedContent(each)))
                    for each in (order.data, order.valid, order.snapshot)
                ]
                made.pop_all()
            return contents

        def ask(sharing: asyncio.Future[list[SharedContent]]) -> None:
            if (error := sharing.exception()) is not None:
                reply(TrainingRefused(f"no memory for its files: {error}", elsewhere=True))
                return
            call, contents = next(self._next_call), sharing.result()
            self._asked[call] = _Asked(contents, reply)
            paths = [each.path for each in contents]
            self._send(pm.Train(call, order.job_id, order.tenant, order.recipe, paths))
            if self._lost:
                self.lose(self._lost)

        self._loop.run_in_executor(self._files, share).add_done_callback(ask)

    def stop_training(self, job_id: str, reply: Callable[[Saved | Failed | None], None]) -> None:
        if self._lost:
            reply(self._gone())
            return
        call = next(self._next_call)
        self._stopping[call] = reply
        self._send(pm.StopTraining(call, job_id))

    def handle(self, message: pm.FromTraining) -> None:
        match message:
            case pm.TrainAnswered():
                asked = self._asked.pop(message.call)
                for each in asked.contents:
                    each.close()
                refusal, elsewhere = message.refusal, message.elsewhere
                asked.reply(TrainingRefused(refusal, elsewhere=elsewhere) if refusal else None)
            case pm.TrainingStopped():
                reply = self._stopping.pop(message.call)
                if message.saved is None:
                    reply(message.failed)
                else:
                    self._read(message.saved, reply)
            case pm.StepTrained():
                self.on_event(message.job_id, message.step)
            case pm.JobFailed():
                self.on_event(message.job_id, message.failed)
            case pm.JobSaved():
                self._read(message.saved, partial(self.on_event, message.job_id))

    def lose(self, reason: str) -> None:
        """Answer all that waits: the process is lost."""
        self._lost = reason
        asked, self._asked = self._asked, {}
        stopping, self._stopping = self._stopping, {}
        for each in asked.values():
            for content in each.contents:
                content.close()
            each.reply(TrainingRefused(f"the engine is lost: {reason}", elsewhere=True))
        for reply in stopping.values():
            reply(self._gone())

    def _gone(self) -> Failed:
        return Failed(f"the engine is lost: {self._lost}", elsewhere=True)

    def _read(self, saved: pm.SavedContent, use: Callable[[Saved | Failed], None]) -> None:
        """Read a snapshot, and have the engine free it; use why it can't be read."""

        def done(reading: asyncio.Future[bytes]) -> None:
            self._send(pm.Taken(saved.number))
            if (error := reading.exception()) is not None:
                log.error("a snapshot could not be read: %s", error)
                use(Failed("its snapshot could not be read", elsewhere=True))
            else:
                use(Saved(saved.step, saved.last, reading.result()))

        self._loop.run_in_executor(self._files, Path(saved.path).read_bytes).add_done_callback(done)


class TrainingServer:
    """The engine's side. `send` may be called on any thread; so may be what is called here."""

    def __init__(self, engine: TrainingEngine, send: Callable[[pm.Message], None]) -> None:
        self._engine = engine
        self._send = send
        self._next_number = count(1)
        self._shared: dict[int, SharedContent] = {}  # that the site has not read
        self._files = ThreadPoolExecutor(1, "training")  # one: a job that is stopped was begun before

    def handle(self, message: pm.ToTraining) -> None:
        match message:
            case pm.Train():
                self._files.submit(self._train, message)
            case pm.StopTraining(call=call, job_id=job_id):
                stopped = partial(self._stopped, call)
                self._files.submit(self._engine.stop_training, job_id, stopped)
            case pm.Taken(number=number):
                self._shared.pop(number).close()

    def heard(self, job_id: str, event: TrainingEvent) -> None:
        def saved(content: pm.SavedContent | None) -> pm.Message:
            return pm.JobFailed(job_id, NO_ROOM) if content is None else pm.JobSaved(job_id, content)

        if isinstance(event, Saved):
            self._files.submit(self._share, event, saved)
        elif isinstance(event, StepDone):
            self._send(pm.StepTrained(job_id, event))
        else:
            self._send(pm.JobFailed(job_id, event))

    def _train(self, message: pm.Train) -> None:
        def reply(refused: TrainingRefused | None) -> None:
            refusal = "" if refused is None else str(refused)
            elsewhere = refused is not None and refused.elsewhere
            self._send(pm.TrainAnswered(message.call, refusal, elsewhere))

        try:
            contents = [Path(each).read_bytes() for each in message.contents]
        except (OSError, MemoryError) as exc:
            reply(TrainingRefused(f"its files could not be read: {exc}", elsewhere=True))
            return
        order = TrainingOrder(message.job_id, message.tenant, message.recipe, *contents)
        self._engine.train(order, reply)

    def _stopped(self, call: int, saved: Saved | Failed | None) -> None:
        def stopped(content: pm.SavedContent | None) -> pm.Message:
            return pm.TrainingStopped(call, content, NO_ROOM if content is None else None)

        if isinstance(saved, Saved):
            self._files.submit(self._share, saved, stopped)
        else:
            self._send(pm.TrainingStopped(call, None, saved))

    def _share(self, saved: Saved, message: Callable[[pm.SavedContent | None], pm.Message]) -> None:
        """Put a snapshot where the site reads it, and send the message that says where."""
        try:
            content = SharedContent(saved.data)
        except OSError as exc:
            log.error("there is no memory for a snapshot: %s", exc)
            self._send(message(None))
        else:
            number = next(self._next_number)
            self._shared[number] = content
            self._send(message(pm.SavedContent(number, saved.step, saved.last, content.path)))
