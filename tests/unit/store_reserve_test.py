"""The recorder on a disk that is full or read-only: what a kill would lose, and who is refused."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from gateway.store.recorder import Recorder
from tests.support.fakes.full_disk import write_without_room
from tests.support.fakes.store import FakeWriter, outcome
from tests.unit.store_recorder_test import run


def test_records_of_a_full_disk_survive_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database is away, too. Queries are refused while there is room for those in flight."""
    recorded: list[str] = []

    async def scenario(recorder: Recorder, writer: FakeWriter) -> None:
        writer.down = True
        monkeypatch.setattr("gateway.store.journal.write", write_without_room)
        while recorder.has_room:
            recorded.append(f"q{len(recorded)}")
            recorder.record(outcome(recorded[-1], attempts=2))
            if len(recorded) % 100 == 0:
                assert not await recorder.flush()
        for number in range(len(recorded) // 2):
            recorded.append(f"in flight {number}")
            recorder.record(outcome(recorded[-1], attempts=2))
        assert not await recorder.flush()
        assert len(recorded) > 300
        assert (recorder.health.lost, recorder.pending) == (0, len(recorded))
        shutil.copytree(tmp_path / "journal", tmp_path / "killed")

    run(tmp_path / "journal", scenario, segment_bytes=100_000)
    monkeypatch.undo()
    writer = run(tmp_path / "killed", flushed)
    assert sorted(writer.rows) == sorted(recorded)


async def flushed(recorder: Recorder, _: FakeWriter) -> None:
    assert await recorder.flush()


def test_a_full_disk_refuses_nobody_while_the_database_takes_what_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(recorder: Recorder, writer: FakeWriter) -> None:
        monkeypatch.setattr("gateway.store.journal.write", write_without_room)
        for number in range(1_000):
            recorder.record(outcome(f"q{number}"))
            assert recorder.has_room
            if number % 50 == 0:
                assert await recorder.flush()
        assert await recorder.flush()
        assert len(writer.rows) == 1_000

    run(tmp_path, scenario, segment_bytes=50_000)


def test_what_memory_alone_holds_stops_new_queries_while_the_database_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a file nor the reserve can be written: a read-only disk."""

    def refuse(file: int, data: bytes) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    async def scenario(recorder: Recorder, writer: FakeWriter) -> None:
        with monkeypatch.context() as read_only:
            read_only.setattr("gateway.store.journal.write", refuse)
            recorder.record(outcome("a"))
            assert recorder.has_room
            writer.down = True
            assert not await recorder.flush()
            assert not recorder.has_room
            recorder.record(outcome("in flight"))
            writer.down = False
            assert await recorder.flush()
            assert recorder.has_room
        assert sorted(writer.rows) == ["a", "in flight"]

    run(tmp_path, scenario)
