"""Bound the waits of one query by its deadline and by the shutdown of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from gateway.errors import DeadlinePassed, MicoError, ShuttingDown
from gateway.query.context import QueryContext
from gateway.query.state import QueryState

T = TypeVar("T")


class Deadline:
    """Bounds the waits of one query. `state.expire()` ends the wait in progress."""

    __slots__ = ("_context", "_state")

    def __init__(self, context: QueryContext, state: QueryState) -> None:
        self._context = context
        self._state = state

    async def wait(self, work: Awaitable[T]) -> T:
        """Await `work` until the deadline. Raises DeadlinePassed, or ShuttingDown at shutdown."""
        try:
            async with asyncio.timeout(self.left_s()) as self._state.wait_timeout:
                return await work
        except TimeoutError as exc:
            raise self.error() from exc

    def left_s(self) -> float:
        """Return the seconds until the deadline; 0 or less once it has passed or the process shuts down."""
        context = self._context
        return 0.0 if context.shutting_down else self._state.query.deadline_s - context.clock()

    def error(self) -> MicoError:
        """Return the error for the client of an expired query: ShuttingDown or DeadlinePassed."""
        if self._context.shutting_down:
            return ShuttingDown("this gateway is shutting down; send the request again")
        waited_s = self._context.clock() - self._state.query.received_s
        return DeadlinePassed(f"the answer was not complete after {waited_s:.0f} s")
