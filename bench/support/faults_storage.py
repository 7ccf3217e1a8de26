"""Faults of storage: a full disk, no file descriptors left, a primary database that dies, locked tables."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection

from bench.support.chaos_federation import Federation, NotHere
from bench.support.faults import Fault, Figures
from gateway.store.database import open_engine
from gateway.store.tables import metadata

FULL_S = LOCKED_S = DESCRIPTORS_GONE_S = 10.0
TOP_UP_S = 0.02
LOCK_WITHIN_S = 240.0  # some tries are in vain: transactions that begin with another table are in the way
LOCK_NOT_AVAILABLE = "55P03"
PROMOTED_AFTER_S = 3.0
"""The time that a cluster manager takes to find the primary dead."""


async def fill_disk(federation: Federation) -> Figures:
    async with full_disk(federation):
        await asyncio.sleep(FULL_S)
    return {}


async def kill_on_full_disk(federation: Federation) -> Figures:
    """Kill a gateway with SIGKILL while the disk is full, and start it when there is room again."""
    async with full_disk(federation):
        await asyncio.sleep(FULL_S / 2)
        os.kill(federation.running.gateways[-1].pid, signal.SIGKILL)
        await asyncio.sleep(FULL_S / 2)
    await federation.restart()
    return {"back_s": await federation.whole()}


@asynccontextmanager
async def full_disk(federation: Federation) -> AsyncIterator[None]:
    """Fill the file system of journals, SQLite and batch files, and keep it full."""
    if not federation.disk.is_mount():
        raise NotHere("a small file system can't be mounted; run as root")
    filler = federation.disk / "filler"
    with filler.open("wb", buffering=0) as file:
        fill(file.fileno())

        async def top_up() -> None:
            while True:
                await asyncio.sleep(TOP_UP_S)
                fill(file.fileno())

        topping_up = asyncio.create_task(top_up())
        try:
            yield
        finally:
            topping_up.cancel()
            await asyncio.gather(topping_up, return_exceptions=True)
            filler.unlink()


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


async def use_up_descriptors(federation: Federation) -> Figures:
    """Leave a gateway no file descriptor for a while: it takes no connection and opens no file."""
    victim = federation.running.gateways[-1]
    await federation.switch(victim, descriptors_gone_s=DESCRIPTORS_GONE_S)
    await asyncio.sleep(DESCRIPTORS_GONE_S)
    return {"back_s": await federation.whole()}


async def lock_tables(federation: Federation) -> Figures:
    """Lock all tables, so that every connection of the gateways' pools waits."""
    pair = federation.database
    assert pair is not None
    engine = open_engine(pair.url)
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with engine.connect() as connection:
        while not await try_to_lock(connection):
            assert loop.time() - began < LOCK_WITHIN_S, f"the tables were not locked within {LOCK_WITHIN_S} s"
            await connection.rollback()
        waited_s = loop.time() - began
        await asyncio.sleep(LOCKED_S)
    await engine.dispose()
    return {"locked_after_s": round(waited_s, 1)}


async def try_to_lock(connection: AsyncConnection) -> bool:
    """Lock all tables, or return False: a transaction of a gateway holds one of them and may wait for another
    that is locked here. It is not to end as the victim of a deadlock, which Postgres looks for after a
    second.
    """
    names = ", ".join(table.name for table in metadata.sorted_tables)
    await connection.execute(text("SET LOCAL lock_timeout = '500ms'"))
    try:
        await connection.execute(text(f"LOCK TABLE {names} IN ACCESS EXCLUSIVE MODE"))
    except OperationalError as error:
        if getattr(error.orig, "sqlstate", None) != LOCK_NOT_AVAILABLE:
            raise
        return False
    return True


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
    "disk-full-gateway-killed": Fault(kill_on_full_disk, breaks=True, refuses=True),
    "descriptors-gone": Fault(use_up_descriptors, breaks=True),
    "tables-locked": Fault(lock_tables, postgres=True),
    "postgres-failover": Fault(fail_over, postgres=True),
}
