"""Runs on one thread what would hold the event loop, while streams go on: tenants by turns."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

INLINE_BYTES = 64 * 1024
"""Larger bodies are decoded and read beside the event loop, which takes a millisecond for these."""


class SideWork:
    """One piece of work at a time; then the next of another tenant. Its callers bound how much waits.

    Work of a task that is cancelled while it waits is not run. The work should be many short steps: the
    event loop goes on between two of them, but not within one call of a C function.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "side-work")
        self._busy = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """Return what `work` returns, once it is the turn of `tenant`. Raises what `work` raises."""
        if self._busy:
            await self._turn(tenant)
        self._busy = True
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._pass_on()

    async def run_if_large(self, tenant: str, size_bytes: int, work: Callable[[], T]) -> T:
        """Return what `work` returns: called at once for a small input, else as `run` does."""
        return work() if size_bytes <= INLINE_BYTES else await self.run(tenant, work)

    async def _turn(self, tenant: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn had come
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give the turn to the tenant that has waited longest since its last one."""
        while self._waiting:
            tenant, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[tenant] = queue
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False
