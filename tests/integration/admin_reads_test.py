"""Operators' reads while the database is away."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import text
from sqlalchemy.pool import QueuePool

from gateway.admin.access import Access
from gateway.admin.reads import read_routes
from gateway.domain import Caller
from gateway.errors import Overloaded
from gateway.federation.directory import Directory
from gateway.http.app import create_http
from gateway.http.backend import Backend, Readiness
from gateway.query.answer import answer
from gateway.store.database import open_engine
from gateway.store.queries import READS_AT_ONCE, READS_WAITING, OperatorReads
from gateway.telemetry.publisher import SnapshotPublisher
from migrations import upgrade
from tests.support.fakes.edge import error_of


def test_a_flood_of_reads_leaves_the_database_to_everyone_else(tmp_path: Path) -> None:
    async def main() -> None:
        url = f"sqlite:///{tmp_path}/mico.db"
        await asyncio.to_thread(upgrade, url)
        engine = open_engine(url)
        reads = OperatorReads(engine)
        async with AsyncExitStack() as held:
            for _ in range(READS_AT_ONCE):
                await held.enter_async_context(reads._connection())
            waiting = [asyncio.create_task(reads.count_usage()) for _ in range(READS_WAITING)]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match="too many reads"):
                await reads.count_usage()
            pool = engine.pool
            assert isinstance(pool, QueuePool) and pool.checkedout() == READS_AT_ONCE
            async with engine.connect() as connection:  # a writer's, beside the flood
                assert (await connection.execute(text("SELECT 1"))).scalar_one() == 1
            assert not any(task.done() for task in waiting)
        assert await asyncio.gather(*waiting) == [0] * READS_WAITING
        assert await reads.count_usage() == 0
        await engine.dispose()

    asyncio.run(main())


def test_a_query_is_not_explained_without_the_database_and_the_page_is_told_so(tmp_path: Path) -> None:
    async def main() -> None:
        engine = open_engine(f"sqlite:///{tmp_path}/mico.db")  # which has no tables: it answers nothing
        backend = Backend(
            answer=answer,  # type: ignore[arg-type]
            models=list,
            authenticate={"boss": Caller("key-1", "ops", admin=True)}.get,
            ready=lambda: Readiness(True, ""),
            version="test",
        )
        access = Access(backend, lambda _: None, b"session key")
        app: Any = create_http(
            backend, read_routes(access, SnapshotPublisher(Directory(), "g1"), OperatorReads(engine))
        )
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://edge") as http:
            asked = await http.get("/admin/api/decisions/x", headers={"authorization": "Bearer boss"})
        assert error_of(asked, 503)["code"] == "overloaded"
        await engine.dispose()

    asyncio.run(main())
