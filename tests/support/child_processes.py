"""The processes that this one has started, as the kernel has them."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.forked import SERVERS


def child_processes() -> set[int]:
    """Return their ids, with the dead that this process has not waited for."""
    return children_of(os.getpid()) - SERVERS


def children_of(pid: int) -> set[int]:
    """Return the processes that a process has started and that are there."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(") ")[2].split()[1])
        except OSError:
            continue  # it has ended meanwhile
        if parent == pid:
            found.add(int(status.parent.name))
    return found


def is_there(pid: int, *, as_zombie: bool) -> bool:
    """Tell whether there is such a process, `as_zombie` also one that has ended and nobody has waited for."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text() or as_zombie
    except (FileNotFoundError, ProcessLookupError):
        return False
