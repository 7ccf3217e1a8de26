"""Keeps the events of jobs: numbered from 1 within a job, the newest ones of many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import and_, delete, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.batches.files import Page
from gateway.store.tables import tuning_events
from gateway.tuning.values import Event, StepFigures

INFO, WARN, ERROR = "info", "warn", "error"
MAX_MESSAGE_CHARS = 1_000


class Events:
    """The events of all jobs, of which `most` are kept for each. Methods may raise SQLAlchemy's errors."""

    def __init__(self, engine: AsyncEngine, clock: Callable[[], float], most: int) -> None:
        self._engine = engine
        self._clock = clock
        self._most = most

    async def list_page(self, job_id: str, page: Page) -> list[Event]:
        """Return the events of one page, and one more if there are more. Raises LookupError."""
        table = tuning_events
        query = select(table).where(table.c.job_id == job_id)
        if page.after is not None:
            after = event_number(job_id, page.after)
            query = query.where(table.c.number < after if page.newest_first else table.c.number > after)
        query = query.order_by(table.c.number.desc() if page.newest_first else table.c.number)
        async with self._engine.connect() as connection:
            rows = await connection.execute(query.limit(page.limit + 1))
            return [Event(row.number, row.at, row.level, row.message, row.data) for row in rows]

    async def list_losses(self, job_id: str, most: int) -> list[dict[str, Any]]:
        """Return the figures of recorded steps in their order, `most` at most: first, last and between."""
        table = tuning_events
        query = select(table.c.data).where(table.c.job_id == job_id).order_by(table.c.number)
        async with self._engine.connect() as connection:
            found = [data for data in await connection.scalars(query) if data is not None]
        count = min(most, len(found))
        return [found[place * (len(found) - 1) // max(1, count - 1)] for place in range(count)]

    async def add(
        self,
        connection: AsyncConnection,
        job_id: str,
        level: str,
        message: str,
        data: dict[str, Any] | None = None,
    ) -> None:
        """Add an event. The transaction wrote the job's row before, so that nobody else adds one now."""
        last = select(func.max(tuning_events.c.number)).where(tuning_events.c.job_id == job_id)
        number = int(await connection.scalar(last) or 0) + 1
        row = {"job_id": job_id, "number": number, "at": self._clock(), "level": level, "data": data}
        await connection.execute(insert(tuning_events), row | {"message": printable(message)})
        if number > self._most:
            old = and_(tuning_events.c.job_id == job_id, tuning_events.c.number <= number - self._most)
            await connection.execute(delete(tuning_events).where(old))

    async def add_step(
        self, connection: AsyncConnection, job_id: str, total_steps: int, figures: StepFigures
    ) -> None:
        data: dict[str, Any] = {
            "step": figures.step,
            "total_steps": total_steps,
            "train_loss": figures.loss,
            "train_mean_token_accuracy": figures.accuracy,
        }
        if figures.validation_loss is not None:
            data["valid_loss"] = figures.validation_loss
        message = f"Step {figures.step}/{total_steps}: training loss={figures.loss:.4f}"
        await self.add(connection, job_id, INFO, message, data)


def printable(text: str) -> str:
    """Return one line of text that every database can store, of at most MAX_MESSAGE_CHARS."""
    return "".join(each if each.isprintable() else " " for each in text[:MAX_MESSAGE_CHARS])


def event_id(job_id: str, number: int) -> str:
    return f"ftevent-{job_id.removeprefix('ftjob-')}-{number}"


def event_number(job_id: str, given: str) -> int:
    """Return the number of an event of the job by its id. Raises LookupError."""
    prefix = event_id(job_id, 0)[:-1]
    number = given.removeprefix(prefix)
    if not given.startswith(prefix) or not (number.isascii() and number.isdecimal() and len(number) < 10):
        raise LookupError(given)
    return int(number)
