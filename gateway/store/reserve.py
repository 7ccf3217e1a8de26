"""Keep files of zeros ahead, which take lines in place when the disk gives no room for new ones.

Written once and held open, they need neither a free block nor a file descriptor. Does not help on a file
system that turns read-only, or that stores zeros as holes.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

FILES: Final = 4


class Reserve:
    """FILES files of `file_bytes` each, named `reserve-N.lines`: lines, then zeros."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        """Open the files, or make them. One that cannot be is left out with a warning."""
        self.file_bytes = file_bytes
        self._files: dict[Path, int] = {}
        self.left: dict[Path, bytes] = {}  # lines of an earlier process
        for number in range(FILES):
            path = folder / f"reserve-{number}.lines"
            try:
                self._files[path] = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
                if lines := lines_of(path.read_bytes()):
                    self.left[path] = lines
                self._write_zeros(path, len(lines))
            except OSError as exc:
                logger.warning("the journal has no %s for the time when the disk is full: %s", path, exc)
                if (file := self._files.pop(path, None)) is not None:
                    os.close(file)
        self.used = self.left.keys() & self._files.keys()  # they hold lines, or are about to

    def __contains__(self, path: Path) -> bool:
        return path in self._files

    def take(self) -> tuple[Path, int] | None:
        """Return an empty file and its descriptor, set to its beginning; it is used until it is cleared."""
        for path, file in self._files.items():
            if path not in self.used:
                os.lseek(file, 0, os.SEEK_SET)
                self.used.add(path)
                return path, file
        return None

    def clear(self, path: Path) -> None:
        """Overwrite a file with zeros. Raises OSError."""
        self._write_zeros(path, 0)
        self.used.discard(path)

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)

    def _write_zeros(self, path: Path, start: int) -> None:
        file = self._files[path]
        end = max(self.file_bytes, os.fstat(file).st_size)
        if os.pwrite(file, bytes(end - start), start) != end - start:
            raise OSError("the disk took only a part of the zeros")


def lines_of(content: bytes) -> bytes:
    """Return what stands before the first zero byte of a file of the reserve."""
    return content.split(b"\0", 1)[0]
