"""Greedy streams through two gateway replicas and five sites while sites, links and a replica fail in turn.

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
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from openai import APIConnectionError, APIError, AsyncOpenAI

from bench.federation import Answered, mismatches, prompts
from bench.relay import Relay
from mico import demo_model
from mico.local.database import prepare
from mico.local.federation import restart_dead, start_all, stop_all, wait_until_ready
from mico.local.folder import Folder, Running
from mico.local.plan import Plan, choose_ports
from mico.local.profiles import Profile, profiles

DEADLINE_S = 300.0
TRIES_MOST = 6
LAMED_S = 12.0
FROZEN_S = 2.0


@dataclass(frozen=True, slots=True)
class RelayedPlan(Plan):
    """Some sites reach the gateways through relays, and are told of no other way."""

    relays: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def gateway(self, name: str, ports: Any) -> dict[str, object]:
        return {**Plan.gateway(self, name, ports), "peers": []}

    def site(self, profile: Profile) -> dict[str, object]:
        settings = Plan.site(self, profile)
        if ports := self.relays.get(profile.name):
            settings["gateways"] = [f"127.0.0.1:{port}" for port in ports]
        return settings


@dataclass(slots=True)
class Ended:
    """One query as its client saw it: the text of the try that ended, and the longest silence in it."""

    number: int
    tries: int
    answer: Answered
    silence_s: float
    silence_at: float


class Federation:
    def __init__(self, folder: Folder, running: Running, relays: dict[str, list[Relay]]) -> None:
        self.folder, self.running, self.relays = folder, running, relays
        self.key = folder.key() or ""
        self.http = httpx.AsyncClient(headers={"authorization": f"Bearer {self.key}"}, timeout=5.0)

    @property
    def alive(self) -> list[str]:
        pairs = zip(self.running.gateways, self.running.root_urls, strict=True)
        return [url for gateway, url in pairs if gateway.alive]

    async def sites(self, root_url: str) -> list[dict[str, Any]]:
        try:
            listed = await self.http.get(f"{root_url}/admin/api/sites")
        except httpx.HTTPError:
            return []
        return list(listed.json()["sites"]) if listed.status_code == 200 else []

    async def everywhere(self, name: str, state: bool) -> bool:
        """Whether each living gateway says of that site that it is ready (or that it is not)."""
        for url in self.alive:
            ready = any(s["name"] == name and s["state"] == "ready" for s in await self.sites(url))
            if ready is not state:
                return False
        return True

    async def idle(self) -> bool:
        figures = ("running", "pending", "assigned", "token_load", "kv_reserved_tokens")
        listed = [await self.sites(url) for url in self.alive]
        return all(listed) and not any(site[name] for sites in listed for site in sites for name in figures)

    async def restart(self) -> None:
        self.running = await asyncio.to_thread(restart_dead, self.folder, self.running)


async def soon(holds: Callable[[], Awaitable[bool]], what: str) -> float:
    """Seconds until the condition holds; fails after a deadline."""
    began: float = time.perf_counter()
    while not await holds():
        assert time.perf_counter() - began < DEADLINE_S, f"not within {DEADLINE_S:.0f} s: {what}"
        await asyncio.sleep(0.02)
    return round(time.perf_counter() - began, 2)


class Load:
    """A closed loop of streams; every client moves to the other gateway when its own breaks."""

    def __init__(self, federation: Federation, options: argparse.Namespace, texts: list[str]) -> None:
        self.federation, self.options, self.texts = federation, options, texts
        self.tag = f"chaos-{time.time_ns()}"
        self.next = 0
        self.ended: list[Ended] = []
        self.failed: list[str] = []
        self.broken: Counter[str] = Counter()
        self.clients = [
            AsyncOpenAI(base_url=f"{url}/v1", api_key=federation.key, max_retries=0, timeout=120)
            for url in federation.running.root_urls
        ]

    async def run(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(self.options.concurrency)))
        for client in self.clients:
            await client.close()

    @property
    def progress(self) -> float:
        return len(self.ended) / float(self.options.count)

    async def reached(self, share: float) -> None:
        async def far_enough() -> bool:
            return self.progress >= share or self.next >= self.options.count

        await soon(far_enough, f"{share:.0%} of the queries answered")

    async def _client(self) -> None:
        while self.next < self.options.count:
            number = self.next
            self.next += 1
            await self._query(number)

    async def _query(self, number: int) -> None:
        for attempt in range(TRIES_MOST):
            client = self.clients[(number + attempt) % len(self.clients)]
            try:
                self.ended.append(await self._stream(client, number, attempt))
                return
            except (APIError, httpx.HTTPError) as error:
                self.broken[f"{type(error).__name__}: {error}"[:120]] += 1
                if isinstance(error, APIConnectionError):
                    await asyncio.sleep(0.2)
        self.failed.append(f"{self.tag}-{number}")

    async def _stream(self, client: AsyncOpenAI, number: int, attempt: int) -> Ended:
        prompt, began = self.texts[number % len(self.texts)], time.perf_counter()
        request_id = f"{self.tag}-{number}-{attempt}"
        stream = await client.chat.completions.create(
            model=demo_model.NAME,
            messages=[{"role": "user", "content": prompt}],
            temperature=0,
            max_tokens=self.options.max_tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"x-request-id": request_id},
        )
        text, finish, tokens, first_s = "", "", 0, 0.0
        last, silence_s, silence_at = time.perf_counter(), 0.0, began
        async for chunk in stream:
            now = time.perf_counter()
            if first_s and now - last > silence_s:
                silence_s, silence_at = now - last, last
            last = now
            first_s = first_s or now - began
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
        if not finish:
            raise httpx.RemoteProtocolError("the stream ended without a finish")
        answer = Answered(prompt, request_id, text, finish, tokens, "", first_s, time.perf_counter() - began)
        return Ended(number, attempt + 1, answer, silence_s, silence_at)


async def kill_site(federation: Federation) -> dict[str, float]:
    victim = federation.running.sites[0]
    os.kill(victim.pid, signal.SIGKILL)
    noticed_s = await soon(lambda: federation.everywhere(victim.name, False), f"{victim.name} seen as down")
    await federation.restart()
    return {"noticed_s": noticed_s, "back_s": await _back(federation, victim.name)}


async def stop_site(federation: Federation) -> dict[str, float]:
    victim = federation.running.sites[1]
    os.kill(victim.pid, signal.SIGSTOP)
    try:
        noticed_s = await soon(
            lambda: federation.everywhere(victim.name, False), f"{victim.name} seen as hung"
        )
        await asyncio.sleep(LAMED_S - noticed_s)
    finally:
        os.kill(victim.pid, signal.SIGCONT)
    return {"noticed_s": noticed_s, "back_s": await _back(federation, victim.name)}


async def cut_links(federation: Federation) -> dict[str, float]:
    name, relays = next(iter(federation.relays.items()))
    for relay in relays:
        relay.cut()
    noticed_s = await soon(lambda: federation.everywhere(name, False), f"{name} seen as down")
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
        return len(federation.alive) == len(federation.running.gateways) and all(
            [await federation.everywhere(site.name, True) for site in federation.running.sites]
        )

    return {"back_s": await soon(all_there, "the replica back with every site")}


FAULTS: dict[str, Callable[[Federation], Awaitable[dict[str, float]]]] = {
    "site killed": kill_site,
    "site stopped": stop_site,
    "links cut": cut_links,
    "far away": far_away,
    "reports frozen": freeze_reports,
    "gateway killed": kill_gateway,
}


async def _back(federation: Federation, name: str) -> float:
    return await soon(lambda: federation.everywhere(name, True), f"{name} back")


async def strike(federation: Federation, load: Load) -> list[dict[str, Any]]:
    """Each fault once, spread over the run; what clients felt from its begin to the next one's."""
    struck = []
    for index, (name, fault) in enumerate(FAULTS.items()):
        await load.reached((index + 0.5) / (len(FAULTS) + 1))
        began, progress = time.perf_counter(), load.progress
        found = await fault(federation)
        print(f"{name}: {found}, {load.progress:.0%} answered", file=sys.stderr)
        struck.append({"fault": name, "under_load": progress < 1.0, "began": began, **found})
    return struck


def felt(struck: list[dict[str, Any]], ended: list[Ended]) -> list[dict[str, Any]]:
    edges = [row["began"] for row in struck] + [float("inf")]
    for row, until in zip(struck, edges[1:], strict=True):
        silences = [e.silence_s for e in ended if row["began"] - 0.5 <= e.silence_at < until]
        row["longest_silence_s"] = round(max(silences, default=0.0), 2)
        del row["began"]
    return struck


def recorded(folder: Folder, tag: str) -> Counter[str]:
    """How many usage rows each request id of this run has."""
    with sqlite3.connect(folder.path / "mico.db") as database:
        found = database.execute("select request_id from usage where request_id like ?", (f"{tag}-%",))
        return Counter(request_id for (request_id,) in found)


async def verdict(federation: Federation, load: Load, struck: list[dict[str, Any]]) -> dict[str, Any]:
    idle_s = await soon(federation.idle, "every counter at zero")
    answered = {each.answer.request_id for each in load.ended}

    async def written() -> bool:
        return answered <= recorded(federation.folder, load.tag).keys()

    await soon(written, "every answer recorded")
    rows = recorded(federation.folder, load.tag)
    return {
        "queries": load.options.count,
        "answered": len(load.ended),
        "failed": load.failed,
        "asked_again_at_the_other_gateway": sum(each.tries > 1 for each in load.ended),
        "broken": load.broken,
        "tokens": sum(each.answer.completion_tokens for each in load.ended),
        "rows_twice": [request_id for request_id, count in rows.items() if count > 1],
        "answers_without_a_row": sorted(answered - rows.keys()),
        "idle_after_s": idle_s,
        "faults": felt(struck, load.ended),
    }


def wrong_texts(folder: Path, ended: list[Ended], most: int) -> list[str]:
    """Request ids whose text differs from `generate` alone; each distinct prompt is generated once."""
    by_prompt: dict[str, Answered] = {}
    wrong = []
    for each in ended:
        first = by_prompt.setdefault(each.answer.prompt, each.answer)
        if (each.answer.text, each.answer.completion_tokens) != (first.text, first.completion_tokens):
            wrong.append(each.answer.request_id)
    return wrong + mismatches(folder, list(by_prompt.values()), most)


async def started(options: argparse.Namespace, path: Path) -> Federation:
    folder = Folder(path)
    folder.make()
    doors = tuple(choose_ports(0) for _ in range(options.gateways))
    sites = tuple(profiles(options.sites))
    relays = {site.name: [await Relay.start(door.grpc) for door in doors] for site in sites[2:4]}
    url = folder.database_url
    key = await asyncio.to_thread(prepare, folder, url)
    through = {name: tuple(relay.port for relay in each) for name, each in relays.items()}
    plan = RelayedPlan(folder, doors, str(options.model), sites, url, demo_model.NAME, relays=through)
    running = start_all(plan)
    await asyncio.to_thread(wait_until_ready, running, key, lambda states: None)
    return Federation(folder, running, relays)


async def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="mico-chaos-") as path:
        federation = await started(options, Path(path) / "mico")
        try:
            load = Load(federation, options, prompts(options.data, options.distinct, options.seed))
            running = asyncio.create_task(load.run())
            struck = await strike(federation, load)
            await running
            report = await verdict(federation, load, struck)
        finally:
            await asyncio.to_thread(stop_all, federation.folder, federation.running)
            for relay in [relay for relays in federation.relays.values() for relay in relays]:
                await relay.close()
            await federation.http.aclose()
    report["texts_wrong"] = wrong_texts(options.model, load.ended, options.max_tokens)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--data", type=Path, required=True, help="alpaca_like.jsonl.zst, or lines of its form"
    )
    parser.add_argument("--model", type=Path, default=demo_model.FOLDER, help="folder of the weights")
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--sites", type=int, default=5, help="at least 4")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--distinct", type=int, default=100, help="different prompts among them")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    report = asyncio.run(run(parser.parse_args()))
    print(json.dumps(report))
    wrong = ("failed", "rows_twice", "answers_without_a_row", "texts_wrong")
    return 1 if any(report[name] for name in wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
