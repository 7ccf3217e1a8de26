"""Output of commands: data on stdout, progress on stderr, colour only on terminals without NO_COLOR."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from pathlib import PurePath
from typing import Any

STATE_COLOURS = {"ready": "green", "ok": "green", "running": "green", "draining": "yellow", "warn": "yellow"}


@dataclass(frozen=True, slots=True)
class Terminal:
    """Write the output of a command. `quiet` suppresses progress, but not errors and data."""

    quiet: bool = False

    def data(self, text: str, *, end: str = "\n") -> None:
        sys.stdout.write(text + end)
        sys.stdout.flush()

    def aside(self, text: str) -> None:
        """Write dimmed text to stderr, only if stdout and stderr are both terminals."""
        if self.quiet or not (sys.stdout.isatty() and sys.stderr.isatty()):
            return
        dimmed = f"\x1b[2m{text}\x1b[0m" if "NO_COLOR" not in os.environ else text
        with suppress(OSError):
            sys.stderr.write(dimmed)
            sys.stderr.flush()

    def json(self, value: Any) -> None:
        """Print a value as JSON. Paths and dates become strings. Raises TypeError for other types."""
        import json

        self.data(json.dumps(value, indent=2, default=_encode))

    def info(self, text: str) -> None:
        """Print a line of progress on stderr. A closed stderr is ignored."""
        if not self.quiet:
            with suppress(OSError):
                sys.stderr.write(text + "\n")
                sys.stderr.flush()

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "") -> None:
        """Print a table. Rich omits colours if stdout is not a terminal or NO_COLOR is set."""
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(*columns, title=title or None, title_justify="left", box=None, pad_edge=False)
        for row in rows:
            table.add_row(*(Text(str(cell), style=STATE_COLOURS.get(str(cell), "")) for cell in row))
        piped = None if sys.stdout.isatty() else 10_000
        Console(width=piped, highlight=False).print(table)

    def listing(
        self,
        found: Sequence[dict[str, Any]],
        row_of: Callable[[dict[str, Any]], Mapping[str, object]],
        nothing: str,
        *,
        as_json: bool,
    ) -> None:
        """Print the results as JSON or as a table. In place of an empty table, print `nothing` on stderr."""
        if as_json:
            self.json(found)
        elif found:
            self.records([row_of(each) for each in found])
        else:
            self.info(nothing)

    def records(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Print rows as a table. Requires at least one row; all rows have the columns of the first."""
        self.table(list(rows[0]), [list(row.values()) for row in rows])

    @contextmanager
    def spinner(self, text: str) -> Iterator[None]:
        """Show a spinner while the block runs, or print one line if stderr is not a terminal."""
        if self.quiet or not sys.stderr.isatty():
            self.info(text)
            yield
            return
        from rich.console import Console

        with Console(stderr=True).status(text):
            yield


def format_seconds(value: float | None) -> str:
    """Format a duration in ms or s, `-` for None."""
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def _encode(value: object) -> str:
    if isinstance(value, (PurePath, date)):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no JSON")
