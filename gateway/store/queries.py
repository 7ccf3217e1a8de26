"""What operators ask of the store. Never on the way of a query."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from sqlalchemy import Row, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.domain import Attempt
from gateway.operator_orders import AuditEntry
from gateway.site_events import Event
from gateway.store.rows import DecisionRow, EventRow, UsageRow, attempt_of, event_of
from gateway.store.tables import audit, decisions, site_events, usage

EXPLAINED_AT_MOST = 20
NEWEST = (site_events.c.at.desc(), site_events.c.id.desc())


class TotalBy(StrEnum):
    TENANT = "tenant"
    MODEL = "model"
    SITE = "site"
    CLOUD = "cloud"


@dataclass(frozen=True, slots=True)
class Total:
    """Sums over one tenant, model, site or cloud. Site and cloud "" are of what never reached one."""

    name: str
    queries: int
    prompt_tokens: int
    completion_tokens: int


class SiteHistory(NamedTuple):
    """What happened to one site, and what operators did to it; each newest first."""

    events: list[EventRow]
    entries: list[AuditEntry]


@dataclass(frozen=True, slots=True)
class Explained:
    """Why a query went where it went, and what happened."""

    usage: UsageRow
    attempts: tuple[Attempt, ...]


class Reads:
    """May raise SQLAlchemy's errors: its callers are commands and pages, not queries."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def explain(self, any_id: str) -> list[Explained]:
        """By request id, query id or the answer's own id, newest first; several when one was used again."""
        query_id = any_id.removeprefix("chatcmpl-").removeprefix("cmpl-")
        named = or_(usage.c.request_id == any_id, usage.c.query_id == query_id)
        newest = select(usage).where(named).order_by(usage.c.received_at.desc()).limit(EXPLAINED_AT_MOST)
        async with self._engine.connect() as connection:
            rows = [_usage_row(row) for row in await connection.execute(newest)]
            return [Explained(row, await _attempts(connection, row)) for row in rows]

    async def count_usage(self) -> int:
        async with self._engine.connect() as connection:
            return (await connection.execute(select(func.count()).select_from(usage))).scalar_one()

    async def totals(self, by: TotalBy, *, since: float = 0.0) -> list[Total]:
        """Of queries received at `since` (unix time) or later, most completion tokens first."""
        name = usage.c[by.value]
        completion = func.sum(usage.c.completion_tokens)
        sums = (
            select(name, func.count(), func.sum(usage.c.prompt_tokens), completion)
            .where(usage.c.received_at >= since)
            .group_by(name)
            .order_by(completion.desc(), name)
        )
        async with self._engine.connect() as connection:
            found = await connection.execute(sums)
            return [Total(who, queries, int(prompt), int(answer)) for who, queries, prompt, answer in found]

    async def site(self, name: str, most: int) -> SiteHistory:
        """As all replicas saw it; at most `most` of each."""
        events = select(site_events).where(site_events.c.site == name)
        entries = select(audit).where(audit.c.site == name)
        async with self._engine.connect() as connection:
            seen = await connection.execute(events.order_by(*NEWEST).limit(most))
            done = await connection.execute(entries.order_by(audit.c.at.desc(), audit.c.id).limit(most))
            return SiteHistory(
                [EventRow(**row._mapping) for row in seen], [AuditEntry(**row._mapping) for row in done]
            )

    async def seen_by(self, replica: str, since: float, most: int) -> list[Event]:
        """The newest events that this replica wrote down at `since` (unix time) or later, newest first."""
        its_own = select(site_events).where(site_events.c.at >= since, site_events.c.replica == replica)
        async with self._engine.connect() as connection:
            found = await connection.execute(its_own.order_by(*NEWEST).limit(most))
            return [event_of(EventRow(**row._mapping)) for row in found]


async def _attempts(connection: AsyncConnection, row: UsageRow) -> tuple[Attempt, ...]:
    in_order = select(decisions).where(decisions.c.query_id == row.query_id).order_by(decisions.c.attempt)
    found = await connection.execute(in_order)
    return tuple(attempt_of(_decision_row(each)) for each in found)


def _usage_row(row: Row[Any]) -> UsageRow:
    return UsageRow(**row._mapping)


def _decision_row(row: Row[Any]) -> DecisionRow:
    return DecisionRow(**row._mapping)
