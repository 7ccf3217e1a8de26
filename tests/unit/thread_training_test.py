"""Which snapshots of a job are saved when they come faster than they can be written."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from site_engine.core.training import Saved, TrainingEvent
from site_engine.engine.engine_interface import Engine
from site_engine.engine.thread_training import MAX_UNSAVED, ThreadTraining
from site_engine.training.snapshot import Snapshot


class Jobs:
    """An engine that trains jobs of which only their events matter."""

    def __init__(self) -> None:
        self.jobs: dict[str, object] = {"job": object(), "other": object()}
        self.events: list[tuple[str, Snapshot]] = []

    def take_events(self) -> list[tuple[str, Snapshot]]:
        events, self.events = self.events, []
        return events


def test_the_newest_snapshots_of_each_job_are_saved_and_the_last_one_says_so() -> None:
    training, loads, heard = Jobs(), list[Callable[[], None]](), list[tuple[str, int, bool]]()
    trainer = ThreadTraining(
        cast(Engine, SimpleNamespace(training=training)), loads.append, lambda act: act(), lambda act: act()
    )

    def hear(job_id: str, event: TrainingEvent) -> None:
        assert isinstance(event, Saved)
        heard.append((job_id, event.step, event.last))

    def save(job_id: str, step: int) -> None:
        training.events.append((job_id, Snapshot(step, {}, {})))
        trainer.pass_on(hear)

    for step in range(1, 5):
        save("job", step)
    save("other", 1)
    del training.jobs["job"]
    save("job", 5)
    for load in loads:
        load()
    assert MAX_UNSAVED == 3
    assert sorted(heard) == [("job", 3, False), ("job", 4, False), ("job", 5, True), ("other", 1, False)]
    assert [step for job_id, step, _ in heard if job_id == "job"] == [3, 4, 5]
    training.jobs["job"] = object()  # trained here again
    loads.clear()
    save("job", 6)
    cast(Any, loads[0])()
    assert heard[-1] == ("job", 6, False)
