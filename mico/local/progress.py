"""Progress of a starting federation: a spinner per process on a terminal, a line per change elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from mico.terminal import Terminal

WIDTH = 20


@contextmanager
def state_progress(terminal: Terminal) -> Iterator[Callable[[Mapping[str, str]], None]]:
    """Yield the function to call with the states of all processes."""
    if terminal.quiet or not sys.stderr.isatty():
        yield print_changes(terminal)
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn

    columns = (SpinnerColumn(finished_text="[green]✓[/]"), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(states: Mapping[str, str]) -> None:
            for name, state in states.items():
                if name not in tasks:
                    tasks[name] = bars.add_task(name, total=1)
                bars.update(tasks[name], description=f"{name:{WIDTH}} {state}", completed=state == "ready")

        yield show


def print_changes(terminal: Terminal) -> Callable[[Mapping[str, str]], None]:
    """Return a function that prints the states that changed since its last call."""
    before: dict[str, str] = {}

    def show(states: Mapping[str, str]) -> None:
        for name, state in states.items():
            if before.get(name) != state:
                terminal.info(f"{name:{WIDTH}} {state}")
        before.update(states)

    return show
