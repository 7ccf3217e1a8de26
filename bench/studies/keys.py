"""Hold many keys in one gateway: memory, the time of the first load, and what one changed key costs then."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from sqlalchemy import insert

from gateway.store.database import open_engine
from gateway.store.keys import KeyRing
from gateway.store.pepper import Pepper
from gateway.store.store import open_store
from gateway.store.tables import keys, tenants
from migrations import upgrade

PEPPER = "a pepper for measurements, long enough"
ROWS_AT_ONCE = 10_000
KEYS_PER_TENANT = 100


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


class Stalls:
    """The longest turn of the event loop, in CPU seconds of its thread: other programs do not count."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch(self) -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            self.longest_s = max(self.longest_s, now - before)
            before = now

    def reset(self) -> None:
        self.longest_s = 0.0


async def write(url: str, count: int) -> None:
    engine = open_engine(url)
    pepper_id = Pepper(PEPPER).id
    for start in range(0, count, ROWS_AT_ONCE):
        numbers = range(start, min(start + ROWS_AT_ONCE, count))
        rows = [
            {
                "id": f"key_{number:016x}",
                "name": f"key {number}",
                "tenant": f"tenant-{number // KEYS_PER_TENANT}",
                "digest": f"{number:064x}",
                "pepper_id": pepper_id,
                "hint": "abcd",
                "models": ["one", "two"] if number % 2 else None,
                "admin": False,
                "created_at": 1.0,
                "stamp": number,
            }
            for number in numbers
        ]
        names = sorted({row["tenant"] for row in rows}, key=str)
        async with engine.begin() as connection:
            await connection.execute(insert(tenants), [{"name": name, "created_at": 1.0} for name in names])
            await connection.execute(insert(keys), rows)
    await engine.dispose()


async def measure(url: str, folder: Path) -> dict[str, float]:
    engine, stalls = open_engine(url), Stalls()
    watching = asyncio.create_task(stalls.watch())
    ring = KeyRing(engine, Pepper(PEPPER))
    found: dict[str, float] = {"empty_mib": rss_mib()}
    before = time.perf_counter()
    await ring.refresh()
    found |= {
        "load_s": time.perf_counter() - before,
        "loaded_mib": rss_mib(),
        "load_stall_s": stalls.longest_s,
    }
    stalls.reset()
    before = time.perf_counter()
    await ring.refresh()
    found |= {"nothing_changed_s": time.perf_counter() - before, "nothing_changed_stall_s": stalls.longest_s}
    async with open_store(url, folder, pepper=PEPPER, serving=False) as store:
        revoked = "key_0000000000000001"
        await store.keys.revoke_key(revoked)
        stalls.reset()
        before = time.perf_counter()
        await ring.refresh()
        found |= {"one_revoked_s": time.perf_counter() - before, "one_revoked_stall_s": stalls.longest_s}
        assert ring.still_valid(revoked) is None
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    await engine.dispose()
    return {name: round(value, 4) for name, value in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.keys", description=__doc__)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--database", help="postgresql://… that is empty; an SQLite file if left out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = options.database or f"sqlite:///{folder}/mico.db"
        upgrade(url)
        asyncio.run(write(url, options.keys))
        found = asyncio.run(measure(url, Path(folder)))
    print(f"{options.keys} keys, {url.partition(':')[0]}, {platform.machine()}, {os.cpu_count()} cores")
    print(json.dumps({"keys": options.keys, **found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
