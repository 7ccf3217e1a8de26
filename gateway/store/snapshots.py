"""Store what the dashboard must not lose: one history sample a minute for a day, and each replica's newest
summary.

Does not interpret samples or summaries: both are JSON here.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from sqlalchemy import bindparam, delete, insert, not_, select
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.store.database import insert_new
from gateway.store.tables import history, replica_figures

KEPT_MINUTES: Final = 25 * 60
EXPIRES_AFTER_S: Final = 3_600.0

_TABLE = replica_figures
_OWN_OR_EXPIRED = delete(_TABLE).where(
    (_TABLE.c.replica == bindparam("own")) | (_TABLE.c.at < bindparam("before"))
)
_OF_OTHERS = select(_TABLE).where(_TABLE.c.replica != bindparam("own")).order_by(_TABLE.c.replica)


class ReplicaSummary(NamedTuple):
    """The summary that one replica wrote; `at` is unix time on that replica's clock."""

    replica: str
    at: float
    summary: dict[str, Any]


class SnapshotTable:
    """Methods may raise SQLAlchemy's errors. Of several replicas, the first to write a minute wins."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def save(self, minute: int, sample: dict[str, Any]) -> None:
        """Store the sample of a minute (unix time / 60). Delete those older than KEPT_MINUTES, and those of a
        clock that was set back since.
        """
        async with self._engine.begin() as connection:
            await connection.execute(
                insert_new(self._engine.dialect.name, history), {"minute": minute, "sample": sample}
            )
            kept = history.c.minute.between(minute - KEPT_MINUTES, minute + 1)
            await connection.execute(delete(history).where(not_(kept)))

    async def since(self, minute: int) -> list[tuple[int, dict[str, Any]]]:
        """Return the samples from this minute on, oldest first."""
        kept = select(history).where(history.c.minute >= minute).order_by(history.c.minute)
        async with self._engine.connect() as connection:
            return [(row.minute, row.sample) for row in await connection.execute(kept)]

    async def exchange(self, own: ReplicaSummary) -> list[ReplicaSummary]:
        """Store this replica's summary; return the newest of every other replica, sorted by name."""
        async with self._engine.begin() as connection:
            await connection.execute(
                _OWN_OR_EXPIRED, {"own": own.replica, "before": own.at - EXPIRES_AFTER_S}
            )
            await connection.execute(insert(_TABLE), own._asdict())
            found = await connection.execute(_OF_OTHERS, {"own": own.replica})
            return [ReplicaSummary(*row) for row in found]
