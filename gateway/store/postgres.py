"""Postgres connections whose calls time out even when the server process is frozen.

The kernel of a frozen server still acknowledges packets, so no TCP timeout fires, and the server's own
`statement_timeout` is frozen, too.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final, TypeVar

from psycopg import AsyncConnection, Error, OperationalError
from psycopg.abc import PQGen
from psycopg.waiting import wait_async

ANSWER_TIMEOUT_S: Final = 30.0
PING_TIMEOUT_S: Final = 1.0
"""Shorter than the timeout of any caller, so that the same call goes on over a new connection."""
CANCEL_TIMEOUT_S: Final = 0.5

T = TypeVar("T")


class TimeoutConnection(AsyncConnection[Any]):
    """A psycopg connection with a timeout for every answer.

    psycopg waits for an answer without limit and, when cancelled, up to 10 s more for the end of the
    statement. SQLAlchemy discards a connection that was cancelled anyway, so this one closes it at once.
    """

    async def wait(self, gen: PQGen[T], interval: float = 0.1, **more: Any) -> T:  # type: ignore[override]
        """Wait for the answer. Raises OperationalError when none comes in time."""
        is_ping = self.autocommit  # nothing else uses it
        within_s = PING_TIMEOUT_S if is_ping else ANSWER_TIMEOUT_S
        try:
            async with asyncio.timeout(within_s):
                return await wait_async(gen, self.pgconn.socket, interval=interval, **more)
        except asyncio.CancelledError:
            await self._abort()
            raise
        except TimeoutError as exc:
            await self._abort()
            raise OperationalError(f"no answer within {within_s:g} s") from exc

    async def _abort(self) -> None:
        """Cancel the statement, if the server responds in time, and close the connection."""
        try:
            with suppress(Error, TimeoutError):
                async with asyncio.timeout(0 if self.autocommit else CANCEL_TIMEOUT_S):
                    await self.cancel_safe()
        finally:
            self.pgconn.finish()
