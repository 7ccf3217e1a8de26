"""Wakes the readers that send text to clients: at once, or together if the event loop is busy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from itertools import islice
from operator import length_hint

from wire.send_pace import SendPace

READERS_PER_TURN = 16
"""The readers that write to clients in one turn of the event loop, in about a millisecond."""
TURNS_TO_READ = 3
"""The turns of the event loop that gRPC needs to hand over a received message. If every turn takes 1 ms, only
320 messages per second are read and others queue. With three turns per group of readers, all of 800 are.
"""


class StreamPace:
    """Wakes the readers of attempts with new text: at once, or together after at most `longest_s` seconds.
    `cpu_clock` returns the CPU seconds of the event loop's thread.
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
        self._wait_s = 0.0  # how long the readers of the current message wait
        self._waiting: dict[Callable[[], None], None] = {}

    @property
    def is_busy(self) -> bool:
        """Return whether the event loop is too busy to send text as soon as it arrives."""
        return self._clock() < self._pace.due_s

    def begin(self) -> None:
        """Start to read a message with text of many attempts, and decide whether its readers wait."""
        if not self._waiting:
            now = self._clock()
            self._wait_s = max(0.0, self._pace.due_s - now)
            if not self._wait_s:
                self._pace.sent(now, self._cpu_clock())

    def wake(self, reader: Callable[[], None]) -> None:
        """Call `reader` now, or together with the other waiting readers when the wait is over."""
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
        """Wake the next READERS_PER_TURN readers after `turns` turns of the event loop, and so on until none
        is left. The turns between let messages be read, so that first tokens do not wait for all readers.
        """
        if not turns:
            for reader in islice(readers, READERS_PER_TURN):
                reader()
            turns = TURNS_TO_READ
        if length_hint(readers):
            asyncio.get_running_loop().call_soon(self._wake_next, readers, turns - 1)
