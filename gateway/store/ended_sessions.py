"""Remember the sessions that were ended by signing out, on every replica, until they would have ended anyway.

A replica learns of the others' within REFRESH_S. While the database is away it knows those of before and its
own: the page goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from sqlalchemy import delete, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.store.database import insert_new, reason
from gateway.store.tables import ended_sessions as table

logger = logging.getLogger(__name__)

REFRESH_S: Final = 2.0
REFRESH_TIMEOUT_S: Final = 1.0
KEPT_S: Final = 86_400.0
"""Time after its end for which a session is remembered: clocks of replicas may differ."""


class EndedSessions:
    def __init__(
        self,
        engine: AsyncEngine,
        *,
        clock: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._unix_time = unix_time
        self._known: set[str] = set()
        self._own: dict[str, float] = {}
        self._read_at = float("-inf")

    async def end(self, session_id: str, until: float) -> None:
        """End a session, here at once. Raises SQLAlchemy's errors: then only here."""
        before = self._unix_time() - KEPT_S
        self._own = {each: end for each, end in self._own.items() if end >= before} | {session_id: until}
        async with self._engine.begin() as connection:
            new = {"id": session_id, "until": until}
            await connection.execute(insert_new(connection.dialect.name, table), new)
            await connection.execute(delete(table).where(table.c.until < before))

    async def has_ended(self, session_id: str) -> bool:
        if self._clock() - self._read_at >= REFRESH_S:
            self._read_at = self._clock()  # also if it fails: one request in REFRESH_S waits for the database
            await self._read()
        return session_id in self._known or session_id in self._own

    async def _read(self) -> None:
        try:
            async with asyncio.timeout(REFRESH_TIMEOUT_S), self._engine.connect() as connection:
                self._known = {*await connection.scalars(select(table.c.id))}
        except TimeoutError:
            logger.warning("ended sessions are as of the last look: no answer within %g s", REFRESH_TIMEOUT_S)
        except (SQLAlchemyError, OSError) as exc:
            logger.warning("ended sessions are as of the last look: %s", reason(exc))
