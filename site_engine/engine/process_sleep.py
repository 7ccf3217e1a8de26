"""Sleep and wake of an engine in its process, as messages: the side of the site, and the engine's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Protocol

from site_engine.engine import process_messages as pm


class RemoteSleep:
    """The site's side."""

    def __init__(self, send: Callable[[pm.Message], None]) -> None:
        self._send = send
        self._next_call = count(1)
        self._asked: dict[int, asyncio.Future[str]] = {}
        self._lost = ""

    async def sleep(self) -> str:
        """Let the engine, in which nothing runs, give up its memory; return why not, or nothing."""
        return await self._turned(asleep=True)

    async def wake(self) -> str:
        """Let the engine have its memory again; return why not, or nothing."""
        return await self._turned(asleep=False)

    async def _turned(self, *, asleep: bool) -> str:
        if self._lost:
            return self._lost
        call, answer = next(self._next_call), asyncio.get_running_loop().create_future()
        self._asked[call] = answer
        self._send(pm.Turn(call, asleep))
        return str(await answer)

    def handle(self, message: pm.Turned) -> None:
        _resolve(self._asked.pop(message.call), message.refusal)

    def lose(self, reason: str) -> None:
        """Answer all that waits: the process is lost."""
        self._lost = f"the engine is lost: {reason}"
        asked, self._asked = self._asked, {}
        for each in asked.values():
            _resolve(each, self._lost)


def _resolve(answer: asyncio.Future[str], value: str) -> None:
    if not answer.done():  # nobody waits any more
        answer.set_result(value)


class Turns(Protocol):
    """What lets an engine sleep. Both return why nothing has changed, or nothing."""

    def sleep(self) -> str: ...
    def wake(self) -> str: ...


class SleepServer:
    """The engine's side. Without an `engine` that may sleep, the process has to end instead."""

    def __init__(
        self,
        engine: Turns | None,
        between: Callable[[Callable[[], str], Callable[[str], None]], None],
        put: Callable[[pm.Message], None],
    ) -> None:
        """`between` runs something between two iterations, and passes on what it returns."""
        self._engine = engine
        self._between = between
        self._put = put

    def handle(self, message: pm.Turn) -> None:
        def act() -> str:
            if self._engine is None:
                return "this engine keeps no weights in host memory"
            return self._engine.sleep() if message.asleep else self._engine.wake()

        self._between(act, partial(self._turned, message.call))

    def _turned(self, call: int, refusal: str) -> None:
        self._put(pm.Turned(call, refusal))
