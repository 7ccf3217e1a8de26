"""Server-sent events, as much as a chat stream needs. Ignores comments, ids and event names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def lines(parts: Iterable[bytes]) -> Iterator[str]:
    """Ended by a line feed, with or without a carriage return before it: by nothing else that Python would
    end a line at, since U+2028 and its like stand in JSON as they are.
    """
    rest = b""
    for part in parts:
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line.removesuffix(b"\r").decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


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
