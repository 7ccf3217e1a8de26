"""Run the revisions from the installed package in one locked transaction: of two processes only one does."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from alembic import command
from alembic.config import Config
from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, event, text

from gateway.store.database import database_url, prepare_sqlite

_LOCK: Final = 0x6D69636F
"""The advisory lock that migrations of one Postgres database hold."""


def upgrade(url: str, revision: str = "head") -> None:
    """Migrate the database up to `revision`."""
    _run(url, lambda config: command.upgrade(config, revision))


def downgrade(url: str, revision: str = "base") -> None:
    """Migrate the database down to `revision`."""
    _run(url, lambda config: command.downgrade(config, revision))


def _run(url: str, step: Callable[[Config], None]) -> None:
    full = database_url(url)
    if full.get_backend_name() == "sqlite":
        with _only_one(Path(full.database or "")), _sqlite_engine(full).begin() as connection:
            step(_config(connection))
    else:
        with create_engine(full, poolclass=NullPool).begin() as connection:
            connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
            step(_config(connection))


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
