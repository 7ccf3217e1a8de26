"""Share a device between engines of one process: one iteration at a time, least device time first.

Does not share it between processes: there the device's own driver takes turns.
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
    """Gives each turn to the member that has used the device least of those that wait.

    Time in which a member wanted no turn gives it no credit: it comes back with as much used as the member
    that has used least of the others (start-time fair queuing: Goyal, Vin, Chen, 1996).
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._used_s: list[float] = []
        self._waiting: set[int] = set()
        self._running = False
        self._virtual_s = 0.0  # used by the member of the last turn, before it

    def join(self) -> int:
        """Return the number of a new member."""
        self._used_s.append(0.0)
        return len(self._used_s) - 1

    @contextmanager
    def turn(self, member: int) -> Iterator[None]:
        """Wait for a turn of a member and hold the device for it."""
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
    """Makes engines of one process take turns; `clock` is that of the device's time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._turns = DeviceTurns(clock)
        self._longest_s: list[float] = []

    def engine(self, engine: Engine) -> Engine:
        """Return an engine that takes turns with all others of this device."""
        self._longest_s.append(0.0)
        return SharedEngine(engine, self._turns, self._turns.join(), self._longest_s)


class SharedEngine:
    """An engine whose iterations take turns with others on the device.

    `longest_s` is shared with them: the longest iteration of each, by member.
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
        """Return the engine's figures; its longest iteration includes the wait for one of each other."""
        figures = self._engine.load()
        self._longest_s[self._member] = figures.longest_iteration_s
        return figures._replace(longest_iteration_s=sum(self._longest_s))
