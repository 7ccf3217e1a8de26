"""Operators' reads while the database is away."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2

from gateway.admin.access import Access
from gateway.admin.reads import read_routes
from gateway.domain import Caller
from gateway.federation.directory import Directory
from gateway.http.app import create_http
from gateway.http.backend import Backend, Readiness
from gateway.query.answer import answer
from gateway.store.database import open_engine
from gateway.store.queries import OperatorReads
from gateway.telemetry.publisher import SnapshotPublisher
from tests.support.fakes.edge import error_of


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
