"""A thread that loads runs between the steps of an engine's thread, never beside one that is short."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from site_engine.core import loader_turns
from site_engine.core.loader_turns import LoaderTurns, pause, released
from site_engine.model.pausing import PauseBeforeOperations

PATIENCE_S = 20.0


class Loading:
    """Work in so many pieces on a thread of its own, which tells when it waits for a turn."""

    def __init__(self, turns: LoaderTurns, work: Callable[[], None]) -> None:
        self.turns = turns
        self.thread = threading.Thread(target=turns.run, args=(work,), daemon=True)
        self.thread.start()

    def waits(self) -> None:
        """Return once the thread waits for a turn or has ended."""
        deadline = threading.Event()
        for _ in range(int(PATIENCE_S / 1e-3)):
            if self.turns._waits or not self.thread.is_alive():
                return
            deadline.wait(1e-3)
        raise AssertionError("the thread neither waits nor ends")

    def ends(self) -> None:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> LoaderTurns:
    """Turns of one piece each, which nobody takes without being given them."""
    monkeypatch.setattr(loader_turns, "TURN_S", 0.0)
    monkeypatch.setattr(loader_turns, "SHARE", math.inf)
    monkeypatch.setattr(loader_turns, "LATE_S", PATIENCE_S)
    monkeypatch.setattr(loader_turns, "LONG_STEP_S", PATIENCE_S)
    monkeypatch.setattr(loader_turns, "LONGER", math.inf)
    return LoaderTurns()


def test_a_piece_is_loaded_in_each_turn_and_none_in_between(turns: LoaderTurns) -> None:
    done: list[int] = []

    def work() -> None:
        for piece in range(3):
            done.append(piece)
            pause()

    turns.give()  # the engine has work: nothing is loaded without a turn
    loading = Loading(turns, work)
    for expected in ([], [0], [0, 1], [0, 1, 2]):
        loading.waits()
        assert done == expected
        turns.give()
    loading.ends()
    turns.give()  # nobody waits: it returns at once


def test_without_work_of_the_engine_nothing_waits(turns: LoaderTurns) -> None:
    done: list[int] = []
    turns.give()
    loading = Loading(turns, lambda: [done.append(piece) or pause() for piece in range(9)] and None)
    loading.waits()
    turns.leave()
    loading.ends()
    assert done == [*range(9)]


def test_what_needs_no_interpreter_runs_beside_steps(turns: LoaderTurns) -> None:
    go_on, done = threading.Event(), list[str]()

    def work() -> None:
        with released():
            go_on.wait(PATIENCE_S)
            done.append("read")
        done.append("checked")

    turns.give()
    loading = Loading(turns, work)
    loading.waits()
    turns.give()  # comes back while the thread is still reading
    assert not done
    turns.give()  # it does not wait for a turn: the engine goes on
    go_on.set()
    loading.waits()
    assert done == ["read"]
    turns.give()
    loading.ends()
    assert done == ["read", "checked"]


def test_a_turn_lasts_for_a_part_of_the_step_before(
    turns: LoaderTurns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what loads beside long steps ends."""
    now_s, done = [0.0], list[int]()
    monkeypatch.setattr(loader_turns, "SHARE", 4)
    monkeypatch.setattr(loader_turns, "perf_counter", lambda: now_s[0])

    def work() -> None:
        for piece in range(8):
            done.append(piece)
            now_s[0] += 1.0
            pause()

    turns.give()
    loading = Loading(turns, work)
    for expected in (3, 6, 8):
        loading.waits()
        now_s[0] += 12.0
        turns.give()
        loading.waits()
        assert len(done) == expected
    loading.ends()


def test_one_that_fails_gives_its_turn_back(turns: LoaderTurns, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: failed.append(args.exc_value))

    def work() -> None:
        raise ValueError("cut")

    turns.give()
    loading = Loading(turns, work)
    loading.waits()
    turns.give()
    loading.ends()
    assert [str(each) for each in failed] == ["cut"]


def test_an_engine_does_not_wait_for_one_that_never_pauses(
    turns: LoaderTurns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_turns, "LATE_S", 0.01)
    end, done = threading.Event(), list[int]()

    def work() -> None:
        end.wait(PATIENCE_S)
        pause()
        done.append(1)

    turns.give()
    loading = Loading(turns, work)
    loading.waits()
    turns.give()  # the thread holds its turn for longer than the engine waits
    end.set()
    loading.waits()
    assert not done
    turns.give()  # what it gave back late does not count for this turn
    loading.ends()
    assert done == [1]


def test_each_operation_of_pytorch_waits_for_a_turn(turns: LoaderTurns) -> None:
    done: list[str] = []

    def work() -> None:
        with PauseBeforeOperations():
            number = torch.zeros(2)
            done.append("made")
            number = number + number
            done.append("added")
            with released():
                number = number.exp().sum()  # beside steps
            done.append("summed")
            assert number.item() == 2.0
            done.append("read")

    turns.give()
    loading = Loading(turns, work)
    for expected in ([], [], ["made"], ["made", "added"], ["made", "added", "summed"]):
        loading.waits()
        assert done == expected
        turns.give()
    loading.ends()
    assert done == ["made", "added", "summed", "read"]


def test_no_turn_follows_a_step_that_took_longer_than_usual(
    turns: LoaderTurns, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, done = [1.0], list[int]()
    monkeypatch.setattr(loader_turns, "LONGER", 1.4)
    monkeypatch.setattr(loader_turns, "perf_counter", lambda: now_s[0])

    def work() -> None:
        for piece in range(100):
            done.append(piece)
            pause()

    def step(seconds: float) -> int:
        """Run a step; return how many pieces were loaded after it."""
        loading.waits()
        before = len(done)
        now_s[0] += seconds
        turns.give()
        loading.waits()
        return len(done) - before

    turns.give()
    loading = Loading(turns, work)
    assert [step(1e-3), step(1e-3), step(1.3e-3), step(1.6e-3), step(1e-3)] == [1, 1, 1, 0, 1]
    assert [step(9e-3) for _ in range(6)] == [0, 0, 0, 0, 1, 0], "what loads ends where all steps grow longer"
    turns.leave()
    loading.ends()
