"""Runs work that would block the event loop on one thread, tenants in turn."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

INLINE_BYTES = 64 * 1024
"""Larger bodies are decoded on the thread. A body of this size takes about a millisecond."""


class SideWork:
    """Runs one piece of work at a time, tenants in turn. Callers must bound the amount of waiting work.

    Work whose task is cancelled while it waits is not run. The work should consist of many short steps: the
    event loop can run between two steps, but not during one call of a C function.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "side-work")
        self._busy = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """Run `work` in the turn of `tenant` and return its result. Raises the errors of `work`."""
        if self._busy:
            await self._turn(tenant)
        self._busy = True
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._pass_on()

    async def run_if_large(self, tenant: str, size_bytes: int, work: Callable[[], T]) -> T:
        """Return the result of `work`, called at once for inputs up to INLINE_BYTES, else by `run`."""
        return work() if size_bytes <= INLINE_BYTES else await self.run(tenant, work)

    async def _turn(self, tenant: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn was already given
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give the turn to the tenant that has waited longest since its last turn."""
        while self._waiting:
            tenant, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[tenant] = queue
            if not turn.done():
                turn.set_result(None)
                return
        self._busy = False
