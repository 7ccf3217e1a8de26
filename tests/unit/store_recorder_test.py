"""The recorder against a database that is down, lies, refuses and comes back, and a disk that is full."""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec import structs

from gateway.decision import Estimate
from gateway.outcome import Status
from gateway.site_events import Event
from gateway.store.errors import StoreError, StoreUnavailable
from gateway.store.journal import LIMIT_BYTES, Journal
from gateway.store.recorder import DECISIONS_SHARE, IN_FLIGHT_SHARE, MEMORY_LINES, Recorder
from gateway.store.rows import Record, event_of, record_of, to_line
from tests.support.fakes.federation import until
from tests.support.fakes.store import FakeWriter, attempt, outcome

LEFT = Event(1.5, "state", "aws/one", "is down: silent for 5.0 s", bad=True)
BACK = Event(1.5, "state", "aws/one", "joined again")


@asynccontextmanager
async def recording(
    folder: Path, writer: FakeWriter, *, background: bool = False, **settings: Any
) -> AsyncIterator[Recorder]:
    recorder = Recorder(folder, writer, **settings)
    await recorder.start(background=background)
    try:
        yield recorder
    finally:
        await recorder.close()


def run(
    folder: Path, scenario: Callable[[Recorder, FakeWriter], Awaitable[None]], **settings: Any
) -> FakeWriter:
    writer = FakeWriter()

    async def main() -> None:
        async with recording(folder, writer, **settings) as recorder:
            await scenario(recorder, writer)

    asyncio.run(main())
    return writer


def test_what_is_recorded_is_stored_by_a_flush(tmp_path: Path) -> None:
    async def scenario(recorder: Recorder, writer: FakeWriter) -> None:
        recorder.record(outcome("a"))
        recorder.record(outcome("b", attempts=2))
        assert (recorder.pending, writer.rows) == (2, {})
        assert await recorder.flush()
        assert (recorder.pending, recorder.health.journal_bytes) == (0, 0)
        assert [len(row.decisions) for row in writer.rows.values()] == [1, 2]

    run(tmp_path, scenario)


def test_it_closes_where_a_connection_breaks_as_its_flush_is_cancelled(tmp_path: Path) -> None:
    """The error of the connection hid that the flush was cancelled, and a gateway did not end."""

    class Breaking(FakeWriter):
        def __init__(self) -> None:
            super().__init__()
            self.writing = asyncio.Event()

        async def write(self, records: Any) -> None:
            if not self.writing.is_set():
                self.writing.set()
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    raise StoreUnavailable("the connection is lost") from None
            await super().write(records)

    async def main() -> None:
        writer = Breaking()
        async with asyncio.timeout(60):
            async with recording(tmp_path, writer, background=True) as recorder:
                recorder.record(outcome("a"))
                await writer.writing.wait()
        assert list(writer.rows) == ["a"]

    asyncio.run(main())


def test_it_flushes_by_itself(tmp_path: Path) -> None:
    class Told(FakeWriter):
        def __init__(self) -> None:
            super().__init__()
            self.written = asyncio.Event()

        async def write(self, records: Any) -> None:
            await super().write(records)
            self.written.set()

    async def main() -> None:
        writer = Told()
        async with recording(tmp_path, writer, background=True) as recorder:
            recorder.record(outcome("a"))
            async with asyncio.timeout(60):
                await writer.written.wait()
        assert list(writer.rows) == ["a"]

    asyncio.run(main())


def test_a_late_failure_of_the_disk_is_over_though_nobody_asks_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The records were stored in the database before the disk said that it failed."""
    stored = threading.Event()

    def fail_once(journal: Journal, paths: Iterable[Path]) -> None:
        monkeypatch.undo()
        stored.wait(60)
        raise OSError(errno.EIO, "the disk failed")

    async def main() -> None:
        async with recording(tmp_path, FakeWriter(), background=True) as recorder:
            recorder.record(outcome("a"))
            await until(lambda: recorder.pending == 0, "the record is stored")
            stored.set()
            await until(lambda: "it waits in the journal: journal: [Errno 5]" in caplog.text, "the failure")
            await until(lambda: recorder.health.failing_since is None, "its end")

    monkeypatch.setattr(Journal, "sync", fail_once)
    asyncio.run(main())


def test_closing_stores_the_rest(tmp_path: Path) -> None:
    async def scenario(recorder: Recorder, _: FakeWriter) -> None:
        recorder.record(outcome("a"))

    assert list(run(tmp_path, scenario).rows) == ["a"]


def test_a_database_that_is_away_delays_and_says_since_when(tmp_path: Path) -> None:
    async def scenario(recorder: Recorder, writer: FakeWriter) -> None:
        writer.down = True
        for number in range(50):
            recorder.record(outcome(f"q{number}"))
            assert not await recorder.flush()
        assert recorder.health.failing_since == 77.0
        assert recorder.pending == 50
        writer.down = False
        assert await recorder.flush()
        assert recorder.health.failing_since is None
        assert len(writer.rows) == 50

    run(tmp_path, scenario, clock=lambda: 77.0)


def test_a_commit_whose_answer_was_lost_is_not_stored_twice(tmp_path: Path) -> None:
    async def scenario(recorder: Recorder, writer: FakeWriter) -> None:
        recorder.record(outcome("a"))
        writer.loses_the_answer = True
        assert not await recorder.flush()
        writer.loses_the_answer = False
        assert await recorder.flush()
        assert (writer.offers, list(writer.rows)) == (2, ["a"])

    run(tmp_path, scenario)


def test_what_a_stopped_process_could_not_store_the_next_one_does(tmp_path: Path) -> None:
    async def stopped(recorder: Recorder, writer: FakeWriter) -> None:
        writer.down = True
        recorder.record(outcome("a"))

    run(tmp_path, stopped)
    run(tmp_path, stores_a)


def test_a_record_that_the_database_refuses_stops_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(recorder: Recorder, writer: FakeWriter) -> None:
        writer.poison = {"q3"}
        for number in range(6):
            recorder.record(outcome(f"q{number}"))
        assert await recorder.flush()
        assert list(writer.rows) == ["q0", "q1", "q2", "q4", "q5"]
        assert (recorder.pending, recorder.health.lost) == (0, 1)

    run(tmp_path, scenario)
    assert b'"query_id":"q3"' in (tmp_path / "refused.lines").read_bytes()
    assert "cannot be stored" in caplog.text


def test_an_unreadable_line_is_set_aside_and_stops_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def away(recorder: Recorder, writer: FakeWriter) -> None:
        writer.down = True
        recorder.record(outcome("a"))

    async def back(recorder: Recorder, writer: FakeWriter) -> None:
        assert await recorder.flush()
        assert list(writer.rows) == ["a"]

    run(tmp_path, away)
    (segment,) = tmp_path.glob("*.jsonl")
    segment.write_bytes(b"\0\xff\0\n" + segment.read_bytes())
    run(tmp_path, back)
    assert (tmp_path / "refused.lines").read_bytes() == b"\0\xff\0\n"
    assert "cannot be stored" in caplog.text


def test_a_segment_that_cannot_be_read_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Journal.read

    def broken_first(journal: Journal, path: Path) -> list[bytes]:
        if path.name == "000000000001.jsonl":
            raise OSError(errno.EIO, "Input/output error")
        return real(journal, path)

    async def scenario(recorder: Recorder, writer: FakeWriter) -> None:
        for name in ("a", "b", "c"):
            recorder.record(outcome(name))
        with monkeypatch.context() as bad_disk:
            bad_disk.setattr(Journal, "read", broken_first)
            assert not await recorder.flush()
        assert list(writer.rows) == ["b", "c"]
        assert (recorder.pending, recorder.health.failing_since is not None) == (1, True)
        assert await recorder.flush()
        assert set(writer.rows) == {"a", "b", "c"}

    run(tmp_path, scenario, segment_bytes=1)


def test_a_full_journal_says_so_before_anything_is_lost(tmp_path: Path) -> None:
    async def scenario(recorder: Recorder, writer: FakeWriter) -> None:
        writer.down = True
        recorded = 0
        while recorder.has_room:
            recorder.record(outcome(f"q{recorded}"))
            recorded += 1
        recorder.record(outcome("in flight"))
        assert recorder.health.journal_bytes <= 40_000
        assert (recorder.health.lost, recorder.pending) == (0, recorded + 1)
        writer.down = False
        assert await recorder.flush()
        assert recorder.has_room
        assert len(writer.rows) == recorded + 1

    run(tmp_path, scenario, limit_bytes=40_000)


def test_decisions_go_before_usage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(recorder: Recorder, writer: FakeWriter) -> None:
        writer.down = True
        recorded = 0
        while recorder.has_room:
            recorder.record(outcome(f"q{recorded}", attempts=2))
            recorded += 1
        dropped = recorder.health.without_decisions
        writer.down = False
        assert await recorder.flush()
        kept = [row for row in writer.rows.values() if row.decisions]
        assert len(kept) == recorded - dropped
        assert 0 < sum(len(to_line(row)) for row in kept) <= 100_000 * DECISIONS_SHARE + len(to_line(kept[0]))
        assert {row.usage.completion_tokens for row in writer.rows.values()} == {34}
        recorder.record(outcome("later"))
        assert await recorder.flush()
        assert writer.rows["later"].decisions
        assert recorder.health.without_decisions == dropped

    assert len(run(tmp_path, scenario, limit_bytes=100_000).rows) > 2
    assert "decisions are dropped, usage is kept: the journal holds" in caplog.text
    assert "decisions are kept again" in caplog.text


@pytest.mark.parametrize("sites", [3, 80])
def test_an_outage_of_half_an_hour_costs_no_query(sites: int) -> None:
    """At 800 queries a second: records as a gateway writes them, with ids and names of their real lengths."""
    names = tuple(f"region-{number:02d}/pool-{number:02d}" for number in range(sites))
    taken = attempt("q", 0)
    estimates = tuple(Estimate(name, 0.123456, 0.234567, 1.456789, 0.00123, 112, 0.05, 2.6) for name in names)
    decision = structs.replace(taken.decision, site=names[0], attempt_id="f" * 32, estimates=estimates)
    ended = outcome(
        "0123456789abcdef" * 2,
        request_id="0123456789abcdef" * 2,
        key_id="key_0123456789abcdef",
        model="organisation/model-70b-instruct",
    )
    whole = record_of(structs.replace(ended, attempts=(structs.replace(taken, decision=decision),)), "aws")
    with_decisions, usage_only = len(to_line(whole)), len(to_line(Record(whole.usage, ())))
    first = LIMIT_BYTES * DECISIONS_SHARE / with_decisions
    then = LIMIT_BYTES * (1 - IN_FLIGHT_SHARE - DECISIONS_SHARE) / usage_only
    minutes = (first + then) / 800 / 60
    assert minutes >= 30, f"{minutes:.1f}: records of {with_decisions} bytes, {usage_only} without decisions"


def test_the_last_room_is_for_queries_that_used_tokens_however_they_ended(tmp_path: Path) -> None:
    async def scenario(recorder: Recorder, writer: FakeWriter) -> None:
        writer.down = True
        while recorder.has_room:
            recorder.record(outcome("answered"))
        pending = recorder.pending
        recorder.record(outcome("nothing", status=Status.REFUSED, prompt_tokens=0, completion_tokens=0))
        assert (recorder.pending, recorder.health.lost) == (pending, 0)
        recorder.record(outcome("its prompt", status=Status.REFUSED, completion_tokens=0))
        assert (recorder.pending, recorder.health.lost) == (pending + 1, 0)
        writer.down = False

    assert list(run(tmp_path, scenario, limit_bytes=40_000).rows) == ["answered", "its prompt"]


def test_an_event_outlives_an_outage_and_the_process(tmp_path: Path) -> None:
    async def stopped(recorder: Recorder, writer: FakeWriter) -> None:
        writer.down = True
        recorder.record_event(LEFT, "g1")
        recorder.record(outcome("a"))
        recorder.record_event(BACK, "g1")
        assert not await recorder.flush()

    async def started(recorder: Recorder, writer: FakeWriter) -> None:
        writer.loses_the_answer = True
        assert not await recorder.flush()
        writer.loses_the_answer = False
        assert await recorder.flush()
        rows = sorted(writer.events.values(), key=lambda row: row.id)
        assert [event_of(row) for row in rows] == [LEFT, BACK]
        assert ({row.replica for row in rows}, list(writer.rows)) == ({"g1"}, ["a"])

    run(tmp_path, stopped)
    run(tmp_path, started)


def test_events_leave_the_last_room_to_usage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(recorder: Recorder, writer: FakeWriter) -> None:
        writer.down = True
        while recorder.has_room:
            recorder.record_event(LEFT, "g1")
        pending = recorder.pending
        recorder.record_event(LEFT, "g1")
        assert recorder.pending == pending
        recorder.record(outcome("in flight"))
        assert (recorder.pending, recorder.health.lost) == (pending + 1, 0)
        writer.down = False
        assert await recorder.flush()

    assert list(run(tmp_path, scenario, limit_bytes=40_000).rows) == ["in flight"]
    assert "an event is in this log only, the journal is full: aws/one is down" in caplog.text


def test_beyond_every_bound_the_loss_is_logged_whole_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(recorder: Recorder, writer: FakeWriter) -> None:
        for number in range(MEMORY_LINES):
            recorder.record(outcome(f"q{number}"))
        assert not recorder.has_room
        recorder.record(outcome("one too many"))
        assert recorder.health.lost == 1
        assert await recorder.flush()
        assert len(writer.rows) == MEMORY_LINES

    with caplog.at_level(logging.ERROR):
        run(tmp_path, scenario, limit_bytes=1)
    assert '"query_id":"one too many"' in caplog.text


async def stores_a(recorder: Recorder, writer: FakeWriter) -> None:
    """Check that a start stores record a, which the process before left in the journal."""
    assert recorder.pending == 1
    assert await recorder.flush()
    assert list(writer.rows) == ["a"]


def refuse_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Journal, line: bytes) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Journal, "append", full)


def test_once_the_disk_has_room_again_what_it_refused_outlives_the_process(tmp_path: Path) -> None:
    async def stopped(recorder: Recorder, writer: FakeWriter) -> None:
        writer.down = True
        with pytest.MonkeyPatch.context() as disk:
            refuse_lines(disk)
            recorder.record(outcome("a"))
        assert not await recorder.flush()
        assert (recorder.pending, recorder.health.journal_bytes > 0) == (1, True)

    run(tmp_path, stopped)
    run(tmp_path, stores_a)


def test_what_neither_disk_nor_database_takes_at_the_end_is_logged_whole_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        writer = FakeWriter()
        writer.down = True
        with pytest.MonkeyPatch.context() as disk:
            refuse_lines(disk)
            async with recording(tmp_path, writer) as recorder:
                recorder.record(outcome("a"))
        assert (recorder.pending, recorder.health.lost) == (0, 1)

    asyncio.run(main())
    assert '"query_id":"a"' in caplog.text
    assert "until the next start" not in caplog.text


def test_a_disk_that_fails_at_the_end_keeps_nothing_else_from_ending(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        writer = FakeWriter()
        writer.down = True
        with pytest.MonkeyPatch.context() as disk:
            async with recording(tmp_path, writer) as recorder:
                recorder.record(outcome("a"))
                disk.setattr(Journal, "sync", Mock(side_effect=OSError("Input/output error")))

    asyncio.run(main())
    assert "Input/output error" in caplog.text
    run(tmp_path, stores_a)  # nothing holds the journal any more


def test_an_outcome_that_is_no_json_fails_nobody_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(recorder: Recorder, _: FakeWriter) -> None:
        recorder.record(outcome("a", tenant="\ud800"))
        assert (recorder.health.lost, recorder.pending) == (1, 0)

    run(tmp_path, scenario)
    assert "usage is in this log only" in caplog.text


def test_a_recorder_that_is_not_started_takes_nothing_silently(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="without recording"):
        Recorder(tmp_path, FakeWriter()).record(outcome())
