"""What `mico top` draws and how `mico sites …` reads lengths of time."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from mico.commands.operate import duration
from mico.commands.top import bar, screen
from mico.errors import CommandFailed

SITE = {
    "name": "aws-us",
    "state": "stale",
    "load": 0.5,
    "weight": 100,
    "output_per_s": 12.0,
    "running": 3,
    "slots": 8,
    "pending": 1,
    "ttft_p95_s": None,
    "itl_p95_s": 0.02,
    "kv_used": None,
    "errors_per_min": 0,
    "report_age_s": 4.2,
}
TOTALS = {
    "output_per_s": 12.0,
    "input_per_s": 7.0,
    "in_flight": 4,
    "queued": 1,
    "ttft_p95_s": None,
    "errors_per_min": 1,
    "ended_per_min": 9,
    "headroom": None,
}
SNAPSHOT = {
    "banner": {"level": "degraded", "text": "Degraded: aws-us stale."},
    "totals": TOTALS,
    "sites": [SITE],
    "events": [
        {"at": 0, "kind": "operator", "site": "aws-us", "text": "drain: why", "who": "ann", "bad": False}
    ],
}


def test_the_screen_says_what_the_page_says() -> None:
    out = StringIO()
    Console(file=out, width=160).print(screen(SNAPSHOT))
    text = out.getvalue()
    for words in ("Degraded: aws-us stale.", "12 tok/s", "1 of 9 failed", "stale", "3/8", "50%", "by ann"):
        assert words in text


def test_an_unknown_load_is_no_empty_bar() -> None:
    assert bar(None) != bar(0.0)
    assert bar(7.0) == bar(1.0)
    assert len(bar(0.3)) == len(bar(None))


@pytest.mark.parametrize(
    ("text", "seconds"), [(None, 0), ("90s", 90), ("30m", 1800), ("2h", 7200), ("1.5d", 129_600), ("45", 45)]
)
def test_lengths_of_time(text: str | None, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-5m", "5 weeks", "m"])
def test_no_length_of_time(text: str) -> None:
    with pytest.raises(CommandFailed, match="no length of time"):
        duration(text)
