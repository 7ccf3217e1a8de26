"""Compare the simulator with a real run: the same queries through real sites and through simulated ones.

    python -m bench.studies.validate --data alpaca_like.jsonl.zst [--load 0.8] [--count 400] [--json]

Three processes with the demo model, as `mico up` starts them, join a gateway's core in this process over the
real link. The cost of an iteration at each is the fit that the site reports; arrivals, lengths and
forecasts are those of the real run, and time counts from the forecast on, which is not simulated. Exit status
1 if a mean or a p99 is more than 15% off. The sites' iteration floors stand in for a GPU: run it on a machine
that is quiet enough to keep them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import astuple
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import mico.simulation.queries as simulated
from bench.federation import prompts
from gateway.domain import Caller, IterationCost, Query, Sampling, SiteState
from gateway.errors import BadRequest
from gateway.federation.directory import Directory
from gateway.federation.server import Federation, FederationSettings, listen
from gateway.outcome import Outcome, Status
from gateway.prompt import Chat, Message
from gateway.query.answer import answer
from gateway.query.context import QueryContext
from gateway.query.forecasting import ForecastService
from gateway.routing.policies import POLICIES
from mico import demo_model
from mico.local.federation import start_process
from mico.local.folder import Folder, write_private
from mico.local.plan import Plan, Ports, to_toml
from mico.local.processes import end
from mico.local.profiles import profiles
from mico.simulation.estimators import expectations
from mico.simulation.federation import Federation as Simulated
from mico.simulation.federation import Setting
from mico.simulation.metrics import ORDERS
from mico.simulation.specification import SiteSpec, capacity_qps
from predictor.histogram import HistogramForecaster
from predictor.onnx_forecaster import load

ALLOWED = 0.15
READY_WITHIN_S = 120.0
DEADLINE_S = 300.0
WARM_UP = 60


class Real:
    """A gateway's core and the outcome of the queries, by id."""

    def __init__(self, gateway: QueryContext, outcomes: dict[str, Outcome], max_tokens: int) -> None:
        self.gateway, self.outcomes = gateway, outcomes
        self._sampling = Sampling(temperature=0.0, max_tokens=max_tokens)

    async def ask(self, id_: str, text: str, model: str) -> None:
        now_s = self.gateway.clock()
        query = Query(
            id=id_,
            model=model,
            prompt=Chat((Message("user", text),)),
            sampling=self._sampling,
            caller=Caller("bench", "bench"),
            received_s=now_s,
            deadline_s=now_s + DEADLINE_S,
        )
        with suppress(BadRequest):  # a few real prompts are longer than the model's context
            async for _ in answer(self.gateway, query):
                pass

    async def run(self, texts: Sequence[str], gaps_s: Sequence[float], name: str) -> list[float]:
        """Send the queries at their times on one clock; return when all have ended."""
        (model,) = self.gateway.directory.models
        came_s, asked = [], []
        due_s = self.gateway.clock()
        for number, (text, gap_s) in enumerate(zip(texts, gaps_s, strict=True)):
            due_s += gap_s
            await asyncio.sleep(max(0.0, due_s - self.gateway.clock()))
            came_s.append(self.gateway.clock())
            asked.append(asyncio.create_task(self.ask(f"{name}{number}", text, model)))
        await asyncio.gather(*asked)
        await self.gateway.wait_settled()
        return came_s


@asynccontextmanager
async def federation(folder: Folder, max_tokens: int) -> AsyncIterator[Real]:
    directory, outcomes, token = Directory(), dict[str, Outcome](), secrets.token_urlsafe()
    clock = asyncio.get_running_loop().time
    link = Federation(FederationSettings("bench", (token,)), directory, clock)
    server, port, _ = await listen(link, "127.0.0.1:0")
    forecasts = ForecastService(load(), HistogramForecaster())
    write_private(folder.token_file, token)
    plan = Plan(folder, (Ports(0, port),), str(demo_model.FOLDER), tuple(profiles(3)), "")
    processes = []
    try:
        for site in plan.sites:
            write_private(folder.config(site.name), to_toml(plan.site(site)))
            processes.append(start_process(folder, site.name, "site"))
        gateway = QueryContext(
            directory, link, forecasts, lambda each: outcomes.update({each.query_id: each}), clock=clock
        )
        async with asyncio.timeout(READY_WITHIN_S):
            while sum(s.state is SiteState.READY for s in directory.sites) < len(plan.sites):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        yield Real(gateway, outcomes, max_tokens)
    finally:
        end(processes, 10.0)
        await server.stop(None)
        await forecasts.close()


class Costs:
    """The time of an iteration at each site over a run: a site's own fit follows the last few hundred."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self._seen: dict[str, list[tuple[float, ...]]] = {}

    async def watch(self) -> None:
        while True:
            for site in self.directory.sites:
                if site.load.running:
                    self._seen.setdefault(site.name, []).append(astuple(site.load.iteration))
            await asyncio.sleep(0.2)

    def measured(self) -> tuple[SiteSpec, ...]:
        """Return the sites as they reported themselves to the gateway."""
        return tuple(
            SiteSpec(
                s.name,
                s.identity.slots,
                IterationCost(*np.mean(self._seen[s.name], axis=0).tolist()),
                s.rtt_s,
                s.identity.kv_capacity_tokens,
            )
            for s in self.directory.sites
        )


def simulate(
    sites: tuple[SiteSpec, ...], outcomes: Sequence[Outcome], came_s: Sequence[float], max_tokens: int
) -> list[simulated.Record]:
    queries, forecasts = [], []
    for number, (outcome, at_s) in enumerate(zip(outcomes, came_s, strict=True)):
        assert outcome.forecast is not None
        queries.append(
            simulated.Query(number, at_s - came_s[0], outcome.prompt_tokens, outcome.completion_tokens)
        )
        forecasts.append(outcome.forecast.capped(max_tokens))
    setting = Setting(sites, POLICIES["mico"], *ORDERS["work"])
    return Simulated(setting, expectations(queries, forecasts)).run(queries)


def figures(
    latency_s: Sequence[float], first_token_s: Sequence[float], tokens: Sequence[int]
) -> dict[str, float]:
    per_token = np.array(latency_s) / np.array(tokens)
    return {
        "mean_latency_s": float(np.mean(latency_s)),
        "p99_latency_s": float(np.quantile(latency_s, 0.99)),
        "mean_normalized_latency": float(per_token.mean()),
        "p99_normalized_latency": float(np.quantile(per_token, 0.99)),
        "mean_ttft_s": float(np.mean(first_token_s)),
        "p99_ttft_s": float(np.quantile(first_token_s, 0.99)),
    }


HELD_TO = ("mean_latency_s", "p99_latency_s", "mean_normalized_latency", "p99_normalized_latency")


@asynccontextmanager
async def watching(costs: Costs) -> AsyncIterator[None]:
    task = asyncio.create_task(costs.watch())
    try:
        yield
    finally:
        task.cancel()


async def compare(options: argparse.Namespace, folder: Folder) -> dict[str, Any]:
    draw = random.Random(options.seed)
    texts = prompts(options.data, options.count + WARM_UP, options.seed)
    async with federation(folder, options.max_tokens) as real:
        warm = Costs(real.gateway.directory)
        async with watching(warm):
            await real.run(texts[:WARM_UP], [0.05] * WARM_UP, "warm")
        prompt = float(np.mean([each.prompt_tokens for each in real.outcomes.values()]))
        response = float(np.mean([each.completion_tokens for each in real.outcomes.values()]))
        rate = options.load * capacity_qps(list(warm.measured()), prompt, response)
        gaps_s = [draw.expovariate(rate) for _ in range(options.count)]
        costs = Costs(real.gateway.directory)
        async with watching(costs):
            came_s = await real.run(texts[WARM_UP:], gaps_s, "q")
        sites = costs.measured()
        outcomes = [real.outcomes[f"q{number}"] for number in range(options.count)]
    answered = [
        (each, at)
        for each, at in zip(outcomes, came_s, strict=True)
        if each.status is Status.ANSWERED and each.completion_tokens
    ]
    outcomes = [each for each, _ in answered]
    forecast_s = [each.forecast_s or 0.0 for each in outcomes]
    came_s = [at + after for (_, at), after in zip(answered, forecast_s, strict=True)]
    records = simulate(sites, outcomes, came_s, options.max_tokens)
    tokens = [each.completion_tokens for each in outcomes]
    seen = figures(
        [each.total_s - after for each, after in zip(outcomes, forecast_s, strict=True)],
        [(each.first_token_s or 0.0) - after for each, after in zip(outcomes, forecast_s, strict=True)],
        tokens,
    )
    simulated = figures([each.finish_s for each in records], [each.first_token_s for each in records], tokens)
    return {
        "real": seen,
        "simulated": simulated,
        "off": {name: simulated[name] / seen[name] - 1 for name in seen},
        "allowed": ALLOWED,
        "load": options.load,
        "queries_per_s": rate,
        "answered": len(outcomes),
        "sites": {site.name: {"slots": site.slots, "rtt_s": site.rtt_s, **_cost(site)} for site in sites},
        "cpu_count": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "machine": platform.machine(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _cost(site: SiteSpec) -> dict[str, float]:
    cost = site.cost
    return {"base_s": cost.base_s, "per_row_s": cost.per_row_s, "per_token_s": cost.per_token_s}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="only the last JSON line")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as path:
        folder = Folder(Path(path))
        folder.make()
        result = asyncio.run(compare(options, folder))
    if not options.json:
        for name, value in result["real"].items():
            simulated = result["simulated"][name]
            print(f"{name:24} real {value:8.4f}  simulated {simulated:8.4f}  {result['off'][name]:+.1%}")
    print(json.dumps(result))
    return int(any(abs(result["off"][name]) > ALLOWED for name in HELD_TO))


if __name__ == "__main__":
    sys.exit(main())
