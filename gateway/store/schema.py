"""Decide whether this program may use the tables of a database.

A database names its newest migration and its floor, the lowest schema of a program that may use the tables.
An additive migration leaves the floor, so that programs of before go on, restart and come back.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from sqlalchemy import URL, Connection, String, column, inspect, select, table
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.store.database import reason
from gateway.store.errors import SchemaMismatch, SchemaTooNew, StoreUnavailable
from gateway.store.tables import SCHEMA, schema_floor

_VERSION: Final = select(column("version_num", String)).select_from(table("alembic_version"))


class StoredSchema(NamedTuple):
    """The schema of a database. `made_by` is the version of the program that migrated it, "" if unknown."""

    revision: str
    floor: str
    made_by: str


def read_schema(connection: Connection) -> StoredSchema | None:
    """Return the schema, None if there are no tables. One of before `schema_floor` is its own floor."""
    present = inspect(connection)
    revision = connection.scalar(_VERSION) if present.has_table("alembic_version") else None
    if revision is None:
        return None
    row: Any = None
    if present.has_table(schema_floor.name):
        row = connection.execute(select(schema_floor)).first()
    return StoredSchema(revision, revision, "") if row is None else StoredSchema(revision, *row)


def is_newer(found: StoredSchema | None) -> bool:
    """Return whether a newer program has migrated the database. Raises SchemaTooNew if that shuts out this
    one.
    """
    if found is None or found.revision <= SCHEMA:
        return False
    if found.floor > SCHEMA:
        by = f", made by Mico {found.made_by}," if found.made_by else ""
        raise SchemaTooNew(
            f"the database has schema {found.revision}{by} for programs of schema {found.floor} or newer, and"
            f" this program has schema {SCHEMA}: start a newer version, or restore the backup of before"
        )
    return True


def require_usable(found: StoredSchema | None, url: URL) -> None:
    """Raises SchemaMismatch if this program may not use tables of this schema, in the database at `url`."""
    if not is_newer(found) and (found is None or found.revision != SCHEMA):
        state = "has no tables yet" if found is None else f"has schema {found.revision}"
        raise SchemaMismatch(
            f"the database {state}, this program needs {SCHEMA}: run `mico db upgrade` for {url!r}"
        )


async def check_schema(engine: AsyncEngine) -> None:
    """Check that this program may use the tables. Raises SchemaMismatch or StoreUnavailable."""
    try:
        async with engine.connect() as connection:
            found = await connection.run_sync(read_schema)
    except (SQLAlchemyError, OSError) as exc:
        raise StoreUnavailable(f"cannot open the database {engine.url!r}: {reason(exc)}") from exc
    require_usable(found, engine.url)
