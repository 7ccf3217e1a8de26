"""Jobs are spread over the engines of a pool; each job ends once, also where its engine is lost."""

from __future__ import annotations

from collections.abc import Callable

from site_engine.core.training import Failed, Recipe, Saved, StepDone, TrainingEvent, TrainingOrder
from site_engine.errors import TrainingRefused
from site_engine.pool.training import PoolTraining


class Engine:
    """An engine that trains when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[str] = []
        self.refusal: TrainingRefused | None = None

    def train(self, order: TrainingOrder, reply: Callable[[TrainingRefused | None], None]) -> None:
        self.jobs += [] if self.refusal else [order.job_id]
        reply(self.refusal)

    def stop_training(self, job_id: str, reply: Callable[[Saved | None], None]) -> None:
        self.jobs.remove(job_id)
        reply(Saved(3, False, job_id.encode()))


class Pool:
    def __init__(self, engines: int) -> None:
        self.engines = {place: Engine() for place in range(engines)}
        self.asleep = False
        self.training = PoolTraining(lambda: self.engines, lambda: self.asleep)
        self.events: list[tuple[str, TrainingEvent]] = []
        self.training.on_event = lambda job_id, event: self.events.append((job_id, event))

    def train(self, job_id: str) -> TrainingRefused | None:
        answers: list[TrainingRefused | None] = []
        self.training.train(TrainingOrder(job_id, "acme", Recipe(), b"rows"), answers.append)
        (answer,) = answers
        return answer

    def stop(self, job_id: str) -> Saved | None:
        answers: list[Saved | None] = []
        self.training.stop_training(job_id, answers.append)
        (answer,) = answers
        return answer


def test_each_job_goes_to_the_engine_with_fewest() -> None:
    pool = Pool(3)
    assert [pool.train(f"j{number}") for number in range(7)] == [None] * 7
    assert sorted(len(each.jobs) for each in pool.engines.values()) == [2, 2, 3]
    pool.training.heard("j1", Saved(9, True, b"adapter"))
    assert pool.stop("j1") is None
    assert pool.stop("j4") == Saved(3, False, b"j4")
    pool.train("next")
    assert "next" in pool.engines[1].jobs


def test_a_refused_job_may_come_again_and_one_that_is_here_may_not() -> None:
    pool = Pool(1)
    pool.engines[0].refusal = TrainingRefused("no room", elsewhere=True)
    assert pool.train("j") is pool.engines[0].refusal
    pool.engines[0].refusal = None
    assert pool.train("j") is None
    assert "trained here already" in str(pool.train("j"))


def test_no_job_begins_in_a_pool_that_is_to_sleep_once_its_requests_have_ended() -> None:
    pool = Pool(1)
    pool.asleep = True
    refused = pool.train("j")
    assert refused is not None and refused.elsewhere
    assert not pool.training.trains


def test_a_job_that_is_stopped_while_its_engine_reads_it_is_stopped_once_it_has_begun() -> None:
    class Reading(Engine):
        def train(self, order: TrainingOrder, reply: Callable[[TrainingRefused | None], None]) -> None:
            self.begin = lambda: Engine.train(self, order, reply)

        def stop_training(self, job_id: str, reply: Callable[[Saved | None], None]) -> None:
            if job_id in self.jobs:
                super().stop_training(job_id, reply)
            else:
                reply(None)

    pool, engine = Pool(0), Reading()
    pool.engines[0] = engine
    answers: list[TrainingRefused | None] = []
    pool.training.train(TrainingOrder("j", "acme", Recipe(), b"rows"), answers.append)
    assert pool.stop("j") is None
    engine.begin()
    assert answers == [None]
    assert engine.jobs == []
    assert not pool.training.trains


def test_the_jobs_of_a_lost_engine_fail_there_once_and_the_others_go_on() -> None:
    pool = Pool(2)
    for job_id in ("a", "b", "c"):
        pool.train(job_id)
    del pool.engines[0]
    pool.training.lost(0)
    pool.training.lost(0)
    pool.training.heard("b", StepDone(1, 9, 0.5, 0.5, 10))
    failed = Failed("its engine is lost", elsewhere=True)
    assert pool.events == [("a", failed), ("c", failed), ("b", StepDone(1, 9, 0.5, 0.5, 10))]
    assert pool.stop("a") is None
    del pool.engines[1]
    refused = pool.train("d")
    assert refused is not None and refused.elsewhere


def test_a_job_that_had_ended_when_stopped_fails_if_its_last_snapshot_is_lost_with_the_engine() -> None:
    class Ended(Engine):
        def stop_training(self, job_id: str, reply: Callable[[Saved | None], None]) -> None:
            reply(None)

    pool = Pool(0)
    pool.engines[0] = Ended()
    pool.train("j")
    assert pool.stop("j") is None
    assert pool.training.trains
    pool.training.lost(0)
    assert pool.events == [("j", Failed("its engine is lost", elsewhere=True))]
    assert not pool.training.trains
