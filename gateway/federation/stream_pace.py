"""Decides how long text waits to go to clients together: not at all while the event loop has time for each.

A chunk costs the same however many tokens it holds, so under load the loop gains time by sending fewer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from itertools import islice
from operator import length_hint

READERS_PER_TURN = 16
"""Readers that write to clients before the event loop reads what has arrived: about a millisecond."""
LOOP_SHARE = 0.5
"""Text waits for the next once the loop computes for more than this share of the time."""


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
        self._longest_s = longest_s
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._woken_s = self._due_s = float("-inf")
        self._busy_s = 0.0
        self._wait_s = 0.0  # of the readers of the text that is being read
        self._waiting: dict[Callable[[], None], None] = {}

    def begin(self) -> None:
        """Note that a message with the text of many attempts is being read."""
        if not self._waiting:
            now = self._clock()
            self._wait_s = max(0.0, self._due_s - now)
            if not self._wait_s:
                self._woken(now)

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
        self._woken(self._clock())
        self._wake_next(readers)

    def _wake_next(self, readers: Iterator[Callable[[], None]]) -> None:
        """Wake some readers in each turn of the event loop: new queries do not wait for all of them."""
        for reader in islice(readers, READERS_PER_TURN):
            reader()
        if length_hint(readers):
            asyncio.get_running_loop().call_soon(self._wake_next, readers)

    def _woken(self, now: float) -> None:
        """Set the next wait to what brings the loop down to LOOP_SHARE: what it has computed since the last,
        divided by that. Of a longer pause than `longest_s` only the average counts, else an idle loop would
        begin with a wait.
        """
        elapsed_s = now - self._woken_s
        busy_s = self._cpu_clock()
        computed_s = busy_s - self._busy_s
        if elapsed_s > self._longest_s:
            computed_s *= self._longest_s / elapsed_s
        self._due_s = now + min(self._longest_s, computed_s / LOOP_SHARE)
        self._woken_s, self._busy_s = now, busy_s
