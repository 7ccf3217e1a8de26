"""A pool whose engines wake, some later than others."""

from __future__ import annotations

import asyncio
from typing import Any

from site_engine.pool.sleeping import PoolSleep


class Engine:
    """An engine that sleeps and wakes when the test says so."""

    def __init__(self) -> None:
        self.serves = False
        self.turning = asyncio.Lock()
        self.may_wake, self.woke = asyncio.Event(), asyncio.Event()
        self.failure: Exception | None = None

    async def wake(self) -> bool:
        await self.may_wake.wait()
        if self.failure is not None:
            raise self.failure
        self.serves = True
        self.woke.set()
        return True

    async def rest(self) -> None:
        self.serves = False


class Pool:
    """Two engines that sleep."""

    def __init__(self) -> None:
        self.engines: Any = [Engine(), Engine()]
        self.restarted: list[Any] = []
        self.answers: list[str] = []
        self.sleeping = PoolSleep(
            self.engines,
            serves=lambda: False,
            trains=lambda: False,
            start=lambda replica: asyncio.sleep(0),
            restart=self.restarted.append,
            begin=self.begin,
        )
        self.sleeping.asleep = True

    def begin(self, work: Any) -> None:
        self.task = asyncio.ensure_future(work)


def test_an_engine_that_is_lost_while_others_wake_is_started_again() -> None:
    async def main() -> None:
        pool = Pool()
        first, second = pool.engines
        pool.sleeping.wake(pool.answers.append)
        first.may_wake.set()
        await first.woke.wait()
        first.serves = False  # nobody starts it again in a pool that sleeps
        second.may_wake.set()
        await pool.task
        assert pool.answers == [""]
        assert pool.restarted == [first]

    asyncio.run(main())


def test_a_failure_without_a_message_is_no_success() -> None:
    async def main() -> None:
        pool = Pool()
        pool.engines[0].failure = ConnectionResetError()
        for each in pool.engines:
            each.may_wake.set()
        pool.sleeping.wake(pool.answers.append)
        await pool.task
        assert pool.answers == ["ConnectionResetError()"]
        assert pool.sleeping.asleep

    asyncio.run(main())
