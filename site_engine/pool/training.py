"""Train over the engines of a pool: each job in one of them, where fewest are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from site_engine.core.training import Failed, Saved, StepDone, TrainingEvent, TrainingOrder
from site_engine.engine_client import TrainingEngine
from site_engine.errors import TrainingRefused


class PoolTraining:
    """The jobs of a pool. `serving` returns what trains in the engines that serve, by their places; while
    `sleeps`, no job begins: the engines that still serve are to rest soon.

    `on_event` gets what happens to a job, by its id; a job whose engine is lost has failed there.
    """

    def __init__(
        self, serving: Callable[[], Mapping[int, TrainingEngine]], sleeps: Callable[[], bool]
    ) -> None:
        self.on_event: Callable[[str, TrainingEvent], None] = lambda job_id, event: None
        self._serving, self._sleeps = serving, sleeps
        self._jobs: dict[str, int] = {}  # their places
        self._begun: set[str] = set()  # those that their engines have read

    @property
    def trains(self) -> bool:
        """Return whether any job is here."""
        return bool(self._jobs)

    def train(self, order: TrainingOrder, reply: Callable[[TrainingRefused | None], None]) -> None:
        serving, places = self._serving(), [*self._jobs.values()]
        if order.job_id in self._jobs:
            reply(TrainingRefused(f"{order.job_id} is trained here already"))
        elif self._sleeps():
            reply(TrainingRefused("the model sleeps here", elsewhere=True))
        elif not serving:
            reply(TrainingRefused("all engines of this site are lost", elsewhere=True))
        else:
            place = self._jobs[order.job_id] = min(serving, key=lambda each: (places.count(each), each))
            serving[place].train(order, partial(self._answered, order.job_id, serving[place], reply))

    def stop_training(self, job_id: str, reply: Callable[[Saved | Failed | None], None]) -> None:
        engine = self._serving().get(self._jobs.get(job_id, -1))

        def stopped(answer: Saved | Failed | None) -> None:
            if answer is not None:  # else its last snapshot is on its way
                self._forget(job_id)
            reply(answer)

        if job_id not in self._begun:
            self._forget(job_id)
        if engine is None:
            reply(None)
        else:
            engine.stop_training(job_id, stopped)

    def heard(self, job_id: str, event: TrainingEvent) -> None:
        """Pass on what happened to a job."""
        if not isinstance(event, StepDone) and (isinstance(event, Failed) or event.last):
            self._forget(job_id)
        self.on_event(job_id, event)

    def lost(self, place: int) -> None:
        """Have the jobs of an engine fail that is lost: they go on elsewhere, or here, from a snapshot."""
        for job_id in [job_id for job_id, its in self._jobs.items() if its == place]:
            self.heard(job_id, Failed("its engine is lost", elsewhere=True))

    def _answered(
        self,
        job_id: str,
        engine: TrainingEngine,
        reply: Callable[[TrainingRefused | None], None],
        refused: TrainingRefused | None,
    ) -> None:
        if refused is not None:
            self._forget(job_id)
        elif job_id not in self._jobs:  # it was stopped while the engine read its data
            engine.stop_training(job_id, lambda _: None)
        else:
            self._begun.add(job_id)
        reply(refused)

    def _forget(self, job_id: str) -> None:
        self._jobs.pop(job_id, None)
        self._begun.discard(job_id)
