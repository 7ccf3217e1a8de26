"""Measure what many sites cost a gateway: links, reports, decisions, and everything at once after a restart.

    python -m bench.fleet --sites 200,500,1000 --gateways 1,4 --processes 8
    python -m bench.fleet --sites 100 --seconds 5 --busy 0.5
    python -m bench.fleet --sites 1000 --gateways 4 --linked 1 --busy 0.5

Sites are the real link before an engine without a model (bench/support/fleet_sites.py), many in one process,
each with a connection of its own to every gateway; their CPU is counted apart. CPU is that of the kernel's
scheduler, of the first gateway, and reports are those to each. Gateways are replicas on one SQLite database.
With `--linked 1` only the first is linked to the sites, and asks for the share of reports of one of several:
a machine that has not the cores for all links measures one gateway so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.decide import decision_us
from bench.support.http_load import Tally, open_loop, quantile_ms
from tests.support.gateway_process import GatewayProcess, Workspace, cpu_s_of, mico

TOKENS, TOKEN_S = 16, 0.02
WITHIN_S = 180.0


def loopback_bytes() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))


@dataclass(slots=True)
class Shown:
    """The last line of one process of sites."""

    linked: int = 0
    reports: int = 0


class Fleet:
    """The processes with the sites."""

    def __init__(self, processes: list[asyncio.subprocess.Process], sites: int, gateways: int) -> None:
        self._processes = processes
        self._streams, self._gateways = sites * gateways, gateways
        self._shown = [Shown() for _ in processes]
        self._changed = asyncio.Event()
        self._tasks = [asyncio.create_task(self._read(number)) for number in range(len(processes))]

    async def _read(self, number: int) -> None:
        output = self._processes[number].stdout
        assert output is not None
        async for line in output:
            self._shown[number] = Shown(**json.loads(line))
            self._changed.set()

    @property
    def linked(self) -> int:
        return sum(each.linked for each in self._shown)

    @property
    def reports(self) -> float:
        """Return the number of reports so far that a gateway has on average."""
        return sum(each.reports for each in self._shown) / self._gateways

    def cpu_s(self) -> float:
        return sum(cpu_s_of(each.pid) for each in self._processes)

    async def joined(self, share: float = 1.0) -> float:
        """Return the seconds until this share of the streams is up. Raises SystemExit after a deadline."""
        began_s = time.perf_counter()
        await self.until(lambda: self.linked >= share * self._streams)
        return time.perf_counter() - began_s

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until the condition holds. Raises SystemExit after a deadline."""
        try:
            async with asyncio.timeout(WITHIN_S):
                while not holds():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as exc:
            raise SystemExit(f"{self.linked} of {self._streams} streams after {WITHIN_S:.0f} s") from exc

    async def close(self) -> None:
        for each in self._processes:
            each.kill()
            await each.wait()
        await asyncio.gather(*self._tasks)


@asynccontextmanager
async def fleet(ports: list[int], sites: int, options: argparse.Namespace) -> AsyncIterator[Fleet]:
    processes, first = [], 0
    join = ",".join(f"127.0.0.1:{port}" for port in ports)
    for number in range(options.processes):
        count = sites * (number + 1) // options.processes - first
        command = ("-m", "bench.support.fleet_sites", "--join", join, "--sites", count, "--first", first)
        more = ("--busy", options.busy, "--tokens", TOKENS, "--token-s", TOKEN_S)
        started = await asyncio.create_subprocess_exec(
            sys.executable,
            *map(str, (*command, *more)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        processes.append(started)
        first += count
    found = Fleet(processes, sites, len(ports))
    try:
        yield found
    finally:
        await found.close()


class Gateways:
    """Gateways of one fleet, each in a folder and at ports of its own, to be killed and started again."""

    def __init__(self, folder: Path, count: int) -> None:
        self.workspaces, self._database = [], folder / "fleet.db"
        for number in range(count):
            own = folder / f"gateway-{number}"
            own.mkdir(parents=True, exist_ok=True)
            self.workspaces.append(Workspace(own, own))
        self._stack = AsyncExitStack()
        self.all: list[GatewayProcess] = []

    @property
    def ports(self) -> list[int]:
        return [each.link_port for each in self.workspaces]

    async def start(self) -> float:
        began_s = time.perf_counter()
        started = (
            self._stack.enter_async_context(mico(each, "WARNING", with_sites=False, database=self._database))
            for each in self.workspaces
        )
        self.all = list(await asyncio.gather(*started))
        return time.perf_counter() - began_s

    async def kill(self) -> None:
        for each in self.all:
            each.process.kill()
            await each.process.wait()
        await self._stack.aclose()


async def over(gateway: GatewayProcess, sites: Fleet, seconds: float) -> dict[str, Any]:
    """Measure gateway and fleet while something else runs, or nothing."""
    pid = gateway.process.pid
    before = cpu_s_of(pid), sites.cpu_s(), loopback_bytes(), sites.reports, time.perf_counter()
    await asyncio.sleep(seconds)
    took_s = time.perf_counter() - before[4]
    return {
        "gateway_core_percent": round(100 * (cpu_s_of(pid) - before[0]) / took_s, 2),
        "sites_cores": round((sites.cpu_s() - before[1]) / took_s, 2),
        "loopback_bytes_per_s": round((loopback_bytes() - before[2]) / took_s),
        "reports_per_s": round((sites.reports - before[3]) / took_s, 1),
        "gateway_rss_mib": gateway.rss_mib(),
    }


def first_tokens(tally: Tally) -> dict[str, Any]:
    first = [each.first_s - TOKEN_S for each in tally.replies]
    return {
        "answered": len(tally.replies),
        "wrong": dict(Counter(why[:60] for why in tally.wrong)),
        "added_first_token_p50_ms": quantile_ms(first, 0.5),
        "added_first_token_p99_ms": quantile_ms(first, 0.99),
    }


async def under_load(gateway: GatewayProcess, sites: Fleet, options: argparse.Namespace) -> dict[str, Any]:
    """Measure while streams of short answers begin at an even pace."""
    per_s = options.queries_per_s
    streams = open_loop(gateway.port, gateway.key, per_s=per_s, for_s=options.seconds, tokens=TOKENS)
    running = asyncio.create_task(streams)
    figures = await over(gateway, sites, options.seconds)
    return figures | first_tokens(await running)


async def restart(gateways: Gateways, sites: Fleet, options: argparse.Namespace) -> dict[str, Any]:
    """Kill every gateway, start all again, and ask the first meanwhile, as soon as it listens."""
    count = sites.linked
    await gateways.kill()
    await sites.until(lambda: not sites.linked)
    ready_s = await gateways.start()
    gateway, began_s = gateways.all[0], time.perf_counter()
    asking = asyncio.create_task(
        open_loop(gateway.port, gateway.key, per_s=options.queries_per_s, for_s=5.0, tokens=TOKENS)
    )
    first, before_s = sites.linked, cpu_s_of(gateway.process.pid)
    half_s = await sites.joined(0.5)
    await sites.joined()
    all_s = time.perf_counter() - began_s
    return {
        "gateways_ready_s": round(ready_s, 2),
        "streams": count,
        "streams_up_when_ready": first,
        "half_joined_after_ready_s": round(half_s, 2),
        "all_joined_after_ready_s": round(all_s, 2),
        "gateway_cpu_s_of_joining": round(cpu_s_of(gateway.process.pid) - before_s, 2),
        "meanwhile": first_tokens(await asking),
    }


async def measured(folder: Path, sites: int, count: int, options: argparse.Namespace) -> dict[str, Any]:
    gateways = Gateways(folder / f"{sites}-{count}", count)
    await gateways.start()
    found: dict[str, Any] = {"sites": sites, "gateways": count}
    try:
        gateway = gateways.all[0]
        alone_s = cpu_s_of(gateway.process.pid)
        await asyncio.sleep(options.seconds)
        alone_s = cpu_s_of(gateway.process.pid) - alone_s
        found["alone_core_percent"] = round(100 * alone_s / options.seconds, 2)
        async with fleet(gateways.ports[: options.linked], sites, options) as fleet_:
            found["joined_s"] = round(await fleet_.joined(), 2)
            await asyncio.sleep(3.0)
            found["idle"] = await over(gateway, fleet_, options.seconds)
            found["queries"] = await under_load(gateway, fleet_, options)
            if options.restart:
                found["restart"] = await restart(gateways, fleet_, options)
    finally:
        await gateways.kill()
    print(json.dumps(found), file=sys.stderr, flush=True)
    return found


async def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="mico-fleet-") as name:
        found = [
            await measured(options.folder or Path(name), sites, count, options)
            for count in options.gateways
            for sites in options.sites
        ]
    return {
        "found": found,
        "busy": options.busy,
        "queries_per_s": options.queries_per_s,
        "decision_us": {sites: round(decision_us("mico", sites), 1) for sites in options.sites},
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def main() -> int:
    def numbers(text: str) -> list[int]:
        return [int(each) for each in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sites", type=numbers, default=[200, 500, 1000])
    parser.add_argument("--gateways", type=numbers, default=[1])
    parser.add_argument("--linked", type=int, help="gateways that sites join; without it, all")
    parser.add_argument("--processes", type=int, default=1, help="among which the sites are divided")
    parser.add_argument("--busy", type=float, default=0.0, help="share of slots that other work takes")
    parser.add_argument("--queries-per-s", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--restart", action="store_true", help="kill and start all gateways at the end")
    parser.add_argument("--folder", type=Path, help="keep logs and databases here")
    print(json.dumps(asyncio.run(run(parser.parse_args()))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
