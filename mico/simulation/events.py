"""The virtual clock: what is to happen, in the order of its time. Nothing here waits."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Clock:
    """Calls come in the order of their time; those of one moment in the order they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._calls: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0
        self._stopped = False

    def __call__(self) -> float:
        return self.now_s

    def at(self, when_s: float, call: Callable[..., None], *arguments: Any) -> None:
        self._asked += 1
        heappush(self._calls, (when_s if when_s > self.now_s else self.now_s, self._asked, call, arguments))

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        self._asked += 1
        heappush(self._calls, (self.now_s + seconds, self._asked, call, arguments))

    def stop(self) -> None:
        """What else was to happen is not wanted any more."""
        self._stopped = True

    def run(self) -> None:
        """Until nothing is left to happen, or `stop`."""
        calls = self._calls
        while calls and not self._stopped:
            self.now_s, _, call, arguments = heappop(calls)
            call(*arguments)
