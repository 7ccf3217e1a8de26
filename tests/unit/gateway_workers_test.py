"""A worker that can't start again is tried again, later each time, and takes nothing from the others."""

from __future__ import annotations

import errno
import multiprocessing
import signal
from collections.abc import Iterator
from multiprocessing.context import SpawnContext
from typing import Any

import pytest

from gateway.config import GatewayConfig
from gateway.workers import MAX_RESTART_S, RESTART_S, Workers, restart_pause_s

CONFIG = GatewayConfig(workers=2, site_tokens=("a-token",))


class NoFileLeft(SpawnContext):
    """What the system says to a process that has no file descriptor left."""

    def Pipe(self, duplex: bool = True) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")


def test_a_worker_that_the_system_can_not_start_again_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: NoFileLeft())
    workers = Workers(CONFIG)
    workers._again[2] = 0.0
    workers._watch()
    assert list(workers._again) == [2]
    assert workers._again[2] > 0.0
    assert not workers._stopping


def test_a_first_start_that_the_system_refuses_ends_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: NoFileLeft())
    with pytest.raises(OSError, match="Too many open files"):
        Workers(CONFIG)._start(1, first=True)


class OneLeft(SpawnContext):
    """A system that starts one process and refuses the next."""

    def __init__(self) -> None:
        super().__init__()
        self.pipes = 0

    def Pipe(self, duplex: bool = True) -> Any:
        self.pipes += 1
        if self.pipes > 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().Pipe(duplex)


@pytest.fixture
def own_signals() -> Iterator[None]:
    before = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGINT)}
    yield
    for name, handler in before.items():
        signal.signal(name, handler)


@pytest.mark.usefixtures("own_signals")
def test_no_worker_is_left_where_another_could_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    context = OneLeft()
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    workers = Workers(CONFIG)
    with pytest.raises(OSError, match="Too many open files"):
        workers.run()
    [left] = workers._live.values()
    left.process.join(30.0)
    assert left.process.exitcode == -signal.SIGTERM


def test_the_pause_doubles_while_a_worker_keeps_ending_and_is_short_again_after_it_served() -> None:
    pauses = [0.0]
    for _ in range(8):
        pauses.append(restart_pause_s(pauses[-1], lived_s=2.0))
    assert pauses[1:] == [RESTART_S, 2.0, 4.0, 8.0, 16.0, MAX_RESTART_S, MAX_RESTART_S, MAX_RESTART_S]
    assert restart_pause_s(pauses[-1], lived_s=MAX_RESTART_S + 1.0) == RESTART_S
