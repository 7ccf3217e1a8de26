"""Faults of what a federation writes to: its disk is full, its primary database dies."""

from __future__ import annotations

import asyncio
import errno
import os
import time

from bench.support.chaos_federation import Federation, NotHere
from bench.support.faults import Fault, Figures

FULL_S = 10.0
TOP_UP_S = 0.02
PROMOTED_AFTER_S = 3.0
"""The time that a cluster manager takes to find the primary dead."""


async def fill_disk(federation: Federation) -> Figures:
    """Fill the file system of journals, SQLite and batch files, and keep it full for a while."""
    if not federation.disk.is_mount():
        raise NotHere("a small file system can't be mounted; run as root")
    filler = federation.disk / "filler"
    until_s = time.perf_counter() + FULL_S
    with filler.open("wb", buffering=0) as file:
        while time.perf_counter() < until_s:
            fill(file.fileno())
            await asyncio.sleep(TOP_UP_S)
    filler.unlink()
    return {}


def fill(file: int) -> None:
    """Write until the file system takes nothing more."""
    size = 1 << 20
    while size:
        try:
            os.write(file, bytes(size))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            size //= 2


async def fail_over(federation: Federation) -> Figures:
    """Kill the primary with SIGKILL under load and promote the standby a little later."""
    pair = federation.database
    assert pair is not None
    pair.kill_primary()
    await asyncio.sleep(PROMOTED_AFTER_S)
    await asyncio.to_thread(pair.promote)
    return {}


FAULTS: dict[str, Fault] = {
    "disk-full": Fault(fill_disk, refuses=True),
    "postgres-failover": Fault(fail_over, postgres=True),
}
