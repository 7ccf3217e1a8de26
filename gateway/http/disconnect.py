"""Work for a client is done only while the client is there, whether or not anything has been sent yet."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from litestar.types import Receive

from gateway.errors import DeadlinePassed


async def while_connected(
    work: Coroutine[object, object, None], receive: Receive, *, within_s: float
) -> None:
    """Do `work` to its end, or cancel it when the client goes away; return when `work` has wound up.

    A client that stays but stops reading blocks `work` in its writes, so there is a limit of time as well.
    Raises what `work` raises, and DeadlinePassed.
    """
    over = _Over()
    leaving = asyncio.create_task(_left(receive))
    leaving.add_done_callback(over.gone)
    alarm = asyncio.get_running_loop().call_later(within_s, over.late)
    try:
        await work
    except asyncio.CancelledError:
        if not over.is_why():
            raise
        if over.was_late:
            raise DeadlinePassed(f"the answer could not be delivered within {within_s:.0f} s") from None
    finally:
        over.task = None
        alarm.cancel()
        leaving.cancel()


class _Over:
    """Cancels the task in which it was made, at most once; tells its cancellation from another's."""

    def __init__(self) -> None:
        self.task = asyncio.current_task()
        self.was_late = False
        self._asked_before = self.task.cancelling() if self.task else 0
        self._cancelled = False

    def gone(self, _: object) -> None:
        if self.task is not None and not self._cancelled:
            self._cancelled = self.task.cancel()

    def late(self) -> None:
        self.was_late = not self._cancelled
        self.gone(None)

    def is_why(self) -> bool:
        """Whether nobody else cancelled the task."""
        return self._cancelled and self.task is not None and self.task.uncancel() <= self._asked_before


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
