"""Let an engine sleep and wake in its process: without memory for weights, keys and values meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from site_engine.core.prefix_cache import PrefixTree
from site_engine.errors import NoMemory
from site_engine.model.sleep_memory import SleepMemory

log = logging.getLogger(__name__)


class Sleeper:
    """Of an engine in which nothing runs. To be used between two iterations."""

    def __init__(
        self,
        memory: SleepMemory,
        prefixes: PrefixTree | None,
        settle: Callable[[], None],
        hold: Callable[[int], int],
    ) -> None:
        """`settle` waits for what the device still computes. `hold` gets and gives up memory beyond the
        engine's own.
        """
        self._memory = memory
        self._prefixes = prefixes
        self._settle = settle
        self.hold = hold
        self.freed_bytes = 0  # while it sleeps

    def sleep(self) -> str:
        """Give up the memory; return why not, or nothing."""
        began_s = time.monotonic()
        self._settle()
        self.hold(0)
        if self._prefixes is not None:
            self._prefixes.clear()
        try:
            self.freed_bytes = self._memory.sleep()
        except NoMemory as exc:
            return str(exc)
        log.info("the engine sleeps: %d bytes freed in %.2f s", self.freed_bytes, time.monotonic() - began_s)
        return ""

    def wake(self) -> str:
        """Have the memory again; return why not, or nothing."""
        began_s = time.monotonic()
        try:
            self._memory.wake()
        except NoMemory as exc:
            return str(exc)
        log.info("the engine woke in %.2f s", time.monotonic() - began_s)
        return ""


def sleeper_of(
    memory: SleepMemory | None,
    prefixes: PrefixTree | None,
    settle: Callable[[], None],
    hold: Callable[[int], int],
) -> Sleeper | None:
    """Return what lets an engine sleep, if it has memory that can come and go."""
    return None if memory is None else Sleeper(memory, prefixes, settle, hold)
