"""Let the engines of a pool sleep: their processes end, so that nothing is left on the devices, and start
again when the pool wakes. Those that keep their weights in host memory stay, and give up the devices' memory.

Lives on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeAlias

from site_engine.pool.replica import Replica

log = logging.getLogger(__name__)

Reply: TypeAlias = Callable[[str], None]
"""Takes why nothing has changed, or nothing."""


class PoolSleep:
    """`asleep`: requests are refused. The processes rest once requests and jobs of training have ended."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        serves: Callable[[], bool],
        trains: Callable[[], bool],
        start: Callable[[Replica], Awaitable[None]],
        restart: Callable[[Replica], None],
        begin: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """`serves` returns whether requests run or wait, `trains` whether adapters are trained.

        `start` starts a process and lets it serve, or raises; `restart` tries until it serves.
        """
        self.asleep = False
        self._turning = asyncio.Lock()
        self._replicas = replicas
        self._serves = serves
        self.trains = trains
        self._start = start
        self._restart = restart
        self._begin = begin
        self._slept: Reply | None = None  # while requests run

    def sleep(self, reply: Reply) -> None:
        """Let all engines sleep; reply when they do."""
        self.asleep, self._slept = True, reply
        self.look()

    def look(self) -> None:
        """Let the processes rest if they are to and nothing runs. To be called when requests have ended."""
        if self._slept is not None and not (self._serves() or self.trains()):
            slept, self._slept = self._slept, None
            self._begin(self._rest(slept))

    def wake(self, reply: Reply) -> None:
        """Let all engines serve again; reply when they do, or why they sleep on."""
        if self._slept is None:
            self._begin(self._wake(reply))
            return
        slept, self._slept = self._slept, None
        self._wakened()
        slept("it was woken before its requests had ended")
        reply("")

    async def _rest(self, slept: Reply) -> None:
        async with self._turning:
            await self._end()
        slept("")

    async def _wake(self, reply: Reply) -> None:
        async with self._turning:
            starts = map(self._started, self._replicas if self.asleep else ())
            found = await asyncio.gather(*starts, return_exceptions=True)
            failures = [each for each in found if each is not None]
            if failures:
                log.error("an engine does not wake: %s", failures[0])
                await self._end()
            elif self.asleep:
                self._wakened()
        reply(str(failures[0]) or repr(failures[0]) if failures else "")

    def _wakened(self) -> None:
        """Serve from now on, also with engines that were lost while nobody started them again."""
        self.asleep = False
        for each in self._replicas:
            if not each.serves:
                self._restart(each)

    async def _end(self) -> None:
        await asyncio.gather(*(each.rest() for each in self._replicas))

    async def _started(self, replica: Replica) -> None:
        async with replica.turning:
            if not (replica.serves or await replica.wake()):
                await self._start(replica)
