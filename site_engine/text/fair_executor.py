"""Run the work of many tenants on one thread: each tenant's in its own order, the tenants by turns."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

Work = Callable[[], object]


class FairExecutor:
    """A tenant with little work waits for one item of each other tenant's at most, not for all of them."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[tuple[Work, Future[None]]]] = OrderedDict()

    def submit(self, tenant: str, work: Work) -> Future[None]:
        """Queue work, from any thread. The future is done when the work is, however it ended."""
        done: Future[None] = Future()
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append((work, done))
        self._thread.submit(self._take_turn)
        return done

    def close(self) -> None:
        """Drop work that has not begun; its futures are never done."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _take_turn(self) -> None:
        with self._lock:
            tenant, queue = self._waiting.popitem(last=False)
            work, done = queue.popleft()
            if queue:
                self._waiting[tenant] = queue
        try:
            work()
        finally:
            done.set_result(None)
