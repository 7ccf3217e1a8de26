"""Training beside requests, in one loop: bounds that hold in time, and the same tokens as without it."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from site_engine.core.adapter_slots import AdapterSlots
from site_engine.core.request import Lane, Request
from site_engine.core.schedule_plan import SchedulePlan
from site_engine.core.slack import Bounds, Deferral, NextSlice
from site_engine.engine.build import allocate_kv_cache
from site_engine.engine.engine import SiteEngine
from site_engine.engine.settings import EngineSettings
from site_engine.engine.training_loop import MAX_JOBS, QUIET_S, TrainingLoop
from site_engine.errors import TrainingRefused
from site_engine.model.logit_rules import LogitRules
from site_engine.model.runner import Logits, PackedRunner, StepTokens
from site_engine.training.snapshot import Snapshot
from site_engine.variants import grouped
from site_engine.variants.store import VariantStore
from tests.support.engine_models import assert_idle, drain, engine_for, gather, greedy
from tests.support.training import equal, examples, run, trainer
from tests.support.variants import served

torch.set_num_threads(1)
BETWEEN_S, BASE_S, TOKEN_S, HOST_S = 0.05, 0.01, 0.0002, 0.004


class Clock:
    """Time that passes where something is computed, and nowhere else."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class TimedRunner(PackedRunner):
    """Computes a plan in a time that follows from its tokens."""

    clock: Clock

    def run(self, plan: SchedulePlan) -> Logits:
        self.clock.now_s += BASE_S + TOKEN_S * plan.tokens
        return super().run(plan)


class LaunchedStep(NamedTuple):
    """A plan of which every row's token is known when the device has computed it."""

    plan: SchedulePlan
    requests: list[Request]
    runner: LaunchingRunner
    done_s: float

    def finish(self) -> None:
        """Nothing waits for the tokens of the step before."""

    def wait(self) -> StepTokens:
        self.runner.running -= 1
        self.runner.clock.now_s = max(self.runner.clock.now_s, self.done_s)
        return StepTokens([7] * len(self.requests), {})


class LaunchingRunner(TimedRunner):
    """Computes plans on a device of its own, one after the other, while the host goes on."""

    running = 0  # plans that were launched and not read
    launched_ahead = 0  # of these, at the launch of another
    free_s = 0.0

    def launch(self, plan: SchedulePlan, rules: LogitRules | None = None) -> LaunchedStep:
        self.clock.now_s += HOST_S
        self.launched_ahead += self.running
        self.running += 1
        self.free_s = max(self.free_s, self.clock.now_s) + BASE_S + TOKEN_S * plan.tokens
        sampled = [chunk.request for chunk in plan.chunks if chunk.samples]
        return LaunchedStep(plan, sampled, self, self.free_s)


class Slices:
    """A job without end whose slices take a known time; a micro-batch has ten of them."""

    ended = False

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._seconds, self.begun_s = clock, seconds, list[float]()
        self.ahead: list[bool] = []

    @property
    def following(self) -> NextSlice:
        return NextSlice(self._seconds, 10 * self._seconds, len(self.begun_s) % 10 == 0)

    def run_slice(self, *, ahead: bool = False) -> float:
        self.begun_s.append(self._clock.now_s)
        self.ahead.append(ahead)
        self._clock.now_s += self._seconds
        return self._seconds

    def take_events(self) -> list[Any]:
        return []

    def snapshot(self) -> Snapshot:
        return Snapshot(0, {}, {})


def timed_engine(
    clock: Clock, bounds: Bounds, kind: type[TimedRunner] = TimedRunner, **chosen: Any
) -> SiteEngine:
    model, _ = served()
    limits = EngineSettings(
        **{"slots": 8, "token_budget": 256, "page_size": 4, "kv_tokens": 4096, "training": bounds} | chosen
    )
    kv_cache = allocate_kv_cache(model, limits)
    runner = kind(
        model.forward, kv_cache, slots=8, pages_per_row=64, use_variants=grouped.rows_of(model.device)
    )
    runner.clock = clock
    engine = SiteEngine(model, runner, limits, clock, VariantStore(model, AdapterSlots(4)))
    for number in range(16):  # so that the cost of an iteration is known
        engine.submit(greedy(f"before {number}", [1, 2] * (1 + 4 * number), 3))
        if number % 3 == 0:
            drain(engine)
    drain(engine)
    return engine


@given(st.integers(0, 10**6), st.floats(0.001, 0.02))
@settings(max_examples=6, deadline=None)
def test_answers_wait_for_tokens_no_longer_than_the_bound(seed: int, slice_s: float) -> None:
    """Rows that decode get tokens in time, also beside the prompts of newcomers."""
    draw, clock = Random(seed), Clock()
    engine = timed_engine(clock, Bounds(between_tokens_s=BETWEEN_S))
    job = Slices(clock, slice_s)
    engine.training.begin("job", "acme", job)
    last: dict[str, float] = {}
    for step in range(150):
        if draw.random() < 0.05:
            engine.submit(greedy(str(step), [draw.randrange(320) for _ in range(draw.randrange(1, 150))], 20))
        for output in engine.step():
            if output.request_id in last:
                assert clock.now_s - last[output.request_id] <= BETWEEN_S * 1.05
            last[output.request_id] = clock.now_s
            if output.finish is not None:
                del last[output.request_id]
    assert job.begun_s


@pytest.mark.parametrize("slice_s", [0.005, 0.1])
def test_an_iteration_is_launched_before_the_one_before_is_read_where_no_slice_fits(slice_s: float) -> None:
    """And where one fits, after: tokens are not late."""
    clock = Clock()
    engine = timed_engine(clock, Bounds(between_tokens_s=BETWEEN_S), LaunchingRunner)
    runner = engine.runner
    assert isinstance(runner, LaunchingRunner)
    job = Slices(clock, slice_s)
    engine.submit(greedy("a", [1, 2, 3], 60))
    runner.launched_ahead, times = 0, list[float]()
    for step in range(400):
        if step == 10:
            engine.training.begin("job", "acme", job)
        times += [clock.now_s] * len(engine.step())
        if len(times) == 60:
            break
    between = [after - before for before, after in pairwise(times)]
    assert max(between) <= BETWEEN_S
    if slice_s < BETWEEN_S:
        assert len(job.begun_s) >= 2 * 50
    else:
        assert not job.begun_s
        assert runner.launched_ahead >= 58
        assert between[30:] == pytest.approx([BASE_S + TOKEN_S] * 29), "the host's time is hidden"


@pytest.mark.parametrize("kind", [TimedRunner, LaunchingRunner])
@pytest.mark.parametrize("chats", [1, 4, 8])
def test_slices_between_two_tokens_are_fewer_as_slots_fill_but_one(
    kind: type[TimedRunner], chats: int
) -> None:
    clock, slice_s, iterations = Clock(), 0.004, 0
    engine = timed_engine(clock, Bounds(between_tokens_s=BETWEEN_S), kind)
    job = Slices(clock, slice_s)
    for number in range(chats):
        engine.submit(greedy(str(number), [1, 2, 3], 60))
    while engine.load().pending or iterations < 2:
        iterations += bool(engine.step())
    engine.training.begin("job", "acme", job)
    iterations = 0
    while iterations < 40:
        iterations += bool(engine.step())
    fewest = (1 - chats / 8) * (BETWEEN_S - 2 * BASE_S) / slice_s - 2
    assert len(job.begun_s) >= max(1, fewest) * (iterations - 1)
    if chats == 8:
        assert len(job.begun_s) <= iterations + 1


@pytest.mark.parametrize("slice_s", [0.001, 0.004, 0.1])
def test_what_training_adds_to_a_token_is_reported(slice_s: float) -> None:
    """What an iteration takes by its fit, and what training adds, are the time between two tokens."""
    clock = Clock()
    engine = timed_engine(clock, Bounds(between_tokens_s=BETWEEN_S))
    engine.training.begin("job", "acme", Slices(clock, slice_s))
    for _ in range(50):
        engine.step()
    assert engine.load().training_s_per_iteration == 0.0, "it delays nobody yet"
    engine.submit(greedy("a", [1, 2, 3], 200))
    at_s: list[float] = []
    while len(at_s) < 150:
        at_s += [clock.now_s] * len(engine.step())
    load = engine.load()
    between_s = (at_s[-1] - at_s[-21]) / 20
    iteration_s = load.iteration.seconds(1, 1, 150)
    assert load.training == 1
    assert iteration_s + load.training_s_per_iteration == pytest.approx(between_s, rel=0.06)
    assert (load.training_s_per_iteration > 0.0) == (slice_s < BETWEEN_S)
    engine.training.stop("job")
    assert (engine.load().training, engine.load().training_s_per_iteration) == (0, 0.0)


@given(st.integers(0, 40))
@settings(max_examples=6, deadline=None)
def test_a_newcomer_waits_for_one_slice_at_most(slices: int) -> None:
    clock = Clock()
    engine = timed_engine(clock, Bounds())
    job = Slices(clock, 0.004)
    engine.training.begin("job", "acme", job)
    for _ in range(slices):
        assert engine.step() == []
    assert len(job.begun_s) == slices
    arrived_s = clock.now_s
    engine.submit(greedy("a", [1, 2, 3], 2))
    assert [output.request_id for output in engine.step()] == ["a"]
    assert len(job.begun_s) == slices
    assert clock.now_s - arrived_s == pytest.approx(BASE_S + 3 * TOKEN_S)


@pytest.mark.parametrize("lane", Lane)
def test_no_slice_is_launched_behind_another_for_a_second_after_a_chat(lane: Lane) -> None:
    """A GPU computes both before the next chat, whose first token may take no longer than one."""
    clock = Clock()
    engine = timed_engine(clock, Bounds())
    job = Slices(clock, 0.004)
    clock.now_s += QUIET_S
    engine.training.begin("job", "acme", job)
    for _ in range(10):
        engine.step()
    assert all(job.ahead)
    request = greedy("a", [1, 2, 3], 2)
    request.lane = lane
    engine.submit(request)
    while not any(output.finish for output in engine.step()):
        pass
    ended_s, after = clock.now_s, len(job.begun_s)
    while clock.now_s < ended_s + 2 * QUIET_S:
        engine.step()
    is_chat = lane is Lane.CHAT
    begun = zip(job.begun_s[after:], job.ahead[after:], strict=True)
    assert all(ahead == (begun_s >= ended_s + QUIET_S or not is_chat) for begun_s, ahead in begun)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.8])
def test_lines_of_batches_share_the_time_with_training(share: float) -> None:
    clock = Clock()
    engine = timed_engine(clock, Bounds(batch_share=share))
    engine.training.begin("job", "acme", Slices(clock, 0.004))
    began_s, waiting = clock.now_s, 0
    for step in range(600):
        if waiting < 8:
            line = greedy(str(step), [1, 2, 3], 30)
            line.lane = Lane.BATCH
            engine.submit(line)
            waiting += 1
        waiting -= sum(output.finish is not None for output in engine.step())
    trained = engine.training.trained_s / (clock.now_s - began_s)
    assert trained == pytest.approx(1.0 - share, abs=0.05)


def test_the_rule_of_the_paper_trains_whole_micro_batches_beside_nothing() -> None:
    clock = Clock()
    engine = timed_engine(clock, Bounds(deferral=Deferral.ITERATION, wait_s=0.11))
    job = Slices(clock, 0.004)
    engine.training.begin("job", "acme", job)
    for _ in range(15):
        engine.step()
    engine.submit(greedy("a", [1, 2, 3], 10))
    assert engine.step() == []
    while not (outputs := engine.step()):
        pass
    # this micro-batch and the next, then it would have waited for longer than 0.11 s
    assert len(job.begun_s) == 40
    while outputs[0].finish is None:
        outputs = engine.step()
        assert len(outputs) == 1
    assert len(job.begun_s) == 40


def test_two_tenants_have_equal_time_however_many_jobs_they_have() -> None:
    clock = Clock()
    engine = timed_engine(clock, Bounds())
    jobs = {name: Slices(clock, 0.001 * (1 + at)) for at, name in enumerate(["a", "b1", "b2", "b3"])}
    for name, job in jobs.items():
        engine.training.begin(name, name[0], job)
    for _ in range(4000):
        engine.step()
    used = {name: sum(job.following.seconds for _ in job.begun_s) for name, job in jobs.items()}
    assert used["a"] / sum(used.values()) == pytest.approx(0.5, abs=0.05)


def test_tokens_and_adapters_are_the_same_beside_each_other_as_alone() -> None:
    data = examples(11, seed=1)
    alone = trainer(data)
    run(alone)
    model, _ = served()
    prompts = {str(number): [number + 1, *range(number * 3)] for number in range(12)}
    without = engine_for(model)
    for name, prompt in prompts.items():
        without.submit(greedy(name, prompt, 12))
    expected = {name: one.token_ids for name, one in drain(without).items()}
    engine = engine_for(model, training=Bounds(between_tokens_s=10.0))
    job = trainer(data, model=model.model)
    engine.training.begin("job", "acme", job)
    collected: dict[str, Any] = {}
    waiting, draw = list(prompts.items()), Random(0)
    while engine.has_work or waiting:
        if waiting and draw.random() < 0.1:
            name, prompt = waiting.pop()
            engine.submit(greedy(name, prompt, 12))
        gather(engine.step(), collected)
    assert {name: one.token_ids for name, one in collected.items()} == expected
    assert equal(job.adapter.tensors(), alone.adapter.tensors())
    events = [each.event for each in engine.training.take_events()]
    assert isinstance(events[-1], Snapshot)
    assert events[-1].step == job.total_steps
    assert_idle(engine)


@given(st.integers(0, 60))
@settings(max_examples=10, deadline=None)
def test_a_job_that_is_stopped_anywhere_leaves_nothing(slices: int) -> None:
    model, _ = served()
    engine = engine_for(model)
    engine.training.begin("job", "acme", trainer(examples(6), model=model.model))
    for _ in range(slices):
        engine.step()
    ended = not engine.training.jobs
    assert (engine.training.stop("job") is None) == ended
    engine.training.take_events()
    assert engine.training.stop("job") is None
    assert_idle(engine)
    engine.submit(greedy("a", [1], 1))
    drain(engine)
    assert_idle(engine)


def test_an_engine_without_jobs_never_asks_for_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: Any) -> bool:
        raise AssertionError("training was asked")

    monkeypatch.setattr(TrainingLoop, "run_slice", asked)
    model, _ = served()
    engine = engine_for(model)
    engine.submit(greedy("a", [1, 2], 5))
    assert len(drain(engine)["a"].token_ids) == 5


def test_jobs_are_bounded_and_have_names_of_their_own() -> None:
    clock = Clock()
    engine = timed_engine(clock, Bounds())
    for number in range(MAX_JOBS):
        engine.training.begin(str(number), "acme", Slices(clock, 0.1))
    for name in ("0", "one more"):
        with pytest.raises(TrainingRefused):
            engine.training.begin(name, "acme", Slices(clock, 0.1))
