"""Share a device between engines of one process: one iteration at a time, least device time first.

Between processes, the device's driver schedules instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from site_engine.core.chain import Chain, Variant
from site_engine.core.load import LoadFigures
from site_engine.core.request import Moved, Output
from site_engine.engine.engine_interface import Engine, Inbox
from site_engine.engine.training_loop import TrainingLoop


class DeviceTurns:
    """Gives each turn to the waiting member that has used the device least.

    Idle time earns no credit: a member that returns is charged at least the time that the member of the last
    turn had used before it (start-time fair queuing: Goyal, Vin, Chen, 1996).
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._used_s: list[float] = []
        self._waiting: set[int] = set()
        self._running = False
        self._virtual_s = 0.0  # device time of the last turn's member before that turn

    def join(self) -> int:
        """Return the number of a new member."""
        self._used_s.append(0.0)
        return len(self._used_s) - 1

    @contextmanager
    def turn(self, member: int) -> Iterator[None]:
        """Wait for the member's turn and hold the device during the `with` block."""
        used_s, changed = self._used_s, self._changed
        with changed:
            used_s[member] = max(used_s[member], self._virtual_s)
            self._waiting.add(member)
            changed.wait_for(
                lambda: not self._running and member == min(self._waiting, key=used_s.__getitem__)
            )
            self._waiting.remove(member)
            self._running = True
            self._virtual_s = used_s[member]
            began_s = self._clock()
        try:
            yield
        finally:
            with changed:
                used_s[member] += self._clock() - began_s
                self._running = False
                changed.notify_all()


class SharedDevice:
    """Makes engines of one process take turns. `clock` measures device time in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._turns = DeviceTurns(clock)
        self._longest_s: list[float] = []

    def engine(self, engine: Engine) -> Engine:
        """Return a wrapper of an engine that takes turns with all others of this device."""
        self._longest_s.append(0.0)
        return SharedEngine(engine, self._turns, self._turns.join(), self._longest_s)


class SharedEngine:
    """An engine whose iterations take turns with others on the device.

    `longest_s` is shared by all members: the longest iteration of each, by member number.
    """

    def __init__(self, engine: Engine, turns: DeviceTurns, member: int, longest_s: list[float]) -> None:
        self._engine = engine
        self._turns = turns
        self._member = member
        self._longest_s = longest_s
        self.submit: Callable[..., None] = engine.submit
        self.expect: Callable[[], None] = engine.expect
        self.send_ahead: Callable[..., bool] = engine.send_ahead
        self.export: Callable[..., tuple[Sequence[Output], Moved | None]] = engine.export
        self.end_by_text: Callable[[str, int], None] = engine.end_by_text
        self.cancel: Callable[[str], object] = engine.cancel
        self.waits: Callable[[str], bool] = engine.waits
        self.release: Callable[[Sequence[str]], Sequence[str]] = engine.release
        self.load_variant: Callable[[Variant], Callable[[], Chain]] = engine.load_variant
        self.remove_variant: Callable[[str], None] = engine.remove_variant

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    @property
    def inbox(self) -> Inbox:
        return self._engine.inbox

    @property
    def training(self) -> TrainingLoop:
        return self._engine.training

    def step(self) -> Sequence[Output]:
        with self._turns.turn(self._member):
            return self._engine.step()

    def load(self) -> LoadFigures:
        """Return the engine's figures. The longest iteration includes one of each other engine."""
        figures = self._engine.load()
        self._longest_s[self._member] = figures.longest_iteration_s
        return figures._replace(longest_iteration_s=sum(self._longest_s))
