"""Unix time by the database's clock, which all replicas share: their own clocks may differ by any amount."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

STEP_S: Final = 60.0
"""A reading that is ahead of the time that has passed by more than this is a step of the database's clock."""
LASTS_S: Final = 3_600.0
"""A step ahead counts once it has lasted for this long: a clock that is wrong for a while ends no month, lets
no batch expire and deletes no row."""

_MACHINE: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def machine_time() -> float:
    """Return monotonic seconds that also pass while the machine is suspended, where the system has such."""
    return time.clock_gettime(_MACHINE)


class DatabaseClock:
    """Monotonic time plus what the database's clock was ahead of it at the last reading.

    Before the first reading it is this machine's unix time; while the database is away it goes on.
    """

    def __init__(
        self, *, clock: Callable[[], float] = machine_time, wall: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._ahead_s = wall() - clock()
        self._was_read = False
        self._stepped_at: float | None = None

    def __call__(self) -> float:
        """Return unix time in seconds."""
        return self._clock() + self._ahead_s

    def read(self, database_s: float) -> None:
        """Take note of the database's time."""
        now = self._clock()
        step_s = database_s - now - self._ahead_s
        if self._was_read and step_s > STEP_S:
            if self._stepped_at is None:
                self._stepped_at = now
                log.error("the database's clock is %.0f s ahead at once: ignored for %g s", step_s, LASTS_S)
            if now - self._stepped_at < LASTS_S:
                return
        self._ahead_s += step_s
        self._was_read, self._stepped_at = True, None
