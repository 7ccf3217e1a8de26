"""Measure the simulator at size, and what it finds of many sites: python -m bench.simulator [--queries N]

Each part prints a line as it ends, a JSON object at last; progress goes to stderr. Queries are drawn as they
come: prompts and answers of lognormal lengths, forecasts off by up to half. CPU is that of this process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from itertools import product
from math import ceil
from random import Random
from time import perf_counter, process_time
from typing import Any

import numpy as np

from gateway.federation.report_pace import quiet_report_every_s
from gateway.routing.policies import POLICIES
from gateway.scaling.plan import PoolPlan, ScalingPlan
from mico.simulation.day import times_s as day_times_s
from mico.simulation.estimators import expectations, point_forecast
from mico.simulation.federation import Federation, Outage, Setting
from mico.simulation.machines import Scaling, with_spares
from mico.simulation.metrics import ORDERS, Results, jain
from mico.simulation.queries import Expected, Query, Record
from mico.simulation.specification import SiteSpec, capacity_qps, sites_of

BLOCK = 1_000
PROMPT_TOKENS, RESPONSE_TOKENS = 253, 146
"""Means of the lengths drawn."""
SLOWER = (1.0, 1.3, 1.7, 2.2, 3.0)
"""Times that the sites of a burst take for everything, in relation to the fastest."""
MIB = 1024
PARTS = 20
POOLS = {
    "near": PoolPlan("aws", "group", most=6, fewest=1, usd_per_hour=4.0, region="r"),
    "far": PoolPlan("aws", "group", most=6, fewest=1, usd_per_hour=3.0, region="r"),
    "dear": PoolPlan("aws", "group", most=6, fewest=1, usd_per_hour=8.0, region="r"),
}
"""Of a day: machines of four slots, four times as slow as the reference."""
MACHINE_START_S = 300.0
NOON_S = (43_200.0, 57_600.0)


def arrivals(count: int, per_second: float, seed: int) -> Iterator[tuple[Query, Expected]]:
    """Yield queries that arrive as a Poisson process, with their forecasts."""
    random, at_s = np.random.default_rng(seed), 0.0
    for first in range(0, count, BLOCK):
        gaps_s = random.exponential(1 / per_second, BLOCK)
        times_s = (at_s + np.cumsum(gaps_s)).tolist()
        prompts = (16 * np.ceil(random.lognormal(5.0, 1.0, BLOCK) / 16)).astype(int).tolist()
        answers = np.clip(random.lognormal(4.5, 1.0, BLOCK), 1, 2000)
        forecasts = np.exp(np.round(16 * np.log(answers * random.uniform(0.5, 1.5, BLOCK))) / 16).tolist()
        lengths = answers.astype(int).tolist()
        for place in range(min(BLOCK, count - first)):
            number = first + place
            query = Query(number, times_s[place], prompts[place], lengths[place], tenant=f"t{number % 8}")
            yield query, expected(prompts[place], forecasts[place])
        at_s = times_s[-1]


@lru_cache(maxsize=100_000)
def expected(prompt_tokens: int, response_tokens: float) -> Expected:
    """Return a forecast; lengths are rounded, so that most are shared."""
    query = Query(0, 0.0, prompt_tokens, 1)
    return expectations([query], [point_forecast(response_tokens, "noisy")])[0]


def run(
    specs: tuple[SiteSpec, ...],
    queries: Iterator[tuple[Query, Expected]],
    ended: Callable[[Record], None],
    *,
    policy: str = "mico",
    **more: Any,
) -> Federation:
    federation = Federation(Setting(specs, POLICIES[policy], *ORDERS["work"], **more))
    federation.stream(queries, ended)
    return federation


class Progress:
    """Counts the queries that ended, with the CPU and the memory of each twentieth, told as it ends."""

    def __init__(self, queries: int) -> None:
        self.results = Results()
        self.parts: list[tuple[float, int]] = []  # ms of CPU a query, peak MiB so far
        self._every, self._began_s = max(1, queries // PARTS), process_time()

    def ended(self, record: Record) -> None:
        self.results.add(record)
        if self.results.queries % self._every == 0:
            now_s = process_time()
            each_ms = 1e3 * (now_s - self._began_s) / self._every
            self.parts.append((round(each_ms, 3), peak_mib()))
            self._began_s = now_s
            told = f"{self.results.queries} queries: {each_ms:.3f} ms each, {peak_mib()} MiB"
            print(told, file=sys.stderr, flush=True)


def peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // MIB


def size(queries: int, sites: int, gateways: int, load: float = 0.9) -> dict[str, Any]:
    """Simulate so many queries, and measure the simulator."""
    specs = tuple(sites_of(str(sites)))
    per_second = load * capacity_qps(list(specs), PROMPT_TOKENS, RESPONSE_TOKENS)
    progress, began_s, cpu_s = Progress(queries), perf_counter(), process_time()
    run(specs, arrivals(queries, per_second, 1), progress.ended, gateways=gateways)
    found = progress.results.metrics()
    return {
        "sites": sites,
        "gateways": gateways,
        "queries": queries,
        "answered": found.completed,
        "cpu_s": round(process_time() - cpu_s, 1),
        "wall_s": round(perf_counter() - began_s, 1),
        "simulated_s": round(found.makespan_s, 1),
        "cpu_ms_and_peak_mib_by_part": progress.parts,
        "mean_s_per_token": round(found.mean_normalized_latency, 5),
        "p99_s_per_token": round(found.p99_normalized_latency, 4),
        "p99_ttft_s": round(found.p99_ttft_s, 3),
        "moved": found.offloads,
    }


def loss(queries: int, sites: int) -> dict[str, Any]:
    """Lose every third site at one moment for six seconds, at 60% load and the pace of so many sites."""
    specs = tuple(sites_of(str(sites)))
    per_second = 0.6 * capacity_qps(list(specs), PROMPT_TOKENS, RESPONSE_TOKENS)
    from_s = min(10.0, 0.3 * queries / per_second)
    outages = tuple(Outage(spec.name, from_s, from_s + 6.0) for spec in specs[::3])
    tries: dict[int, int] = {}
    lost = 0

    def ended(record: Record) -> None:
        nonlocal lost
        lost += record.finish_s != record.finish_s
        failed = record.attempts - record.moves
        tries[failed] = tries.get(failed, 0) + 1

    every_s = float(quiet_report_every_s(sites))
    run(specs, arrivals(queries, per_second, 2), ended, outages=outages, quiet_report_every_s=every_s)
    return {
        "queries": queries,
        "sites": sites,
        "quiet_report_every_s": every_s,
        "lost": lost,
        "by_tries": dict(sorted(tries.items())),
    }


def burst(sites: int, slots: int, policy: str, seed: int) -> dict[str, Any]:
    """Send five queries for each idle site at once, with reports of a second ago."""
    each = ",".join(f"{ceil(sites / len(SLOWER))}x{slots}@{slower}" for slower in SLOWER)
    specs = tuple(sites_of(each))
    random = Random(seed)
    lengths = [random.randint(150, 250) for _ in range(5 * len(specs))]
    queries = [
        (Query(number, 2.0, 96, tokens), expected(96, float(tokens))) for number, tokens in enumerate(lengths)
    ]
    results, tokens = Results(), dict.fromkeys((spec.name for spec in specs), 0)

    def ended(record: Record) -> None:
        results.add(record)
        tokens[record.site] += record.query.response_tokens

    run(specs, iter(queries), ended, policy=policy, report_delay_s=1.0)
    found = results.metrics()
    return {
        "policy": policy,
        "slots": slots,
        "seed": seed,
        "jain_of_share_over_speed": round(jain([tokens[spec.name] * spec.cost.base_s for spec in specs]), 4),
        "mean_s_per_token": round(found.mean_normalized_latency, 4),
        "p99_s_per_token": round(found.p99_normalized_latency, 4),
        "mean_ttft_s": round(found.mean_ttft_s, 3),
        "p99_ttft_s": round(found.p99_ttft_s, 3),
        "makespan_s": round(found.makespan_s - 2.0, 2),
        "moved": found.offloads,
    }


def day(queries: int, loses: bool) -> dict[str, Any]:
    """Simulate a day of three clouds with the scaler; with `loses`, one is lost from noon for four hours."""
    plan = ScalingPlan(pool=POOLS)
    specs = with_spares(sites_of(",".join(f"1x4@4~{20 * n}={name}" for n, name in enumerate(POOLS, 1))), plan)
    times_s = day_times_s(queries, np.random.default_rng(3)).tolist()
    drawn = arrivals(queries, 1.0, 3)
    came = (
        (replace(query, arrival_s=at_s), each) for at_s, (query, each) in zip(times_s, drawn, strict=True)
    )
    noon = tuple(Outage(spec.name, *NOON_S) for spec in specs if spec.region == "near")
    results, cpu_s = Results(), process_time()
    scaling = Scaling(plan, MACHINE_START_S)
    federation = run(tuple(specs), came, results.add, scaling=scaling, outages=noon if loses else ())
    found, machines = results.metrics(), federation.machines
    assert machines is not None
    return {
        "queries": queries,
        "answered": found.completed,
        "machine_usd": round(machines.usd(), 2),
        "most_machines": {name: pool.most for name, pool in machines.pools.items()},
        "p99_s_per_token": round(found.p99_normalized_latency, 4),
        "p50_ttft_s": round(found.p50_ttft_s, 3),
        "p99_ttft_s": round(found.p99_ttft_s, 3),
        "longest_ttft_s": round(found.max_ttft_over_median * found.p50_ttft_s, 1),
        "cpu_s": round(process_time() - cpu_s, 1),
        "peak_mib": peak_mib(),
    }


def parts(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield the name and the work of each line."""
    queries, sites = options.queries, options.sites
    if "curve" in options.only:
        for number in (10, 100, 1_000):
            if number <= sites:
                yield f"curve {number}", partial(size, max(1, queries // 10), number, 1)
    if "loss" in options.only:
        yield "loss", partial(loss, max(1, queries // 5), sites)
    if "burst" in options.only:
        for seed, policy, slots in product(options.burst_seeds, ("mico", "token_balanced"), (4, 16)):
            yield f"burst {policy} {slots} seed {seed}", partial(burst, sites, slots, policy, seed)
    if "day" in options.only:
        yield "day", partial(day, max(1, queries // 5), loses=False)
        yield "day with a cloud lost at noon", partial(day, max(1, queries // 5), loses=True)
    if "size" in options.only:
        yield "size", partial(size, queries, sites, options.gateways)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queries", type=int, default=1_000_000)
    parser.add_argument("--sites", type=int, default=1_000)
    parser.add_argument("--gateways", type=int, default=50)
    parser.add_argument("--only", default="curve,loss,burst,day,size", help="parts, separated by commas")
    parser.add_argument("--burst-seeds", type=int, nargs="+", default=[7], help="of the lengths of bursts")
    options = parser.parse_args()
    options.only = options.only.split(",")
    found: dict[str, Any] = {}
    for name, work in parts(options):
        found[name] = work() | {"load_average": round(os.getloadavg()[0], 1)}
        print(f"{name}: {found[name]}", flush=True)
    conditions = {"at": datetime.now(UTC).isoformat(timespec="minutes"), "python": platform.python_version()}
    print(json.dumps(conditions | found))


if __name__ == "__main__":
    main()
