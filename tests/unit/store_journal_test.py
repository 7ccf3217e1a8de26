"""The journal: whole lines out, in order, within its limit, for one process."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from gateway.store import reserve
from gateway.store.errors import JournalTaken
from gateway.store.journal import SET_ASIDE_BYTES, Journal, JournalFull
from tests.support.fakes.full_disk import write_without_room

pytestmark = pytest.mark.anyio
WITHIN_S = 30.0


def drained(journal: Journal) -> list[bytes]:
    journal.seal()
    return [line for path in journal.sealed for line in journal.read(path)]


def sealed_one(folder: Path) -> tuple[Journal, Path]:
    """Return a journal with one line, and its one segment, which is sealed."""
    journal = Journal(folder)
    journal.append(b"one\n")
    journal.seal()
    (path,) = journal.sealed
    return journal, path


def segments_in(folder: Path) -> list[Path]:
    return list(folder.glob("*.jsonl"))


def test_lines_come_back_in_order_across_segments(tmp_path: Path) -> None:
    journal = Journal(tmp_path, segment_bytes=16)
    lines = [f"line {n}".encode() for n in range(10)]
    for line in lines:
        journal.append(line + b"\n")
    assert len(journal.sealed) > 1
    assert drained(journal) == lines
    journal.close()


def test_an_earlier_process_left_lines_and_new_ones_follow_them(tmp_path: Path) -> None:
    first = Journal(tmp_path)
    first.append(b"old\n")
    first.close()
    second = Journal(tmp_path)
    assert (second.lines, second.size_bytes) == (1, 4)
    second.append(b"new\n")
    assert drained(second) == [b"old", b"new"]
    second.close()


async def test_removing_every_segment_leaves_nothing_to_count(tmp_path: Path) -> None:
    journal = Journal(tmp_path, segment_bytes=8)
    for _ in range(5):
        journal.append(b"12345\n")
    journal.seal()
    for path in journal.sealed:
        await journal.remove(path)
    assert (journal.lines, journal.size_bytes, journal.sealed) == (0, 0, [])
    assert not segments_in(tmp_path)
    journal.close()


def test_what_is_no_segment_stops_no_start_and_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Journal(tmp_path)
    first.append(b"one\n")
    first.close()
    strays = [tmp_path / name for name in ("copy.jsonl", "000000000001 (copy).jsonl", "1.jsonl", "notes")]
    for path in strays:
        path.write_bytes(b"a copy\n")
    (tmp_path / "000000000007.jsonl").mkdir()
    journal = Journal(tmp_path)
    journal.append(b"two\n")
    assert drained(journal) == [b"one", b"two"]
    assert journal.sealed[-1].name == "000000000008.jsonl"
    journal.close()
    assert all(path.read_bytes() == b"a copy\n" for path in strays)
    assert "copy.jsonl is no segment of the journal" in caplog.text
    assert "000000000007.jsonl stays as it is" in caplog.text


@pytest.mark.parametrize("damage", [b"", b"\0" * 4096, b"\xff\xfe garbage", b"whole\n\0\0\0\0"])
def test_a_damaged_segment_costs_no_whole_line(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "000000000001.jsonl").write_bytes(b"before\n" + damage)
    (tmp_path / "000000000002.jsonl").write_bytes(b"after\n")
    journal = Journal(tmp_path)
    assert [line for line in drained(journal) if line != b"whole"] == [b"before", b"after"]
    journal.close()


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "000000000001.jsonl").write_bytes(b"whole\nto")
    journal = Journal(tmp_path)
    assert drained(journal) == [b"whole"]
    journal.close()


def test_a_disk_that_takes_half_a_line_tears_only_the_end_of_a_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    journal.append(b"one\n")
    real_write = os.write
    with monkeypatch.context() as full_disk:
        full_disk.setattr("gateway.store.journal.write", lambda file, line: real_write(file, line[:2]))
        with pytest.raises(OSError, match="only a part"):
            journal.append(b"two\n")
    journal.append(b"three\n")
    assert drained(journal) == [b"one", b"three"]
    journal.close()


FILE_BYTES = 40
LINES = [b"line %02d" % number for number in range(reserve.FILES * FILE_BYTES // 8)]


@pytest.mark.parametrize("begun", [False, True])
def test_a_full_disk_costs_no_line_while_the_reserve_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """Also not a `kill -9`: another process finds them in the files."""
    journal = Journal(tmp_path, segment_bytes=FILE_BYTES)
    if begun:
        journal.append(b"before\n")
    monkeypatch.setattr("gateway.store.journal.write", write_without_room)
    for line in LINES:
        journal.append(line + b"\n")
    assert journal.reserve_files_used == reserve.FILES
    with pytest.raises(OSError, match="No space left"):
        journal.append(b"one too many\n")
    kept = [b"before", *LINES] if begun else LINES
    assert journal.lines == len(kept)
    os.close(journal._lock)  # as the end of a process does
    later = Journal(tmp_path, segment_bytes=FILE_BYTES)
    assert later.lines == len(kept)
    assert sorted(drained(later)) == sorted(kept)
    later.close()


async def test_other_work_goes_on_while_a_disk_deletes_a_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, path = sealed_one(tmp_path)
    may_delete, unlink = threading.Event(), Path.unlink

    def slow(self: Path, missing_ok: bool = False) -> None:
        assert may_delete.wait(WITHIN_S)
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", slow)
    removing = asyncio.create_task(journal.remove(path))
    await asyncio.sleep(0)
    journal.append(b"two\n")
    assert path.exists()
    assert (journal.sealed, journal.lines) == ([], 1)
    may_delete.set()
    await removing
    assert not path.exists()
    journal.close()


async def test_a_segment_that_the_disk_does_not_delete_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, path = sealed_one(tmp_path)

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise OSError("Input/output error")

    with monkeypatch.context() as failing_disk:
        failing_disk.setattr(Path, "unlink", refuse)
        with pytest.raises(OSError, match="Input/output"):
            await journal.remove(path)
    assert (journal.sealed, journal.lines, journal.size_bytes) == ([path], 1, 4)
    await journal.remove(path)
    assert (journal.sealed, journal.lines, journal.size_bytes) == ([], 0, 0)
    journal.close()


async def test_the_reserve_is_used_again_once_its_lines_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path, segment_bytes=FILE_BYTES)
    monkeypatch.setattr("gateway.store.journal.write", write_without_room)
    for number in range(3 * reserve.FILES):
        journal.append(b"a longer line %02d\n" % number)
        journal.append(b"short %02d\n" % number)
        assert drained(journal) == [b"a longer line %02d" % number, b"short %02d" % number]
        for path in journal.sealed:
            await journal.remove(path)
        assert (journal.lines, journal.size_bytes, journal.reserve_files_used) == (0, 0, 0)
    journal.close()
    empty = Journal(tmp_path, segment_bytes=FILE_BYTES)
    assert (empty.lines, empty.sealed) == (0, [])
    empty.close()


def test_a_disk_with_room_again_is_used_before_the_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path, segment_bytes=FILE_BYTES)
    with monkeypatch.context() as full_disk:
        full_disk.setattr("gateway.store.journal.write", write_without_room)
        journal.append(b"one\n")
    journal.seal()
    journal.append(b"two\n")
    assert journal.reserve_files_used == 1
    assert len(list(tmp_path.glob("*.jsonl"))) == 2  # one of them empty: it was begun in vain
    assert drained(journal) == [b"one", b"two"]
    journal.close()


def test_a_line_torn_in_the_reserve_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path, segment_bytes=FILE_BYTES)
    monkeypatch.setattr("gateway.store.journal.write", write_without_room)
    journal.append(b"one\n")
    with monkeypatch.context() as failing_disk:
        failing_disk.setattr(
            "gateway.store.journal.write", lambda file, line: write_without_room(file, line[:2])
        )
        with pytest.raises(OSError, match="only a part"):
            journal.append(b"two\n")
    journal.append(b"three\n")
    assert drained(journal) == [b"one", b"three"]
    journal.close()


def test_a_full_disk_at_the_start_leaves_a_journal_without_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: int, data: bytes, at: int) -> int:
        raise OSError("No space left on device")

    with monkeypatch.context() as full_disk:
        full_disk.setattr(os, "pwrite", refuse)
        journal = Journal(tmp_path)
    assert caplog.text.count("for the time when the disk is full: No space left") == reserve.FILES
    journal.append(b"one\n")
    assert drained(journal) == [b"one"]
    journal.close()


def test_a_disk_that_fails_as_a_segment_ends_costs_no_other_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file counts as closed even if `close` fails: another file may have its number by now."""
    journal = Journal(tmp_path)
    journal.append(b"one\n")
    real_close = os.close

    def failing(file: int) -> None:
        real_close(file)
        raise OSError("Input/output error")

    with monkeypatch.context() as failing_disk:
        failing_disk.setattr(os, "close", failing)
        with pytest.raises(OSError, match="Input/output"):
            journal.seal()
    journal.append(b"two\n")
    assert drained(journal) == [b"one", b"two"]
    journal.close()


async def test_the_limit_holds_and_room_comes_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path, limit_bytes=10)
    journal.append(b"12345678\n")
    with pytest.raises(JournalFull, match="limit of 10 bytes"):
        journal.append(b"12\n")
    journal.seal()
    await journal.remove(journal.sealed[0])
    journal.append(b"12\n")
    assert drained(journal) == [b"12"]
    journal.close()


def test_only_one_process_has_a_folder_until_it_ends(tmp_path: Path) -> None:
    first = Journal(tmp_path)
    with pytest.raises(JournalTaken, match="its own data folder"):
        Journal(tmp_path)
    first.close()
    Journal(tmp_path).close()


async def test_what_was_written_is_synced_once_even_if_it_is_gone(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(b"a\n")
    journal.seal()
    paths = journal.unsynced()
    assert paths == set(journal.sealed)
    assert journal.unsynced() == set()
    await journal.remove(journal.sealed[0])
    journal.sync(paths)
    journal.close()


def test_nobody_writes_to_a_segment_that_is_being_synced(tmp_path: Path) -> None:
    """A write to a page on its way to the disk would wait until it is there, and the event loop with it."""
    journal = Journal(tmp_path)
    written = [b"%d\n" % number for number in range(6)]
    for line in written:
        sizes = {path: path.stat().st_size for path in journal.unsynced()}
        journal.append(line)
        assert {path: path.stat().st_size for path in sizes} == sizes
    assert len(list(tmp_path.glob("*.jsonl"))) == 2
    assert sorted(drained(journal)) == [line.strip() for line in written]
    journal.close()


def test_what_is_set_aside_is_kept_up_to_a_limit(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.set_aside(b"strange")
    assert not journal.set_aside(b"x" * SET_ASIDE_BYTES)
    assert (tmp_path / "refused.lines").read_bytes() == b"strange\n"
    journal.close()
