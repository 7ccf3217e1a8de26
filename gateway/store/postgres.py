"""Connections to Postgres whose calls end though their server be frozen: its kernel acknowledges what is
sent, so that no timeout of TCP notices, and its own `statement_timeout` is frozen, too.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final, TypeVar

from psycopg import AsyncConnection, Error, OperationalError
from psycopg.abc import PQGen
from psycopg.waiting import wait_async

ANSWER_WITHIN_S: Final = 30.0
PING_WITHIN_S: Final = 1.0
"""Shorter than any look at the database may take, so that the same look goes on over a new connection."""
STOP_WITHIN_S: Final = 0.5

T = TypeVar("T")


class Answering(AsyncConnection[Any]):
    """psycopg waits for an answer for ever and, where that is cancelled, for 10 s more for the end of the
    statement. SQLAlchemy throws a connection away that was cancelled: here it is closed at once.
    """

    async def wait(self, gen: PQGen[T], interval: float = 0.1, **more: Any) -> T:  # type: ignore[override]
        """Raises OperationalError when no answer came in time."""
        within_s = PING_WITHIN_S if self.autocommit else ANSWER_WITHIN_S  # SQLAlchemy pings so, nobody else
        try:
            async with asyncio.timeout(within_s):
                return await wait_async(gen, self.pgconn.socket, interval=interval, **more)
        except asyncio.CancelledError:
            await self._let_go()
            raise
        except TimeoutError as exc:
            await self._let_go()
            raise OperationalError(f"no answer within {within_s:g} s") from exc

    async def _let_go(self) -> None:
        """A server that hears stops what it was at; nobody waits for one that does not."""
        try:
            with suppress(Error, TimeoutError):
                async with asyncio.timeout(0 if self.autocommit else STOP_WITHIN_S):
                    await self.cancel_safe()
        finally:
            self.pgconn.finish()
