"""Delete old rows in small steps, so that no delete delays a write: decisions early, usage and audit late."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Column, Table, delete, select, tuple_
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.store.database import reason
from gateway.store.tables import audit, decisions, site_events, site_hours, usage
from gateway.tasks import cancel

logger = logging.getLogger(__name__)

DAY_S: Final = 86_400.0
SWEEP_INTERVAL_S: Final = 3_600.0
FIRST_SWEEP_S: Final = 600.0
"""Time from the start of a process until it deletes: a machine that has just booted may not know the time."""
ROWS_PER_STEP: Final = 500
PAUSE_S: Final = 0.05
"""Pause between two steps: SQLite has one writer, and the recorder has precedence."""


@dataclass(frozen=True, slots=True)
class RetentionPeriods:
    """Days for which rows are kept.

    A decision is about five times as large as the usage that it explains.
    """

    usage_days: float = 400.0
    decisions_days: float = 30.0
    audit_days: float = 730.0
    site_events_days: float = 90.0


class Retention:
    """Deletes rows older than `periods` by `clock`, every SWEEP_INTERVAL_S."""

    def __init__(self, engine: AsyncEngine, periods: RetentionPeriods, *, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._periods = periods
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._sweep_for_ever())

    async def close(self) -> None:
        await cancel(self._task)

    async def sweep(self) -> int:
        """Delete all rows that are too old; return their number. Several replicas may sweep at once."""
        removed = await self._remove(decisions, decisions.c.received_at, self._periods.decisions_days)
        removed += await self._remove(usage, usage.c.received_at, self._periods.usage_days)
        removed += await self._remove(site_hours, site_hours.c.hour, self._periods.usage_days)
        removed += await self._remove(site_events, site_events.c.at, self._periods.site_events_days)
        return removed + await self._remove(audit, audit.c.at, self._periods.audit_days)

    async def _remove(self, table: Table, at: Column[float], days: float) -> int:
        # the whole key, so that no replica deletes a row that another has locked
        key = tuple(table.primary_key.columns)
        too_old = (
            select(*key)
            .where(at < self._clock() - days * DAY_S)
            .order_by(at)
            .limit(ROWS_PER_STEP)
            .with_for_update(skip_locked=True)  # on Postgres: replicas never wait for each other
        )
        removed = 0
        while True:
            async with self._engine.begin() as connection:
                step = await connection.execute(delete(table).where(tuple_(*key).in_(too_old)))
            removed += step.rowcount
            if step.rowcount == 0:
                return removed
            await asyncio.sleep(PAUSE_S)

    async def _sweep_for_ever(self) -> None:
        await asyncio.sleep(FIRST_SWEEP_S)
        while True:
            try:
                if removed := await self.sweep():
                    logger.info("removed %d rows that were too old", removed)
            except (SQLAlchemyError, OSError) as exc:
                logger.warning("old rows stay for another hour: %s", reason(exc))
            except Exception:
                logger.exception("removing old rows went wrong in an unforeseen way")
            await asyncio.sleep(SWEEP_INTERVAL_S)
