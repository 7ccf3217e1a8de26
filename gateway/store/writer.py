"""Store records in the database, each once however often it is offered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, Final, Protocol

import msgspec
from sqlalchemy import JSON, Table
from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.store.database import insert_new, reason
from gateway.store.errors import RecordsRefused, StoreUnavailable
from gateway.store.rows import EventRow, Record
from gateway.store.tables import decisions, site_events, usage

WRITE_TIMEOUT_S: Final = 15.0
ROWS_PER_CHUNK: Final = 100
"""Binding a row takes the event loop about 5 µs: other tasks run between the chunks of a large batch."""


class Writer(Protocol):
    """Sink of the recorder."""

    async def write(self, records: Sequence[Record | EventRow]) -> None:
        """Store all records or none, and none twice.

        Raises StoreUnavailable (try again later) or RecordsRefused (will never succeed).
        """


class DatabaseWriter:
    def __init__(self, engine: AsyncEngine, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._usage = BulkInsert(engine, usage)
        self._decisions = BulkInsert(engine, decisions)
        self._events = BulkInsert(engine, site_events)

    async def write(self, records: Sequence[Record | EventRow]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._insert(records)
        except (DataError, IntegrityError, OverflowError) as exc:
            raise RecordsRefused(reason(exc)) from exc
        except TimeoutError as exc:
            raise StoreUnavailable(f"no answer within {self._timeout_s:g} s") from exc
        except (SQLAlchemyError, OSError) as exc:
            raise StoreUnavailable(reason(exc)) from exc

    async def _insert(self, records: Sequence[Record | EventRow]) -> None:
        async with self._engine.begin() as connection:
            for start in range(0, len(records), ROWS_PER_CHUNK):
                chunk = records[start : start + ROWS_PER_CHUNK]
                queries = [each for each in chunk if isinstance(each, Record)]
                await self._usage.execute(connection, [query.usage for query in queries])
                await self._decisions.execute(
                    connection, [row for query in queries for row in query.decisions]
                )
                await self._events.execute(connection, [each for each in chunk if isinstance(each, EventRow)])


class BulkInsert:
    """INSERT of many rows through the driver: SQLAlchemy compiles it once and binds no row.

    On SQLite the rows are one statement. As one statement each, its thread would give up the interpreter and
    take it back for every row, and each time the event loop would stop for it.
    """

    def __init__(self, engine: AsyncEngine, table: Table) -> None:
        compiled = insert_new(engine.dialect.name, table).compile(dialect=engine.dialect)
        self._statement = str(compiled)
        order = compiled.positiontup  # None where the driver takes values by name
        self._in_order = None if order is None else itemgetter(*order)
        self._json = [column.name for column in table.columns if isinstance(column.type, JSON)]

    async def execute(self, connection: AsyncConnection, rows: Sequence[object]) -> None:
        if not rows:
            return
        values = [self._values(row) for row in rows]
        if connection.dialect.name == "sqlite":
            one_row = f"({', '.join('?' * len(values[0]))})"
            statement = self._statement.replace(one_row, ", ".join([one_row] * len(rows)))
            await connection.exec_driver_sql(statement, tuple(chain.from_iterable(values)))
        else:
            await connection.exec_driver_sql(self._statement, values)

    def _values(self, row: object) -> Any:
        values: dict[str, Any] = msgspec.to_builtins(row)
        for name in self._json:
            values[name] = msgspec.json.encode(values[name]).decode()
        return values if self._in_order is None else self._in_order(values)
