"""Wakes those that send text to clients: at once while the event loop has time for each, else together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from itertools import islice
from operator import length_hint

from wire.send_pace import SendPace

READERS_PER_TURN = 16
"""Readers that write to clients in a turn of the event loop: about a millisecond."""
TURNS_TO_READ = 3
"""Turns that gRPC takes to hand over a message that has arrived. In a loop whose every turn takes 1 ms, 320
messages are read a second and others wait behind them; with three turns for each such one, all of 800.
"""


class StreamPace:
    """Wakes the readers of attempts that have new text: at once, or together after a wait of `longest_s` at
    most. `cpu_clock` returns the CPU seconds of the event loop's thread.
    """

    def __init__(
        self,
        longest_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._pace = SendPace(longest_s)
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._wait_s = 0.0  # of the readers of the text that is being read
        self._waiting: dict[Callable[[], None], None] = {}

    @property
    def is_busy(self) -> bool:
        """Return whether the event loop has no time to send text as soon as it comes."""
        return self._clock() < self._pace.due_s

    def begin(self) -> None:
        """Note that a message with the text of many attempts is being read."""
        if not self._waiting:
            now = self._clock()
            self._wait_s = max(0.0, self._pace.due_s - now)
            if not self._wait_s:
                self._pace.sent(now, self._cpu_clock())

    def wake(self, reader: Callable[[], None]) -> None:
        """Call `reader` now, or with the others when the wait is over."""
        if not self._wait_s:
            reader()
            return
        if not self._waiting:
            asyncio.get_running_loop().call_later(self._wait_s, self._wake_all)
        self._waiting[reader] = None

    def _wake_all(self) -> None:
        readers, self._waiting = iter(self._waiting), {}
        self._wait_s = 0.0
        self._pace.sent(self._clock(), self._cpu_clock())
        self._wake_next(readers)

    def _wake_next(self, readers: Iterator[Callable[[], None]], turns: int = 0) -> None:
        """Wake some readers once so many turns have passed, then the next when a message can have been read.

        First tokens do not wait for all of them.
        """
        if not turns:
            for reader in islice(readers, READERS_PER_TURN):
                reader()
            turns = TURNS_TO_READ
        if length_hint(readers):
            asyncio.get_running_loop().call_soon(self._wake_next, readers, turns - 1)
