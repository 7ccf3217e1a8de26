"""Queue lines on the local disk, bounded, in numbered segments that outlive the process.

`append` hands a line to the operating system before it returns, so `kill -9` loses nothing; a power loss may
lose the lines appended since the last `sync`. When the disk has no room, the reserve takes the line. Does not
interpret the lines.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from gateway.store import reserve
from gateway.store.errors import JournalTaken
from gateway.store.quick_write import write
from gateway.store.reserve import Reserve

logger = logging.getLogger(__name__)

SEGMENT_BYTES: Final = 1 << 20
LIMIT_BYTES: Final = 5 << 28
SET_ASIDE_BYTES: Final = 16 << 20


_IS_SEGMENT = re.compile(r"[0-9]{12}\.jsonl")


class JournalFull(OSError):
    """The journal has reached its limit."""


class Journal:
    """The journal of one process at a time.

    Methods run in one thread, except `read` and `sync`: they use no state.
    """

    def __init__(
        self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        """Open the folder and the segments found in it.

        Raises JournalTaken when another process uses the folder.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._segment_bytes = segment_bytes
        self._lock = _lock(folder)
        paths = _segments_in(folder)
        self._sealed = {segment.path: segment for path in paths if (segment := _opened(path)) is not None}
        self._reserve = Reserve(folder, segment_bytes)
        for path, lines in self._reserve.left.items():
            self._sealed[path] = _Segment(path, len(lines), lines.count(b"\n"))
        self._next = 1 + max((int(path.stem) for path in paths), default=0)
        self._current: _Segment | None = None
        self._resting: _Segment | None = None  # being synced, or next in turn; no file of the reserve
        self._unsynced: set[Path] = set()
        self.size_bytes = sum(segment.size_bytes for segment in self._sealed.values())
        self.lines = sum(segment.lines for segment in self._sealed.values())

    def append(self, line: bytes) -> None:
        """Append a line that ends with its only newline.

        Raises OSError if the disk refuses and the reserve has no room, JournalFull at the limit.
        """
        if self.size_bytes + len(line) > self.limit_bytes:
            raise JournalFull(f"the journal holds its limit of {self.limit_bytes} bytes")
        try:
            segment = self._current or self._begin()
            self._write(segment, line)
        except OSError:
            self.seal()
            if (reserved := self._begin_reserved()) is None:
                raise
            segment = reserved
            self._write(segment, line)
        segment.lines += 1
        self.lines += 1
        self._unsynced.add(segment.path)
        if segment.size_bytes >= self._segment_bytes:
            self._seal_current()

    def _write(self, segment: _Segment, line: bytes) -> None:
        """Write a whole line at the end of the current segment. Raises OSError."""
        if segment.size_bytes + len(line) > self._reserve.file_bytes and segment.path in self._reserve:
            raise OSError("the line does not fit in this file of the reserve")
        written = write(segment.file, line)
        segment.size_bytes += written
        self.size_bytes += written
        if written != len(line):
            self._seal_current()  # a torn line may only be the last of its segment
            raise OSError("the disk took only a part of the line")

    def _begin_reserved(self) -> _Segment | None:
        if (found := self._reserve.take()) is None:
            return None
        path, file = found
        self._current = _Segment(path, file=file)
        return self._current

    def _begin(self) -> _Segment:
        path = self.folder / f"{self._next:012d}.jsonl"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._next += 1
        self._current = _Segment(path, file=file)
        return self._current

    def seal(self) -> None:
        """End the segments that are written to and move them to `sealed`."""
        self._seal_current()
        self._current, self._resting = self._resting, None
        self._seal_current()

    def _seal_current(self) -> None:
        segment, self._current = self._current, None
        if segment is not None:
            self._sealed[segment.path] = segment
            if segment.path not in self._reserve:
                os.close(segment.file)

    def unsynced(self) -> set[Path]:
        """Return the segments written since the last call, for `sync`. Lines go to another one meanwhile: a
        disk lets nobody write to a page that is on its way there.
        """
        paths, self._unsynced = self._unsynced, set()
        if self._current is None or self._current.path not in self._reserve:
            self._current, self._resting = self._resting, self._current
        return paths

    def sync(self, paths: Iterable[Path]) -> None:
        """Block until the segments are on disk.

        A missing segment was stored and removed: it needs no sync.
        """
        for path in (*paths, self.folder):
            with suppress(FileNotFoundError):
                file = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(file)
                finally:
                    os.close(file)

    @property
    def sealed(self) -> list[Path]:
        """The sealed segments, about oldest first."""
        return list(self._sealed)

    @property
    def reserve_files_used(self) -> int:
        """The number of files of the reserve that hold lines."""
        return len(self._reserve.used)

    def read(self, path: Path) -> list[bytes]:
        """Return the whole lines of a sealed segment.

        A torn last line was never acknowledged and is left out.
        """
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            logger.error("journal segment %s was removed by someone else: its records are lost", path.name)
            return []
        *lines, torn = (reserve.lines_of(content) if path in self._reserve else content).split(b"\n")
        if torn:
            logger.warning("journal segment %s ends in an unfinished line of %d bytes", path.name, len(torn))
        return lines

    async def remove(self, path: Path) -> None:
        """Delete a segment, once its lines are stored elsewhere. Raises OSError, and keeps the segment then.

        A disk that is busy takes up to 100 ms to delete a file, so that a thread does it.
        """
        segment = self._sealed.pop(path)  # at once: a call that is cancelled deletes the file nevertheless
        self.size_bytes -= segment.size_bytes
        self.lines -= segment.lines
        try:
            if path in self._reserve:
                self._reserve.clear(path)
            else:
                await asyncio.to_thread(path.unlink, missing_ok=True)
        except OSError:
            self._sealed[path] = segment
            self.size_bytes += segment.size_bytes
            self.lines += segment.lines
            raise

    def set_aside(self, line: bytes) -> bool:
        """Keep a line that no database accepts, for a person to read. Return False if there is no room."""
        path = self.folder / "refused.lines"
        with path.open("ab") as file:
            if file.tell() + len(line) > SET_ASIDE_BYTES:
                return False
            file.write(line + b"\n")
        return True

    def close(self) -> None:
        self.seal()
        self._reserve.close()
        os.close(self._lock)


class _Segment:
    __slots__ = ("file", "lines", "path", "size_bytes")

    def __init__(self, path: Path, size_bytes: int = 0, lines: int = 0, file: int = -1) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.lines = lines
        self.file = file

    @classmethod
    def from_file(cls, path: Path) -> _Segment:
        content = path.read_bytes()
        return cls(path, len(content), content.count(b"\n"))


def _segments_in(folder: Path) -> list[Path]:
    """Return the segments by age; anything else is not ours, and stays."""
    found = sorted(folder.glob("*.jsonl"))
    for path in found:
        if not _IS_SEGMENT.fullmatch(path.name):
            logger.warning("%s is no segment of the journal: its records are not stored", path)
    return [path for path in found if _IS_SEGMENT.fullmatch(path.name)]


def _opened(path: Path) -> _Segment | None:
    try:
        return _Segment.from_file(path)
    except OSError as exc:
        logger.error("journal segment %s stays as it is until the next start: %s", path, exc)
        return None


def _lock(folder: Path) -> int:
    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        os.close(file)
        raise JournalTaken(f"another gateway uses {folder}: give each its own data folder") from exc
    return file
