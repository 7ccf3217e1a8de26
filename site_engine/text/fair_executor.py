"""Run the work of many tenants on one thread, with round-robin scheduling between tenants."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeAlias

Work: TypeAlias = Iterator[None]
"""Each `next` runs one step. Steps can't be interrupted and should therefore be short."""


class _Waiting(NamedTuple):
    work: Work
    is_wanted: Callable[[], bool]
    done: Future[None]


class FairExecutor:
    """Run steps of work in round-robin order over tenants, and over the work items of each tenant.

    Work that is no longer wanted is dropped before its next step.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[_Waiting]] = OrderedDict()

    def submit(self, tenant: str, work: Work, is_wanted: Callable[[], bool]) -> Future[None]:
        """Queue work. Thread-safe. The future completes when the work ends, fails or is dropped."""
        waiting = _Waiting(work, is_wanted, Future())
        self._put(tenant, waiting)
        return waiting.done

    def close(self) -> None:
        """Drop unfinished work. Its futures never complete."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _put(self, tenant: str, waiting: _Waiting) -> None:
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append(waiting)
        self._thread.submit(self._take_turn)

    def _take_turn(self) -> None:
        with self._lock:
            tenant, queue = self._waiting.popitem(last=False)
            waiting = queue.popleft()
            if queue:
                self._waiting[tenant] = queue
        goes_on = False
        try:
            goes_on = waiting.is_wanted() and next(waiting.work, self) is None
        finally:
            if goes_on:
                self._put(tenant, waiting)
            else:
                waiting.done.set_result(None)
