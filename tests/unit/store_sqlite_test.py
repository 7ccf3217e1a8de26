"""One turn of the thread for each statement, the same answers, and no transaction that a cancelled one
leaves.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.store.database import open_engine
from gateway.store.sqlite import SingleHopConnection


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE things (name TEXT PRIMARY KEY, size INTEGER)")
    connection.close()
    return path


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    taken: list[object] = []
    execute = SingleHopConnection._execute

    def counted(self: SingleHopConnection, *work: object, **also: object) -> object:
        taken.append(work)
        return execute(self, *work, **also)

    monkeypatch.setattr(SingleHopConnection, "_execute", counted)
    return taken


async def names(engine: AsyncEngine) -> list[str]:
    async with engine.connect() as connection:
        return list(await connection.scalars(text("SELECT name FROM things ORDER BY name")))


def test_a_look_takes_one_turn_and_a_transaction_one_a_statement_and_its_commit(
    file: Path, turns: list[object]
) -> None:
    async def main() -> None:
        engine = open_engine(f"sqlite:///{file}")
        assert await names(engine) == []  # connects
        turns.clear()
        assert await names(engine) == []
        assert len(turns) == 1
        turns.clear()
        async with engine.begin() as connection:
            await connection.execute(text("INSERT INTO things VALUES ('a', 1), ('b', 2)"))
            grown = await connection.execute(text("UPDATE things SET size = size + 1"))
            found = await connection.execute(text("SELECT name, size FROM things ORDER BY name"))
            assert grown.rowcount == 2
            assert [row._asdict() for row in found] == [{"name": "a", "size": 2}, {"name": "b", "size": 3}]
        assert len(turns) == 4
        assert await names(engine) == ["a", "b"]
        await engine.dispose()

    asyncio.run(main())


def test_what_failed_is_undone(file: Path) -> None:
    async def main() -> None:
        engine = open_engine(f"sqlite:///{file}")
        with pytest.raises(IntegrityError):
            async with engine.begin() as connection:
                await connection.execute(text("INSERT INTO things VALUES ('a', 1)"))
                await connection.execute(text("INSERT INTO things VALUES ('a', 1)"))
        assert await names(engine) == []
        await engine.dispose()

    asyncio.run(main())


def test_a_statement_that_was_cancelled_while_it_waited_for_the_lock_is_undone(file: Path) -> None:
    """The thread continues the statement, and no caller learns that it began a transaction."""

    async def main() -> None:
        ours, other = (
            await SingleHopConnection.connect(str(file), timeout=60),
            sqlite3.connect(file, timeout=20),
        )
        other.execute("INSERT INTO things VALUES ('theirs', 1)")
        inserting = asyncio.create_task(ours.cursor().execute("INSERT INTO things VALUES ('ours', 1)"))
        await asyncio.sleep(0)
        inserting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await inserting
        undone = asyncio.create_task(ours.rollback())
        await asyncio.sleep(0)
        other.commit()
        await undone
        other.execute("INSERT INTO things VALUES ('theirs too', 1)")
        other.commit()
        other.close()
        names = ours.cursor()
        await names.execute("SELECT name FROM things ORDER BY name")
        assert await names.fetchall() == [("theirs",), ("theirs too",)]
        await ours.close()

    asyncio.run(main())


def test_a_database_that_cannot_be_opened_leaves_no_thread_of_its_own(tmp_path: Path) -> None:
    """The thread reported to a loop that was closed by then: `mico keys list` ended with a traceback."""

    async def main() -> None:
        before = set(threading.enumerate())  # those of tests before this one may not have ended yet
        engine = open_engine(f"sqlite:///{tmp_path}")  # a folder
        with pytest.raises(OperationalError):
            async with engine.connect():
                pass
        left = set(threading.enumerate()) - before
        assert [each.name for each in left if "connection_worker" in each.name] == []
        await engine.dispose()

    asyncio.run(main())
