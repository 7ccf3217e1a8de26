"""Train in the engine of a thread: jobs begin and end between two iterations.

Reading a job's files and writing its snapshots take longer and run on the loader thread, alternating with the
iterations.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from site_engine.core.training import Failed, Saved, StepDone, TrainingEvent, TrainingOrder
from site_engine.engine.engine_interface import Engine
from site_engine.errors import TrainingRefused, describe

if TYPE_CHECKING:
    from site_engine.training.snapshot import Snapshot

log = logging.getLogger(__name__)

MAX_UNSAVED = 3
"""Most snapshots of a job that wait to be written, each in device memory. The oldest is dropped beyond it."""


class ThreadTraining:
    """The `TrainingEngine` of an engine thread. `has_begun`: whether it has ever had a job."""

    def __init__(
        self,
        engine: Engine,
        load: Callable[[Callable[[], None]], object],
        enqueue: Callable[[Callable[[], None]], None],
        call: Callable[[Callable[[], None]], None],
    ) -> None:
        """`load` runs a function on the loader thread, alternating with iterations. `enqueue` runs it on the
        engine's thread between two iterations. `call` posts it to the event loop at the end of a turn.
        """
        self.has_begun = False
        self._engine = engine
        self._load = load
        self._enqueue = enqueue
        self._call = call
        self._unsaved: dict[str, deque[tuple[Snapshot, bool]]] = {}  # by job; whether each is its last

    def train(self, order: TrainingOrder, reply: Callable[[TrainingRefused | None], None]) -> None:
        """Begin a job, read beside the iterations; reply None, or why it is not trained here."""

        def load() -> None:
            try:
                begin = self._engine.training.load(order)
            except TrainingRefused as refused:
                self._enqueue(partial(self._call, partial(reply, refused)))
            except Exception as exc:
                log.exception("job %s could not be read", order.job_id)
                refusal = TrainingRefused(f"the job could not be read: {describe(exc)}", elsewhere=True)
                self._enqueue(partial(self._call, partial(reply, refusal)))
            else:
                self._enqueue(partial(run, begin))

        def run(begin: Callable[[], None]) -> None:
            answer = None
            try:
                begin()
                self.has_begun = True
            except TrainingRefused as refused:
                answer = refused
            self._call(partial(reply, answer))

        self._load(load)

    def stop_training(self, job_id: str, reply: Callable[[Saved | Failed | None], None]) -> None:
        """End a job without an event; reply with its last state, why that is lost, or None without a job."""

        def run() -> None:
            try:
                stopped = self._engine.training.stop(job_id)
            except Exception as exc:  # noqa: BLE001 - what a job lacks must not cost what is served
                self._call(partial(reply, _unsaved(exc)))
                return
            if stopped is None:
                self._call(partial(reply, None))
            else:
                self._load(partial(self._save, reply, stopped, last=False))

        self._enqueue(run)

    def pass_on(self, on_event: Callable[[str, TrainingEvent], None]) -> None:
        """Pass on what has happened to jobs since the last call. Called on the engine's thread."""
        for job_id, event in self._engine.training.take_events():
            ended = job_id not in self._engine.training.jobs
            if isinstance(event, StepDone | Failed):
                self._call(partial(on_event, job_id, event))
            else:  # megabytes, which take longer to write than the time between two tokens
                unsaved = self._unsaved.setdefault(job_id, deque(maxlen=MAX_UNSAVED))
                unsaved.append((event, ended))
                self._load(partial(self._save_oldest, unsaved, partial(on_event, job_id)))
            if ended:
                self._unsaved.pop(job_id, None)

    def _save_oldest(
        self, unsaved: deque[tuple[Snapshot, bool]], reply: Callable[[Saved | Failed], None]
    ) -> None:
        """Save the oldest waiting snapshot, if there is one: snapshots beyond MAX_UNSAVED were dropped."""
        if unsaved:
            snapshot, last = unsaved.popleft()
            self._save(reply, snapshot, last=last)

    def _save(self, reply: Callable[[Saved | Failed], None], snapshot: Snapshot, *, last: bool) -> None:
        """Reply with a snapshot as bytes, or the failure, after all earlier events."""
        try:
            saved: Saved | Failed = snapshot.saved(last=last)
        except Exception as exc:  # noqa: BLE001 - the caller waits for the reply
            saved = _unsaved(exc)
        self._enqueue(partial(self._call, partial(reply, saved)))


def _unsaved(exc: Exception) -> Failed:
    log.error("the state of a job could not be saved", exc_info=exc)
    return Failed(f"its state could not be saved: {describe(exc)}", elsewhere=True)
