"""How often an address may fail to prove who it is. Does not hold up anybody who can."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

MAX_FAILURES = 60.0
FAILURES_PER_S = 1.0
MAX_ADDRESSES = 10_000


class LoginLimiter:
    """Each address may fail MAX_FAILURES times at once and FAILURES_PER_S times a second in the long run.

    Of more than MAX_ADDRESSES addresses those whose last failure is oldest are forgotten.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: OrderedDict[str, tuple[float, float]] = OrderedDict()  # failures so far, as of when

    def wait_s(self, address: str) -> float:
        """0.0 if it may try once more, else for how long it is not listened to."""
        return max(0.0, (self._level(address) + 1 - MAX_FAILURES) / FAILURES_PER_S)

    def record_failure(self, address: str) -> None:
        level = min(MAX_FAILURES, self._level(address) + 1)
        self._seen[address] = level, self._clock()
        self._seen.move_to_end(address)
        if len(self._seen) > MAX_ADDRESSES:
            self._seen.popitem(last=False)

    def _level(self, address: str) -> float:
        level, at_s = self._seen.get(address, (0.0, 0.0))
        return max(0.0, level - (self._clock() - at_s) * FAILURES_PER_S)
