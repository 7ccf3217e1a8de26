"""Run the revisions from the installed package in one locked transaction: of two processes only one does.

On Postgres a statement waits for a table for LOCK_WITHIN_S at most: whoever comes to the table meanwhile
queues behind that statement, gateways too. Then the transaction is rolled back and tried again after a pause.
"""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import (
    URL,
    Connection,
    Engine,
    NullPool,
    create_engine,
    delete,
    event,
    insert,
    inspect,
    text,
)
from sqlalchemy.exc import OperationalError

from gateway.store.database import database_url, prepare_sqlite
from gateway.store.errors import TablesInUse
from gateway.store.schema import StoredSchema, is_newer, read_schema
from gateway.store.tables import schema_floor

_LOCK: Final = 0x6D69636F
"""The advisory lock that migrations of one Postgres database hold."""
LOCK_WITHIN_S: Final = 2.0
PAUSE_S: Final = 4.0
TRIES: Final = 10
_IN_USE: Final = ("55P03", "40P01")
"""The states of a lock that did not come in time, and of a deadlock: gateways take tables in other orders."""
_OLDEST_TRANSACTION: Final = text(
    "SELECT pid, application_name, extract(epoch FROM clock_timestamp() - xact_start) AS open_s"
    " FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    " AND xact_start IS NOT NULL ORDER BY xact_start LIMIT 1"
)

log = logging.getLogger(__name__)


def upgrade(url: str, revision: str = "head") -> StoredSchema:
    """Migrate the database up to `revision` and return its schema.

    Changes nothing where a newer program has migrated it; raises SchemaTooNew if this one can't use it then,
    TablesInUse if another transaction keeps a table.
    """

    def step(connection: Connection, config: Config) -> None:
        if not is_newer(read_schema(connection)):
            command.upgrade(config, revision)
            _write_floor(connection, config)

    found = _run(url, step)
    assert found is not None
    return found


def downgrade(url: str, revision: str = "base") -> None:
    """Migrate the database down to `revision`."""

    def step(connection: Connection, config: Config) -> None:
        command.downgrade(config, revision)
        _write_floor(connection, config)

    _run(url, step)


def _run(url: str, step: Callable[[Connection, Config], None]) -> StoredSchema | None:
    full = database_url(url)
    if full.get_backend_name() == "sqlite":
        with _only_one(Path(full.database or "")), _sqlite_engine(full).begin() as connection:
            step(connection, _config(connection))
            return read_schema(connection)
    engine = create_engine(full, poolclass=NullPool)
    for _ in range(TRIES):
        try:
            return _run_postgres(engine, step)
        except OperationalError as exc:
            if getattr(exc.orig, "sqlstate", None) not in _IN_USE:
                raise
            holder = _oldest_transaction(engine)
            log.warning("a table is in use, the migration is tried again in %g s: %s", PAUSE_S, holder)
        time.sleep(PAUSE_S)
    raise TablesInUse(f"nothing was changed: in {TRIES} tries a table did not become free; {holder}")


def _run_postgres(engine: Engine, step: Callable[[Connection, Config], None]) -> StoredSchema | None:
    with engine.begin() as connection:
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
        connection.execute(text(f"SET LOCAL lock_timeout = '{LOCK_WITHIN_S}s'"))
        step(connection, _config(connection))
        return read_schema(connection)


def _oldest_transaction(engine: Engine) -> str:
    """Describe the transaction that probably keeps the table."""
    with engine.connect() as connection:
        found = connection.execute(_OLDEST_TRANSACTION).first()
    if found is None:
        return "this user sees no other open transaction"
    return (
        f"process {found.pid} ({found.application_name or 'no name'}) has had a transaction open for"
        f" {found.open_s:.0f} s; SELECT pg_terminate_backend({found.pid}) ends it"
    )


def _write_floor(connection: Connection, config: Config) -> None:
    """Store the newest revision that is not additive: programs of before it can't use the tables."""
    found = read_schema(connection)
    if found is None or not inspect(connection).has_table(schema_floor.name):
        return
    revisions = ScriptDirectory.from_config(config).iterate_revisions(found.revision, "base")
    floor = next(each.revision for each in revisions if not each.module.additive)
    connection.execute(delete(schema_floor))
    connection.execute(insert(schema_floor).values(floor=floor, made_by=version("mico")))


@contextmanager
def _only_one(database: Path) -> Iterator[None]:
    """Lock a file, because SQLite's own locks do not cover the change to its write-ahead log."""
    database.parent.mkdir(parents=True, exist_ok=True)
    with database.with_name(f"{database.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _config(connection: Connection) -> Config:
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return config


def _sqlite_engine(url: URL) -> Engine:
    engine = create_engine(url.set(drivername="sqlite"), poolclass=NullPool)
    event.listen(engine, "connect", _connect_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _connect_sqlite(connection: Any, record: object) -> None:
    prepare_sqlite(connection, record)
    connection.isolation_level = None  # the driver's own BEGIN would come too late for tables


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
