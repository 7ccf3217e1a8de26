"""Migrations, up and down, on both databases."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, NullPool, create_engine, inspect

import migrations
from gateway.store.database import database_url
from gateway.store.errors import SchemaMismatch, StoreUnavailable
from gateway.store.store import open_store
from gateway.store.tables import SCHEMA, metadata
from migrations import downgrade, upgrade


def sync_engine(url: str) -> Engine:
    full = database_url(url)
    return create_engine(full.set(drivername=full.drivername.replace("+aiosqlite", "")), poolclass=NullPool)


def tables(url: str) -> set[str]:
    engine = sync_engine(url)
    try:
        return set(inspect(engine).get_table_names()) - {"alembic_version"}
    finally:
        engine.dispose()


def test_up_builds_what_the_program_expects_and_down_leaves_nothing(empty_url: str) -> None:
    upgrade(empty_url)
    with sync_engine(empty_url).connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    downgrade(empty_url)
    assert tables(empty_url) == set()
    upgrade(empty_url)
    assert tables(empty_url) == set(metadata.tables)


def test_the_program_is_written_for_the_newest_migration() -> None:
    assert ScriptDirectory(str(Path(migrations.__file__).parent)).get_current_head() == SCHEMA


def test_two_processes_that_upgrade_at_once_do_it_once(empty_url: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(upgrade, [empty_url, empty_url]))
    assert tables(empty_url) == set(metadata.tables)


def test_a_database_without_tables_is_refused_with_the_remedy(empty_url: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()

    async def open_it() -> None:
        async with open_store(empty_url, tmp_path):
            pass

    with pytest.raises(SchemaMismatch, match=r"no tables yet.*mico db upgrade"):
        asyncio.run(open_it())


def test_a_database_that_is_not_there_is_named_without_its_password(tmp_path: Path) -> None:
    async def open_it() -> None:
        async with open_store(f"postgresql://me:hunter2@/mico?host={tmp_path}", tmp_path):
            pass

    with pytest.raises(StoreUnavailable, match="cannot open the database") as refusal:
        asyncio.run(open_it())
    assert "hunter2" not in str(refusal.value)
