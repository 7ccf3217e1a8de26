"""SQLite connections that need one hop to the driver's thread for each statement.

aiosqlite's own cursors need four (create, execute, fetch, close) and two more for a transaction, and each hop
wakes a thread and the event loop.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import aiosqlite

T = TypeVar("T")


class StatementResult(NamedTuple):
    """The whole result of a statement: no SQLite cursor outlives it."""

    rows: Sequence[Any] = ()
    description: Any = None
    rowcount: int = -1
    lastrowid: int | None = None


class SingleHopConnection(aiosqlite.Connection):
    """An aiosqlite connection whose statements run and fetch in one hop.

    `_may_be_in_transaction` stays true after a cancelled statement, which may have begun a transaction, until
    a later statement reports the state.
    """

    _may_be_in_transaction = False

    @classmethod
    async def connect(cls, database: str, **settings: Any) -> Self:
        """Connect as SQLAlchemy's dialect does: with a daemon thread, which lets the process end.

        Raises sqlite3.Error once the thread has ended: a loop that was closed before could not be told.
        """
        connection = cls(lambda: sqlite3.connect(database, **settings), 64)
        connection._thread.daemon = True
        try:
            return await connection  # type: ignore[return-value]
        except sqlite3.Error:
            connection._thread.join()
            raise

    def cursor(self) -> Cursor:  # type: ignore[override]
        return Cursor(self)

    async def run_on_thread(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` on the driver's thread and return its result."""

        def on_thread() -> tuple[T, bool]:
            connection = self._conn
            return work(connection), connection.in_transaction

        self._may_be_in_transaction = True
        done: tuple[T, bool] = await self._execute(on_thread)  # type: ignore[no-untyped-call]
        self._may_be_in_transaction = done[1]
        return done[0]

    async def commit(self) -> None:
        if self._may_be_in_transaction:
            await self.run_on_thread(sqlite3.Connection.commit)

    async def rollback(self) -> None:
        if self._may_be_in_transaction:
            await self.run_on_thread(sqlite3.Connection.rollback)


class Cursor:
    """The driver cursor that SQLAlchemy expects. Does not stream: `execute` fetches all rows."""

    arraysize = 1

    def __init__(self, connection: SingleHopConnection) -> None:
        self._connection = connection
        self._result = StatementResult()

    async def __aenter__(self) -> Self:
        return self

    @property
    def description(self) -> Any:
        return self._result.description

    @property
    def rowcount(self) -> int:
        return self._result.rowcount

    @property
    def lastrowid(self) -> int | None:
        return self._result.lastrowid

    async def execute(self, operation: str, parameters: Any = ()) -> None:
        self._result = await self._connection.run_on_thread(
            lambda on: _result(on.execute(operation, parameters))
        )

    async def executemany(self, operation: str, parameters: Any) -> None:
        self._result = await self._connection.run_on_thread(
            lambda on: _result(on.executemany(operation, parameters))
        )

    async def fetchall(self) -> Sequence[Any]:
        return self._result.rows

    async def close(self) -> None:
        """Nothing to close: `execute` has closed the SQLite cursor."""


def _result(cursor: sqlite3.Cursor) -> StatementResult:
    try:
        rows = cursor.fetchall() if cursor.description else ()
        return StatementResult(rows, cursor.description, cursor.rowcount, cursor.lastrowid)
    finally:
        cursor.close()
