"""Migrations, up and down, on both databases."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, NullPool, create_engine, inspect, text

import migrations
import migrations.run
from gateway.store.database import database_url
from gateway.store.errors import SchemaMismatch, SchemaTooNew, StoreUnavailable, TablesInUse
from gateway.store.schema import StoredSchema, read_schema
from gateway.store.store import open_store
from gateway.store.tables import SCHEMA, metadata
from migrations import downgrade, upgrade
from tests.support.next_schema import AHEAD
from tests.support.postgres_server import PostgresServer


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


def revisions() -> list[Any]:
    """Every revision, oldest first."""
    found = ScriptDirectory(str(Path(migrations.__file__).parent)).walk_revisions()
    return [*found][::-1]


def schema_of(url: str) -> StoredSchema | None:
    with sync_engine(url).connect() as connection:
        return read_schema(connection)


def test_a_database_names_the_newest_migration_that_older_programs_cannot_use(empty_url: str) -> None:
    newest = [each.revision for each in revisions() if not each.module.additive][-1]
    found = upgrade(empty_url)
    assert found == schema_of(empty_url) == StoredSchema(SCHEMA, newest, version("mico"))


def columns(url: str) -> dict[tuple[str, str], Any]:
    with sync_engine(url).connect() as connection:
        seen = inspect(connection).get_multi_columns()
    return {(name, each["name"]): each for (_, name), found in seen.items() for each in found}


def rules(url: str) -> set[str]:
    """What a database demands of rows: keys, references, uniqueness."""
    with sync_engine(url).connect() as connection:
        seen = inspect(connection)
        keys, references = seen.get_multi_pk_constraint(), seen.get_multi_foreign_keys()
        unique, indexes = seen.get_multi_unique_constraints(), seen.get_multi_indexes()
        checks = seen.get_multi_check_constraints()
    found = set()
    for at in keys:
        demands = (
            keys[at]["constrained_columns"],
            *((each["referred_table"], each["constrained_columns"]) for each in references[at]),
            *(each["column_names"] for each in unique[at]),
            *(each["column_names"] for each in indexes[at] if each["unique"]),
            *(each["sqltext"] for each in checks[at]),
        )
        found |= {f"{at[1]}: {each}" for each in demands}
    return found


def stops_older_programs(url: str, before: dict[tuple[str, str], Any], demanded: set[str]) -> list[str]:
    """Name what a program cannot use any more that was written for the columns and rules of `before`."""
    now, known = columns(url), {table for table, _ in before}
    lost = [f"{where} is gone" for where in before.keys() - now.keys()]
    for where, column in now.items():
        old = before.get(where)
        if old is not None and (str(old["type"]), old["nullable"]) != (
            str(column["type"]),
            column["nullable"],
        ):
            lost.append(f"{where} has changed")
        if old is None and where[0] in known and not column["nullable"] and column["default"] is None:
            lost.append(f"{where} has to be given")
    stricter = [rule for rule in rules(url) - demanded if rule.partition(":")[0] in known]
    return lost + stricter


def test_an_additive_migration_leaves_all_that_the_program_before_it_uses(empty_url: str) -> None:
    for revision in revisions():
        before, demanded = (columns(empty_url), rules(empty_url)) if revision.down_revision else ({}, set())
        upgrade(empty_url, revision.revision)
        if revision.module.additive:
            assert stops_older_programs(empty_url, before, demanded) == [], revision.revision


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE usage DROP COLUMN cloud",
        "ALTER TABLE usage RENAME COLUMN cloud TO home",
        "DROP TABLE decisions",
        "CREATE UNIQUE INDEX one_each ON usage (request_id)",
    ],
)
def test_what_stops_an_older_program_is_noticed(empty_url: str, change: str) -> None:
    upgrade(empty_url)
    before, demanded = columns(empty_url), rules(empty_url)
    with sync_engine(empty_url).begin() as connection:
        connection.execute(text(change))
    assert stops_older_programs(empty_url, before, demanded) != []


def migrate_ahead(url: str, floor: str) -> StoredSchema:
    """Leave the database as a newer program's migration does."""
    upgrade(url)
    with sync_engine(url).begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :ahead"), {"ahead": AHEAD})
        connection.execute(
            text("UPDATE schema_floor SET floor = :floor, made_by = '9.9.9'"), {"floor": floor}
        )
    return StoredSchema(AHEAD, floor, "9.9.9")


async def open_and_close(url: str, folder: Path) -> None:
    async with open_store(url, folder):
        pass


def test_a_newer_additive_schema_is_used_as_it_is(empty_url: str, tmp_path: Path) -> None:
    ahead = migrate_ahead(empty_url, floor=SCHEMA)
    assert upgrade(empty_url) == ahead
    assert schema_of(empty_url) == ahead
    asyncio.run(open_and_close(empty_url, tmp_path))


def test_a_schema_above_this_program_is_refused_by_both_names(empty_url: str, tmp_path: Path) -> None:
    ahead = migrate_ahead(empty_url, floor=AHEAD)
    both = re.escape(f"has schema {AHEAD}, made by Mico 9.9.9,") + f".* this program has schema {SCHEMA}"
    with pytest.raises(SchemaTooNew, match=both):
        asyncio.run(open_and_close(empty_url, tmp_path))
    with pytest.raises(SchemaTooNew, match=both):
        upgrade(empty_url)
    assert schema_of(empty_url) == ahead


def test_an_older_schema_is_refused_with_the_remedy(empty_url: str, tmp_path: Path) -> None:
    upgrade(empty_url, "0008")
    with pytest.raises(
        SchemaMismatch, match=rf"has schema 0008, this program needs {SCHEMA}.*mico db upgrade"
    ):
        asyncio.run(open_and_close(empty_url, tmp_path))


def test_two_processes_that_upgrade_at_once_do_it_once(empty_url: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(upgrade, [empty_url, empty_url]))
    assert tables(empty_url) == set(metadata.tables)


def test_a_migration_does_not_queue_behind_a_long_transaction(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes to the table after the migration would wait behind it."""
    monkeypatch.setattr(migrations.run, "LOCK_WITHIN_S", 0.05)
    monkeypatch.setattr(migrations.run, "PAUSE_S", 0.0)
    postgres.execute("CREATE DATABASE in_use")
    url = postgres.url("in_use")
    upgrade(url, "0006")
    with ThreadPoolExecutor(1) as pool, sync_engine(url).connect() as reader:
        reader.execute(text("SELECT count(*) FROM usage"))
        migrating = pool.submit(upgrade, url)
        try:
            refusal = migrating.exception(timeout=60.0)
        finally:
            reader.rollback()
        assert isinstance(refusal, TablesInUse)
        assert f"process {reader.scalar(text('SELECT pg_backend_pid()'))} " in str(refusal)
    schema = schema_of(url)
    assert schema is not None
    assert schema.revision == "0006"
    assert upgrade(url).revision == SCHEMA


def test_a_migration_goes_on_when_the_table_is_free(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    postgres.execute("CREATE DATABASE soon_free")
    url = postgres.url("soon_free")
    upgrade(url, "0006")
    with sync_engine(url).connect() as reader:
        monkeypatch.setattr(migrations.run, "LOCK_WITHIN_S", 0.05)
        monkeypatch.setattr(migrations.run.time, "sleep", lambda _: reader.rollback())
        reader.execute(text("SELECT count(*) FROM usage"))
        assert upgrade(url).revision == SCHEMA


def test_a_migration_that_ends_a_deadlock_is_tried_again(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that writes lines of a batch has the batch first; the migration comes to the lines first."""
    monkeypatch.setattr(migrations.run, "PAUSE_S", 0.0)
    postgres.execute("CREATE DATABASE crossed")
    url = postgres.url("crossed")
    upgrade(url, "0013")
    waits = text(
        "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'batches'::regclass"
        " AND mode = 'AccessExclusiveLock'"
    )
    with ThreadPoolExecutor(1) as pool, sync_engine(url).connect() as writer:
        writer.execute(text("SET deadlock_timeout = '1h'"))  # only the migration may find it
        writer.execute(text("UPDATE batches SET status = status"))
        migrating = pool.submit(upgrade, url)
        try:
            while not (migrating.done() or writer.scalar(waits)):
                pass
            writer.execute(text("UPDATE batch_lines SET runs = runs"))
        finally:
            writer.rollback()
        assert migrating.result(timeout=60.0).revision == SCHEMA


def test_a_database_without_tables_is_refused_with_the_remedy(empty_url: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(SchemaMismatch, match=r"no tables yet.*mico db upgrade"):
        asyncio.run(open_and_close(empty_url, tmp_path))


def test_a_database_that_is_not_there_is_named_without_its_password(tmp_path: Path) -> None:
    url = f"postgresql://me:hunter2@/mico?host={tmp_path}"
    with pytest.raises(StoreUnavailable, match="cannot open the database") as refusal:
        asyncio.run(open_and_close(url, tmp_path))
    assert "hunter2" not in str(refusal.value)
