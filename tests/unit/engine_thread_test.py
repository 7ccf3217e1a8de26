"""The engine thread: groups are all or nothing, failures cost their own requests, everyone gets an answer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from site_engine.core.load import LoadFigures
from site_engine.core.request import Finish, Output, Request, Sampling
from site_engine.core.stall_watch import MAX_GAP_S, StallWatch
from site_engine.core.step_outputs import StepOutputs
from site_engine.engine.engine_thread import MAX_CONSECUTIVE_ERRORS, PROBE_ID, STALLED_AFTER_S, EngineThread
from site_engine.engine_client import Listener, LoadSeen
from site_engine.errors import NotServed, Reason
from tests.support.site_fakes import CONTEXT_TOKENS, FakeClock, FakeEngine

PATIENCE_S = 60.0


class FakeLoop:
    """The event loop's side, played by the test's own thread."""

    def __init__(self, engine: FakeEngine, floor_s: float) -> None:
        self.clock = FakeClock(-1.0 if floor_s else 0.0)  # the first iteration is due at 0
        self.calls: queue.Queue[Callable[[], None]] = queue.Queue()
        self.outputs: list[Output] = []
        self.loads: list[LoadSeen] = []
        self.broken: list[str] = []
        self.batches = 0
        self.engine_thread = EngineThread(engine, self.calls.put, self.clock, floor_s)
        self.listener = Listener(self.outputs.extend, self.loads.append, self.broken.append)

    def until(self, holds: Callable[[], object]) -> None:
        while not holds():
            self.calls.get(timeout=PATIENCE_S)()
            self.batches += 1

    def step(self) -> None:
        """One iteration, where a floor keeps the engine from going on by itself."""
        self.clock.now += 1.0
        seen = len(self.loads)
        self.engine_thread.request_load()
        self.until(lambda: len(self.loads) > seen)

    def submit(self, *requests: Request) -> NotServed | None:
        answers: list[NotServed | None] = []
        self.engine_thread.submit(requests, answers.append)
        self.until(lambda: answers)
        return answers[0]

    def release(self, *groups: tuple[str, ...]) -> list[bool]:
        answers: list[list[bool]] = []
        self.engine_thread.release(groups, answers.append)
        self.until(lambda: answers)
        return answers[0]

    def finishes(self) -> dict[str, Finish]:
        finished = [(each.request_id, each.finish) for each in self.outputs if each.finish]
        assert len(dict(finished)) == len(finished), "finished twice"
        return dict(finished)


@contextmanager
def at_work(engine: FakeEngine, floor_s: float = 0.0) -> Iterator[FakeLoop]:
    """With a floor of 1 s the engine goes on only when the test says so: its clock stands still."""
    loop = FakeLoop(engine, floor_s)
    loop.engine_thread.start(loop.listener)
    try:
        yield loop
    finally:
        loop.engine_thread.stop()


def request(name: str, tokens: int = 3, prompt: str = "abc") -> Request:
    return Request(name, [ord(each) for each in prompt], Sampling(max_tokens=tokens))


def test_what_loads_goes_on_without_turns_once_the_thread_has_ended() -> None:
    with at_work(FakeEngine()) as loop:
        assert loop.submit(request("r", tokens=5)) is None
        loop.until(loop.finishes)
    turns = loop.engine_thread._loader_turns
    turns.give()
    assert not turns._idle
    loop.engine_thread._run()  # it ends at once: the thread is to end
    assert turns._idle


def test_what_loads_has_no_openmp_threads_beside_those_of_the_engine() -> None:
    before, counts = torch.get_num_threads(), list[int]()
    torch.set_num_threads(3)
    try:
        with at_work(FakeEngine()) as loop:
            loop.engine_thread._load(lambda: counts.append(torch.get_num_threads()))
            loop.engine_thread._loader.shutdown()  # waits
            loop.engine_thread.between(torch.get_num_threads, counts.append)
            loop.until(lambda: len(counts) == 2)
    finally:
        torch.set_num_threads(before)
    assert counts == [1, 3]


def test_a_request_runs_to_its_end_and_the_engine_falls_idle() -> None:
    with at_work(FakeEngine()) as loop:
        assert loop.submit(request("r", tokens=5)) is None
        loop.until(loop.finishes)
        assert "".join(each.text for each in loop.outputs) == "abcab"
        loop.until(lambda: loop.loads[-1].figures.running == 0)
        assert loop.loads[-1].figures.kv_free_tokens == 2 * CONTEXT_TOKENS


def test_a_group_that_does_not_fit_as_a_whole_leaves_nothing_behind() -> None:
    engine = FakeEngine(max_pending=2)
    with at_work(engine) as loop:
        answer = loop.submit(*(request(f"r{i}") for i in range(3)))
        assert isinstance(answer, NotServed)
        assert answer.reason is Reason.FULL
        assert not engine.has_work


def test_a_cancel_gets_in_while_the_floor_is_waited_for() -> None:
    with at_work(FakeEngine(), floor_s=1.0) as loop:
        loop.submit(request("r", tokens=9))
        loop.step()
        loop.engine_thread.cancel(["r"])
        loop.engine_thread.request_load()
        loop.until(lambda: loop.loads[-1].figures.running == 0)  # before the next iteration
        assert loop.finishes() == {}
        loop.step()
        assert loop.finishes() == {"r": Finish.CANCELLED}


def test_a_group_with_a_started_choice_is_not_given_up_and_loses_nothing() -> None:
    with at_work(FakeEngine(slots=2), floor_s=1.0) as loop:
        loop.submit(request("long", tokens=40))
        loop.step()
        loop.submit(request("a0"), request("a1"))
        loop.submit(request("b0"), request("b1"))
        loop.step()  # a0 has the second slot
        assert loop.release(("a0", "a1"), ("b0", "b1"), ("b0", "b1")) == [False, True, False]
        for _ in range(40):
            loop.step()
        assert loop.finishes() == dict.fromkeys(("a0", "a1", "long"), Finish.LENGTH)


class StuckEngine(FakeEngine):
    """Its second step ends when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.inside, self.let_go = threading.Event(), threading.Event()

    def step(self) -> Sequence[Output]:
        self.steps += 1
        if self.steps == 2:
            self.inside.set()
            assert self.let_go.wait(PATIENCE_S)
        return super().step()


@pytest.mark.parametrize("longest_s", [0.0, 4.0])
def test_an_iteration_that_takes_too_long_is_a_stall_until_it_ends(longest_s: float) -> None:
    engine = StuckEngine()
    figures = engine.load()._replace(longest_iteration_s=longest_s)
    engine.load = lambda: figures  # type: ignore[method-assign]
    with at_work(engine, floor_s=1.0) as loop:
        loop.submit(request("r", tokens=9))
        loop.step()
        assert loop.engine_thread.stalled_s() == 0.0
        loop.clock.now += 1.0
        loop.engine_thread.request_load()
        assert engine.inside.wait(PATIENCE_S)
        taken_s = 0.0
        while not (stalled_s := loop.engine_thread.stalled_s()):
            loop.clock.now += 0.25
            taken_s += 0.25
        assert stalled_s == taken_s == STALLED_AFTER_S + 2 * longest_s + 0.25
        engine.let_go.set()
        loop.step()
        loop.step()
        assert loop.engine_thread.stalled_s() == 0.0
        assert loop.finishes() == {}


def test_time_in_which_the_process_did_not_run_is_no_stall() -> None:
    watch = StallWatch()
    assert watch.look(None, 0.0) == 0.0
    assert watch.look(0.2, 0.25) == pytest.approx(0.05)
    assert watch.look(0.2, 60.25) == pytest.approx(0.05 + MAX_GAP_S), "suspended for a minute"
    assert watch.look(60.3, 60.5) == pytest.approx(0.2), "it has moved"
    assert watch.look(None, 61.0) == 0.0


def test_unknown_requests_are_nobodys_concern() -> None:
    with at_work(FakeEngine()) as loop:
        loop.engine_thread.cancel(["nobody"])
        assert loop.release(("nobody",)) == [False]
        assert loop.outputs == []


def test_a_failed_iteration_costs_what_ran_and_keeps_what_waits() -> None:
    engine = FakeEngine(slots=1)
    with at_work(engine, floor_s=1.0) as loop:
        loop.submit(request("running", tokens=50))
        loop.submit(request("waiting"))
        loop.step()
        engine.failures.append(RuntimeError("a kernel gave up"))
        for _ in range(5):
            loop.step()
        assert loop.finishes() == {"running": Finish.FAILED, "waiting": Finish.LENGTH}
        failed = next(each for each in loop.outputs if each.finish is Finish.FAILED)
        assert "a kernel gave up" in failed.error
        assert failed.completion_tokens == 1
        assert loop.broken == []


def test_an_engine_beyond_use_fails_everything_and_says_so() -> None:
    engine = FakeEngine(slots=1, failures=[RuntimeError("device lost")] * 50)
    with at_work(engine) as loop:
        for name in ("a", "b", "c", "d"):
            loop.engine_thread.submit([request(name)], lambda answer: None)
        loop.until(lambda: loop.broken)
        assert set(loop.finishes()) <= {"a", "b", "c", "d"}
        assert set(loop.finishes().values()) == {Finish.FAILED}
        assert "device lost" in loop.broken[0]
        late = loop.submit(request("late"))
        assert isinstance(late, NotServed)
        assert late.reason is Reason.INTERNAL
        assert len(engine.failures) == 50 - MAX_CONSECUTIVE_ERRORS


def test_a_dead_device_does_not_look_like_an_idle_site() -> None:
    with at_work(FakeEngine(slots=1, max_pending=50, dead=True)) as loop:
        loop.submit(*(request(f"r{i}") for i in range(20)))
        loop.until(lambda: loop.broken)
        assert loop.finishes() == dict.fromkeys((f"r{i}" for i in range(20)), Finish.FAILED)
        assert "no such device" in loop.broken[0]


def test_requests_that_fail_by_themselves_do_not_end_the_site() -> None:
    doomed = {f"r{i}" for i in range(20)}
    with at_work(FakeEngine(slots=1, max_pending=50, doomed=doomed)) as loop:
        loop.submit(*(request(name) for name in doomed))
        loop.submit(request("well"))
        loop.until(lambda: len(loop.finishes()) == 21)
        assert loop.finishes()["well"] is Finish.LENGTH
        assert loop.broken == []


def test_outputs_of_an_iteration_arrive_in_one_call() -> None:
    with at_work(FakeEngine(slots=4), floor_s=1.0) as loop:
        loop.submit(*(request(f"r{i}", tokens=6) for i in range(4)))
        before = loop.batches
        loop.step()
        assert len(loop.outputs) == 4
        assert loop.batches - before == 1


class EngineOfColumns(FakeEngine):
    """Its outputs come in columns; `gone` names a request that has ended and has one more token."""

    gone = ""

    def step(self) -> StepOutputs:
        found = StepOutputs()
        for output in super().step():
            if output.finish is None:
                found.request_ids.append(output.request_id)
                found.token_ids.append(output.token_ids[0])
                found.generated.append(output.completion_tokens)
            else:
                found.others.append(output)
        if self.gone:
            found.request_ids.append(self.gone)
            found.token_ids.append(1)
            found.generated.append(2)
        return found


def test_outputs_in_columns_arrive_as_others_do() -> None:
    told = []
    for engine in (EngineOfColumns(), FakeEngine()):
        with at_work(engine) as loop:
            loop.submit(request("a", tokens=4), request("b", tokens=2))
            loop.until(lambda: len(loop.finishes()) == 2)
            told.append(sorted((each.request_id, each.token_ids) for each in loop.outputs))
    assert told[0] == told[1]


def test_a_token_in_columns_of_a_request_that_has_ended_reaches_nobody() -> None:
    engine = EngineOfColumns()
    engine.gone = "ended before"
    with at_work(engine) as loop:
        loop.submit(request("r"))
        loop.until(loop.finishes)
        assert {each.request_id for each in loop.outputs} == {"r"}
        loop.engine_thread.cancel(["ended before"])  # it was not taken for one that runs
        loop.until(lambda: loop.loads[-1].figures.running == 0)
        assert loop.finishes() == {"r": Finish.LENGTH}


class EngineWithADeadDevice(EngineOfColumns):
    """It has a token on its way still when it fails even the request that probes it."""

    def step(self) -> StepOutputs:
        found = super().step()
        found.others.append(Output(PROBE_ID, finish=Finish.FAILED, error="the device is gone"))
        return found


def test_a_probe_that_fails_beside_tokens_in_columns_shows_a_dead_device() -> None:
    with at_work(EngineWithADeadDevice()) as loop:
        loop.submit(request("r", tokens=9))
        loop.until(lambda: loop.broken)
        assert "the device is gone" in loop.broken[0]
        assert loop.finishes() == {"r": Finish.FAILED}


def test_figures_that_follow_an_answer_count_what_was_taken() -> None:
    with at_work(FakeEngine(slots=1), floor_s=1.0) as loop:
        loop.submit(request("first", tokens=9))
        loop.step()
        loop.submit(request("second"))
        assert loop.loads[-1].figures.pending == 1


def test_figures_that_take_long_are_not_made_for_each_admission() -> None:
    engine = FakeEngine(slots=1)
    with at_work(engine, floor_s=1.0) as loop:
        figures = engine.load

        def load() -> LoadFigures:
            loop.clock.now += 0.001
            return figures()

        engine.load = load  # type: ignore[method-assign]
        loop.submit(request("first", tokens=9))
        loop.step()
        reports = len(loop.loads)
        loop.submit(request("second"))
        assert len(loop.loads) == reports
        loop.clock.now += 0.02
        loop.submit(request("third"))
        assert loop.loads[-1].figures.pending == 2


@pytest.mark.parametrize("prompt", ["x" * CONTEXT_TOKENS, "x" * (CONTEXT_TOKENS + 9)])
def test_the_engines_own_refusal_becomes_ours(prompt: str) -> None:
    with at_work(FakeEngine()) as loop:
        answer = loop.submit(request("r", prompt=prompt))
        assert isinstance(answer, NotServed)
        assert (answer.reason, answer.param) == (Reason.CONTEXT_LENGTH, "prompt")
        assert str(len(prompt)) in answer.message
