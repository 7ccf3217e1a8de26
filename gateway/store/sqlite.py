"""Connections to SQLite that take one turn of their thread a statement. By the driver's own cursors it would
be four (made, executed, read, closed) and two more a transaction, and each wakes a thread and the event loop.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import aiosqlite

T = TypeVar("T")


class Found(NamedTuple):
    """All that a statement has to say: no cursor of SQLite's outlives it."""

    rows: Sequence[Any] = ()
    description: Any = None
    rowcount: int = -1
    lastrowid: int | None = None


class Brisk(aiosqlite.Connection):
    """`_begun`: whether a transaction may be open. A turn whose end nobody waited for may have begun one, so
    that is believed until a later turn says otherwise.
    """

    _begun = False

    @classmethod
    async def connect(cls, database: str, **settings: Any) -> Self:
        """As SQLAlchemy's own: its thread does not keep a process from ending."""
        connection = cls(lambda: sqlite3.connect(database, **settings), 64)
        connection._thread.daemon = True
        return await connection  # type: ignore[return-value]

    def cursor(self) -> Cursor:  # type: ignore[override]
        return Cursor(self)

    async def turn(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def on_thread() -> tuple[T, bool]:
            connection = self._conn
            return work(connection), connection.in_transaction

        self._begun = True
        done: tuple[T, bool] = await self._execute(on_thread)  # type: ignore[no-untyped-call]
        self._begun = done[1]
        return done[0]

    async def commit(self) -> None:
        if self._begun:
            await self.turn(sqlite3.Connection.commit)

    async def rollback(self) -> None:
        if self._begun:
            await self.turn(sqlite3.Connection.rollback)


class Cursor:
    """What SQLAlchemy asks of a driver's cursor, except to scroll in what was not fetched yet."""

    arraysize = 1

    def __init__(self, connection: Brisk) -> None:
        self._connection = connection
        self._found = Found()

    async def __aenter__(self) -> Self:
        return self

    @property
    def description(self) -> Any:
        return self._found.description

    @property
    def rowcount(self) -> int:
        return self._found.rowcount

    @property
    def lastrowid(self) -> int | None:
        return self._found.lastrowid

    async def execute(self, operation: str, parameters: Any = ()) -> None:
        self._found = await self._connection.turn(lambda on: _found(on.execute(operation, parameters)))

    async def executemany(self, operation: str, parameters: Any) -> None:
        self._found = await self._connection.turn(lambda on: _found(on.executemany(operation, parameters)))

    async def fetchall(self) -> Sequence[Any]:
        return self._found.rows

    async def close(self) -> None:
        """Nothing of it is open."""


def _found(cursor: sqlite3.Cursor) -> Found:
    try:
        rows = cursor.fetchall() if cursor.description else ()
        return Found(rows, cursor.description, cursor.rowcount, cursor.lastrowid)
    finally:
        cursor.close()
