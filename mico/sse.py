"""Parser of server-sent events for chat streams. Ignores comments, ids and event names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def lines(parts: Iterable[bytes]) -> Iterator[str]:
    """Yield decoded lines, terminated by LF or CR LF.

    Other line boundaries of `str.splitlines`, such as U+2028, are not terminators: they occur in JSON.
    """
    rest = b""
    for part in parts:
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line.removesuffix(b"\r").decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


def data_events(lines: Iterable[str]) -> Iterator[str]:
    """Yield the payload of each event. The data lines of an event are joined by line feeds."""
    pending: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            pending.append(line[5:].removeprefix(" "))
        elif not line and pending:
            yield "\n".join(pending)
            pending = []
    if pending:
        yield "\n".join(pending)
