"""Figures for the page: a day, one row a minute, that outlives a restart; and what each replica says now."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from sqlalchemy import bindparam, delete, insert, select
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.store.database import insert_new
from gateway.store.tables import history, replica_figures

KEPT_MINUTES: Final = 25 * 60
GONE_AFTER_S: Final = 3_600.0

_TABLE = replica_figures
_STALE = delete(_TABLE).where((_TABLE.c.replica == bindparam("mine")) | (_TABLE.c.at < bindparam("before")))
_OTHERS = select(_TABLE).where(_TABLE.c.replica != bindparam("mine")).order_by(_TABLE.c.replica)


class Written(NamedTuple):
    """`at` is the time of the replica that wrote it."""

    replica: str
    at: float
    summary: dict[str, Any]


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

    async def tell(self, mine: Written) -> list[Written]:
        """Write down what this replica says now; what the others said last comes back, by name."""
        async with self._engine.begin() as connection:
            await connection.execute(_STALE, {"mine": mine.replica, "before": mine.at - GONE_AFTER_S})
            await connection.execute(insert(_TABLE), mine._asdict())
            return [Written(*row) for row in await connection.execute(_OTHERS, {"mine": mine.replica})]
