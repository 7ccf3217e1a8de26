"""Tens of thousands of quotas: a start and a round look up what they need, and the lease does not run out."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import event, text

from gateway.quotas.limits import Kind, LimitId, Scope
from gateway.store.slices import LIMITS_PER_PAGE, ROUND_TIMEOUT_S, SliceTable
from tests.integration.store_databases.store_quotas_test import database, replica

MANY = {LimitId(Scope.KEY, f"key-{n}", Kind.TOKENS): 100 for n in range(450)}


def test_no_round_scans_the_quotas_or_the_slices(url: str) -> None:
    """A start with 50,000 quotas took 107 s on SQLite, and on Postgres it was given up."""
    ran: dict[str, Any] = {}

    async def main() -> None:
        async with database(url, MANY) as engine:
            is_sqlite = engine.dialect.name == "sqlite"

            @event.listens_for(engine.sync_engine, "before_cursor_execute")
            def note(_c: object, _cursor: object, statement: str, parameters: Any, *_more: object) -> None:
                if statement.startswith("SELECT quota"):
                    ran[statement] = parameters

            await replica(engine, "a")
            async with engine.connect() as connection:
                if not is_sqlite:
                    await connection.execute(text("SET enable_seqscan = off"))
                for statement, parameters in dict(ran).items():
                    explain = "EXPLAIN QUERY PLAN " if is_sqlite else "EXPLAIN "
                    found = await connection.exec_driver_sql(explain + statement, parameters)
                    plan = "\n".join(str(row) for row in found)
                    assert "SCAN quota" not in plan and "Seq Scan" not in plan, f"{statement}\n{plan}"

    asyncio.run(main())
    assert len(ran) >= 3


def test_every_transaction_of_a_long_round_renews_the_lease(url: str) -> None:
    ends: list[Any] = []

    async def main() -> None:
        async with database(url, MANY) as engine:

            @event.listens_for(engine.sync_engine, "before_cursor_execute")
            def note(_c: object, _cursor: object, statement: str, *_more: object) -> None:
                if statement.startswith(("UPDATE replicas", "INSERT INTO quota_slices")):
                    ends.append(statement.partition(" ")[0])

            await replica(engine, "a")

    asyncio.run(main())
    assert ends.count("INSERT") >= 3
    assert all(before == "UPDATE" for before, after in pairwise(ends) if after == "INSERT")


def test_as_long_as_pages_of_limits_come_they_are_waited_for(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = 5
    limits = {
        LimitId(Scope.KEY, f"key-{number:06}", Kind.TOKENS): number
        for number in range(pages * LIMITS_PER_PAGE)
    }

    async def main() -> None:
        loop, passed_s = asyncio.get_running_loop(), [0.0]
        real_time = loop.time
        monkeypatch.setattr(loop, "time", lambda: real_time() + passed_s[0])
        async with database(url, limits) as engine:

            @event.listens_for(engine.sync_engine, "before_cursor_execute")
            def take_long(_c: object, _cursor: object, statement: str, *_more: object) -> None:
                passed_s[0] += ROUND_TIMEOUT_S / 2 if statement.startswith("SELECT quotas") else 0.0

            assert await SliceTable(engine, "a").limits() == limits

    asyncio.run(main())
