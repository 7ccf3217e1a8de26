"""Journals of workers that are not started any more: their records reach the database all the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sqlalchemy import text

from gateway.store.database import open_engine
from gateway.store.recorder import Recorder
from gateway.store.store import store_unread_journals
from migrations import upgrade
from tests.support.fakes.store import FakeWriter, outcome


def test_what_former_workers_left_is_stored_and_a_live_journal_is_left_alone(tmp_path: Path) -> None:
    url = f"sqlite+aiosqlite:///{tmp_path}/mico.db"
    upgrade(url)

    async def left(name: str, query: str) -> Recorder:
        away = FakeWriter()
        away.down = True
        recorder = Recorder(tmp_path / name, away)
        await recorder.start(background=False)
        recorder.record(outcome(query))
        return recorder

    async def scenario() -> list[str]:
        live = await left("journal-2", "of-a-worker-that-runs")
        for name, query in (("journal-3", "of-the-third"), ("journal-10", "of-the-tenth")):
            await (await left(name, query)).close()
        (tmp_path / "journal-notes").mkdir()
        await store_unread_journals(url, tmp_path, above=2)
        await store_unread_journals(url, tmp_path, above=2)
        engine = open_engine(url)
        async with engine.connect() as connection:
            rows = await connection.execute(text("select query_id from usage order by query_id"))
            stored = [row.query_id for row in rows]
        await engine.dispose()
        assert live.pending == 1
        await live.close()
        return stored

    assert asyncio.run(scenario()) == ["of-the-tenth", "of-the-third"]
