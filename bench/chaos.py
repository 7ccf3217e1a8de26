"""Run greedy streams through two gateways and five sites while sites, links and a gateway fail in turn.

    python -m bench.chaos --data alpaca_like.jsonl.zst --model mico/demo_model/weights

It starts a federation of its own and keeps `--concurrency` streams running. The faults, one after another:
a site killed with SIGKILL; a site stopped with SIGSTOP; a site's links cut; a site 250 ms away; a site whose
reports stand still for 2 s; a gateway replica killed. A client whose stream breaks because its own gateway
died asks the other one again, as an SDK would. Checked: each query is answered, each text equals that of
plain `transformers` alone (nothing repeated, nothing missing), no query has two usage rows, every counter is
at zero in the end. Exit status 1 where one of these fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.support.relay import Relay
from bench.support.streams import Load, StreamOutcome, Watcher, add_options, verdict, wait_until, wrong_texts
from mico import demo_model
from mico.local.database import prepare_database
from mico.local.federation import restart_dead, start_all, stop_all, wait_until_ready
from mico.local.folder import Folder, Running
from mico.local.plan import Plan, choose_ports
from mico.local.profiles import Profile, profiles

LAMED_S = 12.0
FROZEN_S = 2.0


@dataclass(frozen=True, slots=True)
class RelayedPlan(Plan):
    """A plan in which some sites reach the gateways through relays only."""

    relays: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def gateway(self, name: str, ports: Any) -> dict[str, object]:
        return {**Plan.gateway(self, name, ports), "peers": []}

    def site(self, profile: Profile) -> dict[str, object]:
        settings = Plan.site(self, profile)
        if ports := self.relays.get(profile.name):
            settings["gateways"] = [f"127.0.0.1:{port}" for port in ports]
        return settings


class Federation:
    def __init__(self, folder: Folder, running: Running, relays: dict[str, list[Relay]]) -> None:
        self.folder, self.running, self.relays = folder, running, relays
        self.key = folder.key() or ""
        self.watcher = Watcher(self.alive, self.key)

    def alive(self) -> list[str]:
        pairs = zip(self.running.gateways, self.running.root_urls, strict=True)
        return [url for gateway, url in pairs if gateway.alive]

    async def restart(self) -> None:
        self.running = await asyncio.to_thread(restart_dead, self.folder, self.running)


async def kill_site(federation: Federation) -> dict[str, float]:
    victim = federation.running.sites[0]
    os.kill(victim.pid, signal.SIGKILL)
    noticed_s = await wait_until(
        lambda: federation.watcher.everywhere(victim.name, False), f"{victim.name} seen as down"
    )
    await federation.restart()
    return {"noticed_s": noticed_s, "back_s": await _back(federation, victim.name)}


async def stop_site(federation: Federation) -> dict[str, float]:
    victim = federation.running.sites[1]
    os.kill(victim.pid, signal.SIGSTOP)
    try:
        noticed_s = await wait_until(
            lambda: federation.watcher.everywhere(victim.name, False), f"{victim.name} seen as hung"
        )
        await asyncio.sleep(LAMED_S - noticed_s)
    finally:
        os.kill(victim.pid, signal.SIGCONT)
    return {"noticed_s": noticed_s, "back_s": await _back(federation, victim.name)}


async def cut_links(federation: Federation) -> dict[str, float]:
    name, relays = next(iter(federation.relays.items()))
    for relay in relays:
        relay.cut()
    noticed_s = await wait_until(lambda: federation.watcher.everywhere(name, False), f"{name} seen as down")
    await asyncio.sleep(LAMED_S / 2)
    for relay in relays:
        relay.release()
    return {"noticed_s": noticed_s, "back_s": await _back(federation, name)}


async def far_away(federation: Federation) -> dict[str, float]:
    relays = list(federation.relays.values())[-1]
    for relay in relays:
        relay.delay_s = 0.125
    await asyncio.sleep(LAMED_S)
    for relay in relays:
        relay.delay_s = 0.0
    return {}


async def freeze_reports(federation: Federation) -> dict[str, float]:
    relays = list(federation.relays.values())[-1]
    for relay in relays:
        relay.hold(up_only=True)
    await asyncio.sleep(FROZEN_S)
    for relay in relays:
        relay.release()
    return {}


async def kill_gateway(federation: Federation) -> dict[str, float]:
    victim = federation.running.gateways[-1]
    os.kill(victim.pid, signal.SIGKILL)
    await asyncio.sleep(LAMED_S / 2)
    await federation.restart()

    async def all_there() -> bool:
        whole = len(federation.alive()) == len(federation.running.gateways)
        return whole and await federation.watcher.all_ready([s.name for s in federation.running.sites])

    return {"back_s": await wait_until(all_there, "the replica back with every site")}


FAULTS: dict[str, Callable[[Federation], Awaitable[dict[str, float]]]] = {
    "site killed": kill_site,
    "site stopped": stop_site,
    "links cut": cut_links,
    "far away": far_away,
    "reports frozen": freeze_reports,
    "gateway killed": kill_gateway,
}


async def _back(federation: Federation, name: str) -> float:
    return await wait_until(lambda: federation.watcher.everywhere(name, True), f"{name} back")


async def inject_faults(federation: Federation, load: Load) -> list[dict[str, Any]]:
    """Inject each fault once, spread over the run, and return the clients' view from its begin to the next
    one's.
    """
    struck = []
    for index, (name, fault) in enumerate(FAULTS.items()):
        await load.reached((index + 0.5) / (len(FAULTS) + 1))
        began, progress = time.perf_counter(), load.progress
        found = await fault(federation)
        print(f"{name}: {found}, {load.progress:.0%} answered", file=sys.stderr)
        struck.append({"fault": name, "under_load": progress < 1.0, "began": began, **found})
    return struck


def felt(struck: list[dict[str, Any]], ended: list[StreamOutcome]) -> list[dict[str, Any]]:
    edges = [row["began"] for row in struck] + [float("inf")]
    for row, until in zip(struck, edges[1:], strict=True):
        silences = [e.silence_s for e in ended if row["began"] - 0.5 <= e.silence_at < until]
        row["longest_silence_s"] = round(max(silences, default=0.0), 2)
        del row["began"]
    return struck


async def counted(federation: Federation, load: Load, struck: list[dict[str, Any]]) -> dict[str, Any]:
    idle_s = await wait_until(federation.watcher.idle, "every counter at zero")
    rows = await verdict(federation.folder.path / "mico.db", load)
    return {**rows, "idle_after_s": idle_s, "faults": felt(struck, load.ended)}


async def started(options: argparse.Namespace, path: Path) -> Federation:
    folder = Folder(path)
    folder.make()
    doors = tuple(choose_ports(0) for _ in range(options.gateways))
    sites = tuple(profiles(options.sites))
    relays = {site.name: [await Relay.start(door.grpc) for door in doors] for site in sites[2:4]}
    url = folder.database_url
    key = await asyncio.to_thread(prepare_database, folder, url)
    through = {name: tuple(relay.port for relay in each) for name, each in relays.items()}
    plan = RelayedPlan(folder, doors, str(options.model), sites, url, demo_model.NAME, relays=through)
    running = start_all(plan)
    await asyncio.to_thread(wait_until_ready, running, key, lambda states: None)
    return Federation(folder, running, relays)


async def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="mico-chaos-") as path:
        federation = await started(options, Path(path) / "mico")
        try:
            load = Load(federation.running.root_urls, federation.key, options)
            running = asyncio.create_task(load.run())
            struck = await inject_faults(federation, load)
            await running
            report = await counted(federation, load, struck)
        finally:
            await asyncio.to_thread(stop_all, federation.folder, federation.running)
            for relay in [relay for relays in federation.relays.values() for relay in relays]:
                await relay.close()
            await federation.watcher.http.aclose()
    report["texts_wrong"] = wrong_texts(options.model, load.ended, options.max_tokens)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=demo_model.FOLDER, help="folder of the weights")
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--sites", type=int, default=5, help="at least 4")
    add_options(parser)
    report = asyncio.run(run(parser.parse_args()))
    print(json.dumps(report))
    wrong = ("failed", "rows_twice", "answers_without_a_row", "texts_wrong")
    return 1 if any(report[name] for name in wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
