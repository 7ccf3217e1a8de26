"""Let an engine sleep and wake in its process. Sleep frees the memory of weights, keys and values."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from site_engine.core.scheduler import Scheduler
from site_engine.errors import NoMemory
from site_engine.model.kv_cache import KVCache
from site_engine.model.sleep_memory import SleepMemory

log = logging.getLogger(__name__)


class Sleeper:
    """Lets one engine sleep and wake. Must be used between iterations; the engine may sleep only when idle.

    An awake engine's KV cache can use extra memory, from engines that sleep.
    """

    def __init__(
        self, kv_cache: KVCache, memory: SleepMemory, scheduler: Scheduler, settle: Callable[[], None]
    ) -> None:
        """`settle` waits for the device's pending step."""
        self._kv_cache = kv_cache
        self._memory = memory
        self._scheduler = scheduler
        self._kv_cache_manager = scheduler.kv_cache_manager
        self._settle = settle
        self._asleep = False
        self.freed_bytes = 0  # by the last sleep

    @property
    def shares(self) -> str:
        return self._memory.shares

    def hold(self, extra_bytes: int) -> int:
        """Give the KV cache `extra_bytes` bytes of extra memory, or as many as there are; return the bytes
        held, 0 while asleep. Requests with pages in released memory are preempted.
        """
        if self._asleep:
            return 0
        kv_cache, wanted = self._kv_cache, self._kv_cache.pages_with(extra_bytes)
        if wanted < kv_cache.end:
            self._settle()
            end = kv_cache.end_within(wanted)
            self._scheduler.preempt_beyond(end)
            if self._kv_cache_manager.prefixes is not None:
                self._kv_cache_manager.prefixes.forget(range(end + 1, kv_cache.end + 1))
            self._kv_cache_manager.pool.move_end(end)
            kv_cache.resize(end)
        if wanted > kv_cache.end:
            try:
                kv_cache.resize(wanted)
            except NoMemory as exc:
                log.warning("keys and values get no %d bytes more: %s", extra_bytes, exc)
            self._kv_cache_manager.pool.move_end(kv_cache.end)
        return kv_cache.extra_bytes

    def sleep(self) -> str:
        """Free the memory; return an empty string, or the reason if it cannot be freed."""
        began_s = time.monotonic()
        self._settle()
        self.hold(0)
        if self._kv_cache_manager.prefixes is not None:
            self._kv_cache_manager.prefixes.clear()
        try:
            self.freed_bytes = self._memory.sleep()
        except NoMemory as exc:
            return str(exc)
        self._asleep = True
        log.info("the engine sleeps: %d bytes freed in %.2f s", self.freed_bytes, time.monotonic() - began_s)
        return ""

    def wake(self) -> str:
        """Restore the memory; return an empty string, or the reason if it cannot be restored."""
        began_s = time.monotonic()
        try:
            self._memory.wake()
        except NoMemory as exc:
            return str(exc)
        self._asleep = False
        log.info("the engine woke in %.2f s", time.monotonic() - began_s)
        return ""


def sleeper_of(kv_cache: KVCache, scheduler: Scheduler, settle: Callable[[], None]) -> Sleeper | None:
    """Return a Sleeper, or None if the engine's memory cannot be freed and restored."""
    memory = kv_cache.memory
    return None if memory is None else Sleeper(kv_cache, memory, scheduler, settle)
