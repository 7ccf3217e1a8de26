"""Measure what copies to a shadow cost the users whose queries are copied: with and without, in turns.

    python -m bench.studies.shadow --rounds 8 --share 1.0 --json

One gateway, one upstream that serves both models; streams begin at an even pace in rounds with a shadow and
without one, so that both see the same machine. The last line has the ratios of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import httpx

from bench.support.http_load import Tally, open_loop, quantile_ms
from gateway.routing.model_routes import ModelRoute, Shadow, Target
from gateway.store.audit import Act
from gateway.store.store import Store, open_store
from tests.support.gateway_process import PEPPER, GatewayProcess, Workspace, mico, upstream
from tests.support.scripted_upstream import MODEL, SHADOW

ACT = Act("bench", "measurement")
TOKENS = 16
LEARNT_WITHIN_S = 20.0


async def switch(store: Store, gateway: GatewayProcess, share: float) -> None:
    """Set or remove the shadow, and wait until the gateway lists the route or does not."""
    if share:
        await store.routes.put(ModelRoute(MODEL, (Target(MODEL),), Shadow(SHADOW, share)), ACT)
    else:
        await store.routes.remove(MODEL, ACT)
    headers = {"authorization": f"Bearer {gateway.key}"}
    async with httpx.AsyncClient(headers=headers) as client, asyncio.timeout(LEARNT_WITHIN_S):
        while True:
            card = (await client.get(f"http://127.0.0.1:{gateway.port}/v1/models/{MODEL}")).json()
            if (card["owned_by"] == "route") == bool(share):
                return
            await asyncio.sleep(0.1)


async def copies(gateway: GatewayProcess) -> dict[str, int]:
    """Return the counts of copies by their result."""
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://127.0.0.1:{gateway.metrics_port}/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("mico_shadow_copies_total")]
    return {line.split('result="')[1].split('"')[0]: round(float(line.split()[-1])) for line in lines}


def figures(tallies: list[Tally]) -> dict[str, Any]:
    replies = [reply for tally in tallies for reply in tally.replies]
    first, total = [reply.first_s for reply in replies], [reply.total_s for reply in replies]
    return {
        "answers": len(replies),
        "wrong": sum(len(tally.wrong) for tally in tallies),
        "first_token_p50_ms": quantile_ms(first, 0.5),
        "first_token_p99_ms": quantile_ms(first, 0.99),
        "total_p50_ms": quantile_ms(total, 0.5),
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="mico-bench-") as folder:
        workspace = Workspace(Path(folder), Path(folder))
        url = f"sqlite+aiosqlite:///{folder}/mico/mico.db"
        without: list[Tally] = []
        shadowed: list[Tally] = []
        counts: dict[str, int] = {}
        async with (
            upstream(workspace, options.iteration_ms),
            mico(workspace, "WARNING") as gateway,
            open_store(url, Path(folder) / "mico", pepper=PEPPER, serving=False) as store,
        ):

            async def stream(for_s: float) -> Tally:
                return await open_loop(
                    gateway.port, gateway.key, per_s=options.per_s, for_s=for_s, tokens=TOKENS
                )

            await stream(2.0)  # warms both sides up
            for _ in range(options.rounds):
                without.append(await stream(options.round_s))
                await switch(store, gateway, options.share)
                shadowed.append(await stream(options.round_s))
                for result, count in (await copies(gateway)).items():
                    counts[result] = counts.get(result, 0) + count
                await switch(store, gateway, 0.0)
                await copies(gateway)  # a scrape forgets the counts of the route that is gone
    one, other = figures(without), figures(shadowed)
    names = ("first_token_p50_ms", "first_token_p99_ms", "total_p50_ms")
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "streams_per_s": options.per_s,
        "share": options.share,
        "without": one,
        "with_shadow": other,
        "copies": counts,
        "ratios": {name: round(other[name] / one[name], 3) for name in names},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.studies.shadow",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=8, help="of each kind, in turns")
    parser.add_argument("--round-s", type=float, default=8.0)
    parser.add_argument("--per-s", type=float, default=20.3, help="streams that begin in a second")
    parser.add_argument("--share", type=float, default=1.0, help="of the queries that are copied")
    parser.add_argument("--iteration-ms", type=float, default=20.0)
    parser.add_argument("--json", action="store_true", help="one line of JSON, without a summary")
    options = parser.parse_args()
    found = asyncio.run(measure(options))
    if not options.json:
        print(f"first token and whole answer, with a shadow ÷ without: {found['ratios']}")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
