"""Stores records in the database, each once however often it is offered."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

import msgspec
from sqlalchemy import Table
from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.store.engine import insert_new, reason
from gateway.store.errors import RecordsRefused, StoreUnavailable
from gateway.store.rows import Record
from gateway.store.tables import decisions, usage

WRITE_TIMEOUT_S: Final = 15.0
ROWS_AT_ONCE: Final = 25
"""Binding a row costs the event loop some 20 µs: others get their turn between the parts of a large batch."""


class Writer(Protocol):
    async def write(self, records: Sequence[Record]) -> None:
        """All or none, and none twice. Raises StoreUnavailable (later, perhaps) or RecordsRefused (never)."""


class DatabaseWriter:
    def __init__(self, engine: AsyncEngine, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        self._engine = engine
        self._timeout_s = timeout_s

    async def write(self, records: Sequence[Record]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._insert(records)
        except (DataError, IntegrityError, OverflowError) as exc:
            raise RecordsRefused(reason(exc)) from exc
        except TimeoutError as exc:
            raise StoreUnavailable(f"no answer within {self._timeout_s:g} s") from exc
        except (SQLAlchemyError, OSError) as exc:
            raise StoreUnavailable(reason(exc)) from exc

    async def _insert(self, records: Sequence[Record]) -> None:
        async with self._engine.begin() as connection:
            for table, rows in _rows(records):
                await connection.execute(insert_new(self._engine.dialect.name, table), rows)


def _rows(records: Sequence[Record]) -> Iterator[tuple[Table, list[dict[str, Any]]]]:
    for start in range(0, len(records), ROWS_AT_ONCE):
        part = records[start : start + ROWS_AT_ONCE]
        yield usage, [msgspec.to_builtins(record.usage) for record in part]
        attempts = [msgspec.to_builtins(row) for record in part for row in record.decisions]
        if attempts:
            yield decisions, attempts
