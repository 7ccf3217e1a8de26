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
        self._asked: dict[int, asyncio.Future[pm.Turned]] = {}
        self._lost = ""
        self.freed_bytes = 0  # by the last sleep

    async def sleep(self) -> str:
        """Have the idle engine free its memory; return an empty string, or the reason for a refusal."""
        answer = await self._answered(lambda call: pm.Turn(call, asleep=True))
        self.freed_bytes = answer.size_bytes
        return answer.refusal

    async def wake(self) -> str:
        """Have the engine restore its memory; return an empty string, or the reason for a refusal."""
        return (await self._answered(lambda call: pm.Turn(call, asleep=False))).refusal

    async def hold(self, extra_bytes: int) -> int:
        """Let keys and values have so many bytes beyond the engine's own; return how many they have."""
        return (await self._answered(lambda call: pm.Hold(call, extra_bytes))).size_bytes

    async def _answered(self, question: Callable[[int], pm.Message]) -> pm.Turned:
        if self._lost:
            return pm.Turned(0, self._lost)
        call, answer = next(self._next_call), asyncio.get_running_loop().create_future()
        self._asked[call] = answer
        self._send(question(call))
        found: pm.Turned = await answer
        return found

    def handle(self, message: pm.Turned) -> None:
        _resolve(self._asked.pop(message.call), message)

    def lose(self, reason: str) -> None:
        """Answer all pending calls with a refusal, since the process is lost."""
        self._lost = f"the engine is lost: {reason}"
        asked, self._asked = self._asked, {}
        for each in asked.values():
            _resolve(each, pm.Turned(0, self._lost))


def _resolve(answer: asyncio.Future[pm.Turned], value: pm.Turned) -> None:
    if not answer.done():  # nobody waits any more
        answer.set_result(value)


class Turns(Protocol):
    """The part of a `Sleeper` that messages use. `freed_bytes`: bytes freed by the last sleep. `shares`: the
    device whose memory the engine shares with others while it sleeps, empty if it shares none.
    """

    @property
    def shares(self) -> str: ...
    @property
    def freed_bytes(self) -> int: ...

    def sleep(self) -> str:
        """Put the engine to sleep; return an empty string, or the reason if it cannot. As does `wake`."""

    def wake(self) -> str: ...

    def hold(self, extra_bytes: int) -> int:
        """Let keys and values have so many bytes beyond the engine's own; return how many they have."""


class SleepServer:
    """The engine's side. If `engine` is None it cannot sleep, and its process must be ended instead."""

    def __init__(
        self,
        engine: Turns | None,
        between: Callable[[Callable[[], pm.Turned], Callable[[pm.Turned], None]], None],
        put: Callable[[pm.Message], None],
    ) -> None:
        """`between` runs something between two iterations, and passes on what it returns."""
        self._engine = engine
        self._between = between
        self._put = put

    def handle(self, message: pm.Turn | pm.Hold) -> None:
        self._between(partial(self._act, message), self._put)

    def _act(self, message: pm.Turn | pm.Hold) -> pm.Turned:
        engine, call = self._engine, message.call
        if engine is None:
            return pm.Turned(call, "this engine keeps no weights in host memory")
        if isinstance(message, pm.Hold):
            return pm.Turned(call, "", engine.hold(message.extra_bytes))
        refusal = engine.sleep() if message.asleep else engine.wake()
        return pm.Turned(call, refusal, engine.freed_bytes)
