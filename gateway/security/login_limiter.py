"""Limit how often an address may fail to authenticate. Does not delay valid credentials."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

MAX_FAILURES = 60.0
FAILURES_PER_S = 1.0
MAX_ADDRESSES = 10_000


class LoginLimiter:
    """Leaky bucket by address: MAX_FAILURES failures at once, FAILURES_PER_S a second in the long run.

    Above MAX_ADDRESSES, the address whose last failure is oldest is dropped.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # by address: the level of the bucket, and when it was computed
        self._seen = OrderedDict[str, tuple[float, float]]()

    def wait_s(self, address: str) -> float:
        """Return the seconds until the address may try again, 0.0 if it may now."""
        return max(0.0, (self._level(address) + 1 - MAX_FAILURES) / FAILURES_PER_S)

    def record_failure(self, address: str) -> None:
        """Count a failed attempt of the address."""
        level = min(MAX_FAILURES, self._level(address) + 1)
        self._seen[address] = level, self._clock()
        self._seen.move_to_end(address)
        if len(self._seen) > MAX_ADDRESSES:
            self._seen.popitem(last=False)

    def _level(self, address: str) -> float:
        level, at_s = self._seen.get(address, (0.0, 0.0))
        return max(0.0, level - (self._clock() - at_s) * FAILURES_PER_S)
