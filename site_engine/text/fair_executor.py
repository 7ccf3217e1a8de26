"""Work of many tenants on one thread: each tenant's in its own order, the tenants by turns."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

Work = Callable[[], object]


class FairExecutor:
    """Whoever has little to do waits for one piece of each other tenant's work at most, not for all of it."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[tuple[Work, Future[None]]]] = OrderedDict()

    def submit(self, tenant: str, work: Work) -> Future[None]:
        """From any thread. The future is done when the work is, however it ended."""
        done: Future[None] = Future()
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append((work, done))
        self._thread.submit(self._take_turn)
        return done

    def close(self) -> None:
        """What has not begun never will, and is never done."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _take_turn(self) -> None:
        with self._lock:
            tenant, theirs = self._waiting.popitem(last=False)
            work, done = theirs.popleft()
            if theirs:
                self._waiting[tenant] = theirs
        try:
            work()
        finally:
            done.set_result(None)
