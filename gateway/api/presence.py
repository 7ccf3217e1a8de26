"""Work for a client is done only while the client is there, whether or not anything has been sent yet."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from litestar.types import Receive

from gateway.errors import DeadlinePassed


async def while_connected(
    work: Coroutine[object, object, None], receive: Receive, *, within_s: float
) -> None:
    """Run `work` to its end, or cancel it when the client goes away; return when `work` has wound up.

    A client that stays but stops reading blocks `work` in its writes, so there is a limit of time as well.
    Raises what `work` raises, and DeadlinePassed.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(receive))
    over = False
    try:
        done, _ = await asyncio.wait(
            (working, leaving), timeout=within_s, return_when=asyncio.FIRST_COMPLETED
        )
        over = not done
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait((working, leaving))
    if not working.cancelled():
        working.result()
    elif over:
        raise DeadlinePassed(f"the answer could not be delivered within {within_s:.0f} s")


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
