"""A folder of recent outcomes with texts, for `mico predictor update`, where a gateway is told to keep one.

Bounded: of two files the older goes when the newer is full. Needs nothing but the standard library.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

from predictor.runtime import Features

NEWEST, OLDER = "outcomes.jsonl", "outcomes.1.jsonl"
MOST_LINES = 20_000
MOST_CHARS = 8_000
"""Of a longer text the rest is left out: a forecast does not read it."""
SOURCE = "served"


class OutcomeLog:
    """Appends outcomes to a folder. One process writes; does not lock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lines = _lines_of(folder / NEWEST)

    def add(self, query: Features, tokens: int) -> None:
        """One whole answer of `tokens`."""
        text = query.text[:MOST_CHARS].encode("utf-8", "replace").decode()
        row = {
            "source": SOURCE,
            "prompt_id": sha256(text.encode()).hexdigest()[:16],
            "prompt": text,
            "model": query.model,
            "response_tokens": tokens,
            "turn": query.turn,
        }
        if self._lines >= MOST_LINES:
            (self._folder / NEWEST).replace(self._folder / OLDER)
            self._lines = 0
        with (self._folder / NEWEST).open("a", encoding="ascii") as file:
            file.write(json.dumps(row) + "\n")
        self._lines += 1


def files_of(folder: Path) -> list[Path]:
    """The files of a folder of outcomes, the older first."""
    return [file for file in (folder / OLDER, folder / NEWEST) if file.exists()]


def _lines_of(file: Path) -> int:
    if not file.exists():
        return 0
    with file.open("rb") as stream:
        return sum(1 for _ in stream)
