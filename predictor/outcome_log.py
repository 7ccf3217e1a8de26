"""Log recent outcomes with their prompts in a folder, if one is configured, for `mico predictor update`.

The log is bounded to two files: when the newer is full, it replaces the older. Standard library only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from predictor.onnx_forecaster import Features

NEWEST, OLDER = "outcomes.jsonl", "outcomes.1.jsonl"
MAX_LINES = 20_000
MAX_CHARS = 8_000
"""Texts are truncated to this length. Forecasts do not read more."""
SOURCE = "served"
COLUMNS = {"source", "prompt_id", "prompt", "model", "turn"}
LENGTH, LEAST = "response_tokens", "longer_than"
"""A row has one of these columns: the length of the answer, or the length at which a limit cut it short."""
MAX_READ_ATTEMPTS = 100


class OutcomeLog:
    """Append outcomes to files in a folder. Only their owner can read the files.

    Supports a single writing process. Does not lock.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lines, self._torn = _count_lines(folder / NEWEST)

    def add(self, query: Features, tokens: int, *, ended: bool = True) -> None:
        """Append one answer of `tokens`. If `ended` is false, the answer was cut short at that length."""
        text = query.text[:MAX_CHARS].encode("utf-8", "replace").decode()
        row = {
            "source": SOURCE,
            "prompt_id": sha256(text.encode()).hexdigest()[:16],
            "prompt": text,
            "model": query.model,
            LENGTH if ended else LEAST: tokens,
            "turn": query.turn,
        }
        if self._lines >= MAX_LINES:
            (self._folder / NEWEST).replace(self._folder / OLDER)
            self._lines, self._torn = 0, False
        separator, self._torn = "\n" if self._torn else "", True
        newest = self._folder / NEWEST
        with open(newest, "a", encoding="ascii", opener=_open_private) as file:
            file.write(separator + json.dumps(row) + "\n")
        self._lines, self._torn = self._lines + 1, False


def log_files(folder: Path) -> list[Path]:
    """Return the existing files of a folder of outcomes, the older first."""
    return [file for file in (folder / OLDER, folder / NEWEST) if file.exists()]


def read_files(folder: Path) -> list[bytes]:
    """Return the contents of the files, consistent if a gateway renames them meanwhile. Raises OSError."""
    for _ in range(MAX_READ_ATTEMPTS):
        with ExitStack() as stack, suppress(FileNotFoundError):
            opened = [stack.enter_context(file.open("rb")) for file in log_files(folder)]
            status = [os.fstat(file.fileno()) for file in opened]
            if list(map(_file_identity, status)) == [
                _file_identity(file.stat()) for file in log_files(folder)
            ]:
                return [file.read() for file in opened]
    raise OSError(f"the files in {folder} are renamed all the time")


def parse_rows(content: bytes) -> Iterator[dict[str, Any]]:
    """Yield the outcomes in a file. Skip incomplete lines, left by a full disk or a power failure."""
    for line in content.splitlines():
        with suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and row.keys() >= COLUMNS and not row.keys().isdisjoint({LENGTH, LEAST}):
                yield row


def _open_private(path: str, flags: int) -> int:
    """Open a file that only its owner can read, since it contains users' prompts."""
    file = os.open(path, flags, 0o600)
    os.fchmod(file, 0o600)  # the file may stem from an earlier version
    return file


def _file_identity(status: os.stat_result) -> tuple[int, int]:
    """Return the device and inode of a file. Renaming does not change them."""
    return status.st_dev, status.st_ino


def _count_lines(file: Path) -> tuple[int, bool]:
    """Return the number of lines, and whether the last one lacks its line feed."""
    if not file.exists():
        return 0, False
    lines, ended = 0, True
    with file.open("rb") as stream:
        for line in stream:
            lines, ended = lines + 1, line.endswith(b"\n")
    return lines, not ended
