"""Work for a client is done only while the client is there, whether or not anything has been sent yet."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from litestar.types import Receive


async def while_connected(work: Coroutine[object, object, None], receive: Receive) -> None:
    """Runs `work` to its end, or cancels it when the client goes away. Returns when `work` has wound up."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait((working, leaving))
    if not working.cancelled():
        working.result()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
