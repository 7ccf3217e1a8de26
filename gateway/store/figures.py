"""A day of figures, one row a minute, so that a page which opens after a restart still shows yesterday."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.store.engine import insert_new
from gateway.store.tables import history

KEPT_MINUTES: Final = 25 * 60


class Figures:
    """May raise SQLAlchemy's errors. Of several replicas, the first to write a minute wins."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def save(self, minute: int, sample: dict[str, Any]) -> None:
        async with self._engine.begin() as connection:
            await connection.execute(
                insert_new(self._engine.dialect.name, history), {"minute": minute, "sample": sample}
            )
            await connection.execute(delete(history).where(history.c.minute < minute - KEPT_MINUTES))

    async def since(self, minute: int) -> list[tuple[int, dict[str, Any]]]:
        """Oldest first."""
        kept = select(history).where(history.c.minute >= minute).order_by(history.c.minute)
        async with self._engine.connect() as connection:
            return [(row.minute, row.sample) for row in await connection.execute(kept)]
