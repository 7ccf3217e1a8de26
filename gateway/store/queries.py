"""Answer operators' reads: explain a query, sum usage, list events. Never on the path of a query."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.errors import Overloaded
from gateway.operator_orders import AuditEntry
from gateway.outcome import Attempt
from gateway.site_events import Event
from gateway.store.rows import DecisionRow, EventRow, UsageRow, attempt_of, event_of
from gateway.store.tables import audit, decisions, site_events, usage

ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_", "embd-", "rerank-")
"""The beginnings of the answers' ids in all formats; a query's id follows."""
MAX_PROMPTS = 128
"""Of one request; each is a query, whose id ends with its number."""
MAX_EXPLAINED = 20
READS_AT_ONCE, READS_WAITING = 2, 16
READ_WITHIN_S = 30.0
NEWEST_FIRST = (site_events.c.at.desc(), site_events.c.id.desc())


class TotalBy(StrEnum):
    TENANT = "tenant"
    MODEL = "model"
    SITE = "site"
    CLOUD = "cloud"


def total_by(names: str) -> list[TotalBy]:
    """Read names separated by commas. Raises ValueError that says which there are."""
    given = [name.strip() for name in names.split(",")]
    if len(set(given)) < len(given) or not set(given) <= set(TotalBy):
        raise ValueError(f"by is one or several of {', '.join(TotalBy)}, separated by commas")
    return [TotalBy(name) for name in given]


@dataclass(frozen=True, slots=True)
class Total:
    """Sums over one tenant, model, site or cloud, or of one of each of several. Site and cloud "" stand for
    queries that never reached one.

    `cheapest_nano_usd` and `dearest_nano_usd` are what the same tokens would have cost elsewhere.
    """

    names: tuple[str, ...]
    queries: int
    prompt_tokens: int
    completion_tokens: int
    nano_usd: int = 0
    cheapest_nano_usd: int = 0
    dearest_nano_usd: int = 0

    @property
    def name(self) -> str:
        return ", ".join(self.names)


class SiteHistory(NamedTuple):
    """Events of one site and operators' acts on it; each newest first."""

    events: list[EventRow]
    entries: list[AuditEntry]


@dataclass(frozen=True, slots=True)
class ExplainedQuery:
    """One query: its usage row and its attempts, each with the decision behind it."""

    usage: UsageRow
    attempts: tuple[Attempt, ...]


class OperatorReads:
    """Methods may raise SQLAlchemy's errors: the callers are commands and pages, not queries.

    However many ask, READS_AT_ONCE of the database's connections are theirs, for READ_WITHIN_S each; what is
    beyond READS_WAITING raises Overloaded.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._turns = asyncio.Semaphore(READS_AT_ONCE)
        self._asked = 0

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[AsyncConnection]:
        if self._asked >= READS_AT_ONCE + READS_WAITING:
            raise Overloaded("too many reads of the database wait already", retry_after_s=1.0)
        self._asked += 1
        try:
            async with self._turns, asyncio.timeout(READ_WITHIN_S), self._engine.connect() as connection:
                yield connection
        finally:
            self._asked -= 1

    async def explain(self, any_id: str) -> list[ExplainedQuery]:
        """Find queries by request id, query id or the answer's id, newest first.

        A reused request id finds several, and so does the id of an answer to several prompts.
        """
        named = or_(usage.c.request_id == any_id, usage.c.query_id.in_(_query_ids(any_id)))
        newest = select(usage).where(named).order_by(usage.c.received_at.desc()).limit(MAX_EXPLAINED)
        async with self._connection() as connection:
            rows = [UsageRow(**row._mapping) for row in await connection.execute(newest)]
            return [ExplainedQuery(row, await _attempts(connection, row)) for row in rows]

    async def count_usage(self) -> int:
        """Return the number of stored queries."""
        async with self._connection() as connection:
            return (await connection.execute(select(func.count()).select_from(usage))).scalar_one()

    async def totals(self, *by: TotalBy, since: float = 0.0) -> list[Total]:
        """Sum the queries received at `since` (unix time) or later; most completion tokens first. A query
        that was not priced counts as free.
        """
        names = [usage.c[each.value] for each in by]
        completion = func.sum(usage.c.completion_tokens)
        money = (usage.c.nano_usd, usage.c.cheapest_nano_usd, usage.c.dearest_nano_usd)
        summed = [func.coalesce(func.sum(column), 0) for column in money]
        sums = (
            select(*names, func.count(), func.sum(usage.c.prompt_tokens), completion, *summed)
            .where(usage.c.received_at >= since)
            .group_by(*names)
            .order_by(completion.desc(), *names)
        )
        async with self._connection() as connection:
            found = [[*row] for row in await connection.execute(sums)]
        return [Total(tuple(row[: len(by)]), *map(int, row[len(by) :])) for row in found]

    async def site(self, name: str, limit: int) -> SiteHistory:
        """Return the history of a site as all replicas saw it; at most `limit` events and entries each."""
        events = select(site_events).where(site_events.c.site == name)
        entries = select(audit).where(audit.c.site == name)
        async with self._connection() as connection:
            seen = await connection.execute(events.order_by(*NEWEST_FIRST).limit(limit))
            done = await connection.execute(entries.order_by(audit.c.at.desc(), audit.c.id).limit(limit))
            return SiteHistory(
                [EventRow(**row._mapping) for row in seen], [AuditEntry(**row._mapping) for row in done]
            )

    async def events_of_replica(self, replica: str, since: float, limit: int) -> list[Event]:
        """Return the newest events that a replica recorded at `since` (unix time) or later, newest first."""
        own = select(site_events).where(site_events.c.at >= since, site_events.c.replica == replica)
        async with self._connection() as connection:
            found = await connection.execute(own.order_by(*NEWEST_FIRST).limit(limit))
            return [event_of(EventRow(**row._mapping)) for row in found]


async def _attempts(connection: AsyncConnection, row: UsageRow) -> tuple[Attempt, ...]:
    in_order = select(decisions).where(decisions.c.query_id == row.query_id).order_by(decisions.c.attempt)
    found = await connection.execute(in_order)
    return tuple(attempt_of(DecisionRow(**each._mapping)) for each in found)


def _query_ids(any_id: str) -> list[str]:
    """Return the ids of the queries whose answer may have an id."""
    prefix = next((each for each in ANSWER_PREFIXES if any_id.startswith(each)), "")
    query_id = any_id.removeprefix(prefix)
    return [query_id, *(f"{query_id}-{number}" for number in range(MAX_PROMPTS))]
