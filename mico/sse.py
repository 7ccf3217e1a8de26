"""Server-sent events, as much as a chat stream needs. Ignores comments, ids and event names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def data_events(lines: Iterable[str]) -> Iterator[str]:
    """The payload of each event; several data lines of one event are joined by line feeds."""
    pending: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            pending.append(line[5:].removeprefix(" "))
        elif not line and pending:
            yield "\n".join(pending)
            pending = []
    if pending:
        yield "\n".join(pending)
