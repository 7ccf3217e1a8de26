"""The virtual clock: scheduled callbacks in the order of their time.

Does not wait.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Clock:
    """A clock that runs callbacks in the order of their time, and of scheduling where the times are equal."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        self._stopped = False

    def __call__(self) -> float:
        return self.now_s

    def at(self, when_s: float, callback: Callable[..., None], *arguments: Any) -> None:
        """Schedule a callback at a time; a time in the past counts as now."""
        self._sequence += 1
        heappush(
            self._heap, (when_s if when_s > self.now_s else self.now_s, self._sequence, callback, arguments)
        )

    def after(self, seconds: float, callback: Callable[..., None], *arguments: Any) -> None:
        """Schedule a callback after a delay."""
        self._sequence += 1
        heappush(self._heap, (self.now_s + seconds, self._sequence, callback, arguments))

    def stop(self) -> None:
        """Discard the remaining callbacks."""
        self._stopped = True

    def run(self) -> None:
        """Run until no callback is left, or until `stop`."""
        heap = self._heap
        while heap and not self._stopped:
            self.now_s, _, callback, arguments = heappop(heap)
            callback(*arguments)
