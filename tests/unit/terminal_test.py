"""`--json` prints a value that a script can read back, or an error: never the repr of an object."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from mico.terminal import Terminal


@dataclass(frozen=True, slots=True)
class Row:
    name: str


def test_folders_and_times_are_printed_as_their_text(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal().json({"folder": Path("a/b"), "at": datetime(2026, 1, 2, tzinfo=UTC)})
    assert json.loads(capsys.readouterr().out) == {"folder": "a/b", "at": "2026-01-02 00:00:00+00:00"}


def test_what_is_no_json_is_an_error_and_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TypeError, match="Row is no JSON"):
        Terminal().json({"rows": [Row("alpha")]})
    assert capsys.readouterr().out == ""
