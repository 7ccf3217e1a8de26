"""Cancels the work for a client when the client disconnects, whether or not anything was sent before."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from litestar.types import Receive

from gateway.errors import DeadlinePassed

T = TypeVar("T")


LEFT = "left"
"""Key, in a request's state, of the future that is done once the client disconnects."""


async def while_connected(
    work: Coroutine[object, object, T],
    receive: Receive,
    *,
    within_s: float,
    left: asyncio.Future[None] | None = None,
) -> T | None:
    """Return the result of `work`. When the client disconnects, cancel `work` and return None once it has
    cleaned up.

    `left` is a future that is done once the client disconnects; without it, a task awaits the disconnect
    from `receive`. A client that stays connected but stops reading blocks `work` in its writes, hence the
    limit of `within_s` seconds. Raises the errors of `work`, and DeadlinePassed after `within_s`.
    """
    cancellation = _Cancellation()
    disconnect = left or asyncio.create_task(_wait_for_disconnect(receive))
    disconnect.add_done_callback(cancellation.on_disconnect)
    timer = asyncio.get_running_loop().call_later(within_s, cancellation.on_timeout)
    try:
        return await work
    except asyncio.CancelledError:
        if not cancellation.is_cause():
            raise
        if cancellation.timed_out:
            raise DeadlinePassed(f"the answer could not be delivered within {within_s:.0f} s") from None
        return None
    finally:
        cancellation.task = None
        timer.cancel()
        disconnect.remove_done_callback(cancellation.on_disconnect)
        if disconnect is not left:
            disconnect.cancel()


class _Cancellation:
    """Cancels the current task at most once, and distinguishes this from another caller's cancellation."""

    def __init__(self) -> None:
        self.task = asyncio.current_task()
        self.timed_out = False
        self._cancelling_before = self.task.cancelling() if self.task else 0
        self._cancelled = False

    def on_disconnect(self, _: object) -> None:
        if self.task is not None and not self._cancelled:
            self._cancelled = self.task.cancel()

    def on_timeout(self) -> None:
        self.timed_out = not self._cancelled
        self.on_disconnect(None)

    def is_cause(self) -> bool:
        """Undo this cancellation and return whether it was the only one."""
        return self._cancelled and self.task is not None and self.task.uncancel() <= self._cancelling_before


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
