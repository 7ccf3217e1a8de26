"""Open one SQLAlchemy engine for SQLite or Postgres, with timeouts so that no call waits for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from sqlalchemy import URL, ExceptionContext, Insert, Table, delete, event, false, make_url, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from gateway.store.errors import StoreError, StoreUnavailable
from gateway.store.sqlite import SingleHopConnection

DATABASE_ERRORS: Final = (SQLAlchemyError, OSError, StoreUnavailable)
"""What a call may raise while the database is away."""
BUSY_TIMEOUT_MS: Final = 5_000
CONNECTIONS: Final = 8
"""For recorder, keys, leases, orders, certificates, snapshots, retention and a read. Clients' queries
take none.
"""

_DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
}

_READ_ONLY: Final = "25006"
"""The state of a Postgres that has become a standby, or whose disk is full."""

_POSTGRES_CONNECT: dict[str, Any] = {
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
    "application_name": "mico-gateway",
}


_DATABASE_TIME = text("SELECT extract(epoch FROM clock_timestamp())")


def database_url(text: str) -> URL:
    """Parse `sqlite:///file` or `postgresql://user@host/name` and set our driver. Raises StoreError."""
    try:
        url = make_url(text)
    except ArgumentError as exc:
        raise StoreError(
            "the database URL is not of the form sqlite:///FILE or postgresql://USER@HOST/NAME"
        ) from exc
    except ValueError:  # its text would quote a part of a password that has an @
        raise StoreError(
            "the port in the database URL is no number; an @ in a password is written %40, several servers as"
            " postgresql://USER@/NAME?host=A:5432&host=B:5432&target_session_attrs=read-write"
        ) from None
    driver = _DRIVERS.get(url.get_backend_name())
    if driver is None:
        raise StoreError(
            f"database {url.get_backend_name()!r} is not supported: use sqlite:///FILE or postgresql://…"
        )
    if driver.startswith("sqlite") and not url.database:
        raise StoreError("an SQLite database needs a file: sqlite:///FILE")
    return url.set(drivername=driver)


def open_engine(text: str) -> AsyncEngine:
    """Create the engine; it does not connect yet. Raises StoreError."""
    url = database_url(text)
    is_sqlite = url.get_backend_name() == "sqlite"
    try:
        engine = create_async_engine(
            url,
            pool_size=CONNECTIONS,
            max_overflow=0,
            pool_timeout=5,
            pool_pre_ping=not is_sqlite,
            connect_args={"async_creator_fn": SingleHopConnection.connect} if is_sqlite else _postgres(),
        )
    except ModuleNotFoundError as exc:
        raise StoreError("Postgres needs psycopg, of the extra postgres") from exc
    if is_sqlite:
        event.listen(engine.sync_engine, "connect", prepare_sqlite)
    else:
        event.listen(engine.sync_engine, "handle_error", _give_up_read_only)
    return engine


def _give_up_read_only(context: ExceptionContext) -> None:
    """Drop the connections to a server that takes no writes any more: they go on answering pings."""
    if getattr(context.original_exception, "sqlstate", None) == _READ_ONLY:
        context.is_disconnect = True


def _postgres() -> dict[str, Any]:
    """Return the arguments of a Postgres connection. Raises ModuleNotFoundError without psycopg."""
    from gateway.store.postgres import TimeoutConnection

    return {**_POSTGRES_CONNECT, "async_creator_fn": TimeoutConnection.connect}


def prepare_sqlite(connection: Any, _record: object) -> None:
    """Allow readers beside one writer, wait for locks, and make commits survive a power loss."""
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def insert_new(dialect: str, into: Table) -> Insert:
    """Return an INSERT that skips rows whose key exists."""
    if dialect == "sqlite":
        return sqlite.insert(into).on_conflict_do_nothing()
    return postgresql.insert(into).on_conflict_do_nothing()


async def lock_table(connection: AsyncConnection, table: Table) -> None:
    """Wait for other transactions that change `table`, and keep it for this one until it ends.

    As the first statement of a transaction, it lets the others read what those have written. On SQLite the
    first write does so.
    """
    postgres = text(f"LOCK TABLE {table.name} IN SHARE ROW EXCLUSIVE MODE")
    is_sqlite = connection.dialect.name == "sqlite"
    await connection.execute(delete(table).where(false()) if is_sqlite else postgres)


async def database_time(connection: AsyncConnection, clock: Callable[[], float] = time.time) -> float:
    """Return the unix time of the one clock that all replicas share: on SQLite the machine's, `clock`."""
    if connection.dialect.name == "sqlite":
        return clock()
    return float(await connection.scalar(_DATABASE_TIME) or 0.0)


def reason(error: BaseException) -> str:
    """Return the first line of the driver's message: no statement, values or password."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    return next(iter(str(cause).splitlines()), "") or type(cause).__name__
