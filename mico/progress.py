"""Show the progress of a count: a bar with the remaining time on a terminal, else a line per tenth."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gateway.wording import several
from mico.terminal import Terminal

ShowCount = Callable[[str, int, int, int], None]
"""Called with (state, done, failed, total) to show the progress."""


@contextmanager
def count_progress(terminal: Terminal) -> Iterator[ShowCount]:
    """Yield a function to be called whenever the count changes."""
    if terminal.quiet or not sys.stderr.isatty():
        yield _print_tenths(terminal)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]}"),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=None, failed="")

        def show_count(state: str, done: int, failed: int, total: int) -> None:
            bars.update(
                task,
                description=state,
                completed=done + failed,
                total=total or None,
                failed=f"[red]{several(failed, 'with an error', 'with errors')}[/]" if failed else "",
            )

        yield show_count


def _print_tenths(terminal: Terminal) -> ShowCount:
    before: tuple[str, int] | None = None

    def show_count(state: str, done: int, failed: int, total: int) -> None:
        nonlocal before
        now = state, 10 * (done + failed) // total if total else 0
        if now != before:
            terminal.info(
                f"{state}: {done} of {total} answered, {several(failed, 'with an error', 'with errors')}"
            )
        before = now

    return show_count
