"""Measure replicas on one real Postgres: quotas, revocation, an absent database, a killed replica.

    python -m bench.tenants                 all parts, about fourteen minutes
    python -m bench.tenants --only shares   one of: quota, shares, month, usage, revoke, outage, kill, turns

Each gateway is a process of its own; the site behind both is a stand-in that answers at once, so that what is
measured is the gateway and its database. Exit status 1 where a promise is broken; the last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from bench.support.shared_quotas import month_part, shares_part
from bench.support.tenant_scene import (
    ACT,
    ANSWER_TOKENS,
    PEPPER,
    PROMPT_TOKENS,
    most_in_a_minute,
    new_key,
    ready,
    scene,
)
from bench.support.usage_of_ends import usage_part
from gateway.quotas.limits import Kind, Scope
from gateway.store.store import open_store
from site_engine.core.remaining_curve import RemainingCurve, RemainingPoint
from site_engine.core.request import Request
from site_engine.core.request_queue import AdmissionQueue
from tests.support.postgres_server import PostgresServer

TOKENS_PER_S = 1_000.0
"""Of the site in `turns`; it matters only for ageing."""


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
            "p99_ms_while_away": p99_ms(away_s),
            "p99_ms_while_there": p99_ms(there_s),
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


def flooded(queue: AdmissionQueue, number: Iterator[int]) -> list[int]:
    """Return, for each rare query, the tokens that the flood got while it waited."""
    waits, served = [], 0
    for _ in range(1_000):
        queue.push(waiting(next(number), "flood", 200))
    for _ in range(200):
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


def p99_ms(seconds: list[float]) -> float:
    return round(1000 * sorted(seconds)[int(0.99 * len(seconds))], 1) if seconds else 0.0


PARTS: dict[str, Callable[[], Awaitable[dict[str, Any]]]] = {
    "quota": quota_part,
    "shares": shares_part,
    "month": month_part,
    "usage": usage_part,
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
