"""Law: recording, flushing, outages, full disks, crashes and restarts, mixed: every query has one row."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.store.recorder import Recorder
from gateway.store.rows import Record
from tests.support.fakes.full_disk import write_without_room
from tests.support.fakes.store import FakeWriter, outcome

SEGMENT_BYTES = 2_000
"""Two or three records: every example sees several segments."""


class Recording(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.runner = asyncio.Runner()
        self.disk = pytest.MonkeyPatch()
        self.folders = [Path(tempfile.mkdtemp())]
        self.database: dict[str, Record] = {}
        self.recorded: list[str] = []
        self.start()

    def start(self) -> None:
        self.writer = FakeWriter(self.database)
        self.recorder = Recorder(self.folders[-1], self.writer, segment_bytes=SEGMENT_BYTES)
        self.runner.run(self.recorder.start(background=False))

    @rule(attempts=st.integers(0, 2))
    def record(self, attempts: int) -> None:
        if not self.recorder.has_room:
            return  # the gateway refuses the query
        query_id = f"q{len(self.recorded)}"
        self.recorder.record(outcome(query_id, attempts=attempts))
        self.recorded.append(query_id)

    @rule()
    def flush(self) -> None:
        expected = self.writer.works or self.recorder.pending == 0
        assert self.runner.run(self.recorder.flush()) == expected
        assert self.recorder.pending == 0 or not self.writer.works

    @rule(down=st.booleans(), loses_the_answer=st.booleans())
    def change_the_database(self, down: bool, loses_the_answer: bool) -> None:
        self.writer.down, self.writer.loses_the_answer = down, loses_the_answer

    @rule()
    def restart_in_order(self) -> None:
        self.runner.run(self.recorder.close())
        self.start()

    @rule(full=st.booleans())
    def fill_the_disk(self, full: bool) -> None:
        """Let no file grow any more: the reserve takes what is recorded."""
        self.disk.undo()
        if full:
            self.disk.setattr("gateway.store.journal.write", write_without_room)

    @rule(torn=st.binary(max_size=20).filter(lambda tail: b"\n" not in tail))
    def crash(self, torn: bytes) -> None:
        """Copy the folder as it is at that moment: that is what `kill -9` leaves."""
        copy = Path(tempfile.mkdtemp())
        shutil.copytree(self.folders[-1], copy, dirs_exist_ok=True)
        self._tear(copy, torn)
        self.writer.down = True
        self.runner.run(self.recorder.close())
        self.folders.append(copy)
        self.start()

    @staticmethod
    def _tear(folder: Path, torn: bytes) -> None:
        segments = sorted(folder.glob("*.jsonl"))
        if segments:
            segments[-1].write_bytes(segments[-1].read_bytes() + torn)

    @invariant()
    @precondition(lambda self: hasattr(self, "recorder"))
    def nothing_is_lost_and_nothing_is_invented(self) -> None:
        assert set(self.database) <= set(self.recorded)
        assert self.recorder.pending >= len(self.recorded) - len(self.database)
        assert self.recorder.health.lost == 0

    def teardown(self) -> None:
        if not hasattr(self, "recorder"):
            return
        self.writer.down = self.writer.loses_the_answer = False
        self.disk.undo()
        stored = self.runner.run(self.recorder.flush())
        self.runner.run(self.recorder.close())
        self.runner.close()
        for folder in self.folders:
            shutil.rmtree(folder)
        assert stored
        assert sorted(self.database) == sorted(self.recorded)
        assert all(query_id == row.usage.query_id for query_id, row in self.database.items())


TestRecording = Recording.TestCase
TestRecording.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
