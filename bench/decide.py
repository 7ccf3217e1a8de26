"""Measure the cost of one decision, of prefixes and of one joint window: python -m bench.decide [--json]

Processor time of this process in the best of many rounds, each so short that most pass without a switch to
another process: neighbours on the machine count for little.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime
from random import Random
from time import process_time

from gateway.domain import Credit, IterationCost, LoadReport, Model, Site, SiteIdentity, SiteState
from gateway.routing.decide import decide
from gateway.routing.demand import Demand
from gateway.routing.fleet import Fleet
from gateway.routing.policies import POLICIES
from gateway.routing.prefixes import MAX_HOLDERS, MAX_PREFIXES, PrefixIndex, prefix_of
from gateway.routing.window import assign

SITES = (1, 3, 10, 30, 100, 300, 1000)
CALLS, ROUNDS = 20, 500
PROMPT_CHARS = (500, 2_000, 10_000, 100_000, 4_000_000)
PROMPTS_CHARS = 4_000_000
"""Of the different prompts that are looked up in turn, 10 to 1,000, so that most are not in the processor's
caches.
"""
PROMISED_US = {3: 50.0, 1000: 1000.0}
PROMISED_AFFINITY_US = {3: 60.0, 1000: 200.0}
"""With 2,000 characters looked up and remembered."""
PROMISED_WINDOW_MS = 100.0


def site(number: int, random: Random) -> Site:
    """Return a site with a typical load: some have slots free, some a queue."""
    identity = SiteIdentity(
        name=f"s{number:04d}",
        boot_id="",
        cloud="c",
        region="r",
        models={"m": Model("m", "", 8192, 0, "", frozenset({"chat"}))},
        slots=16,
        kv_capacity_tokens=100_000,
        output_usd_per_mtok=random.choice([0.5, 1.0, 2.0]),
    )
    running, pending = random.randint(8, 16), random.choice([0, 0, 4])
    load = LoadReport(
        seq=1,
        received_s=0.0,
        running=running,
        pending=pending,
        kv_free_tokens=60_000,
        kv_reserved_tokens=5_000,
        iteration=IterationCost(0.02, 0.0002, 0.00003, 2e-8),
        running_remaining=tuple(sorted(random.randint(1, 500) for _ in range(running))),
        pending_prompt_tokens=100 * pending,
        pending_response_tokens=150.0 * pending,
    )
    return Site(identity, SiteState.READY, load, Credit(), rtt_s=random.uniform(0.005, 0.25))


def min_us(call: Callable[[int], object], calls: int = CALLS, rounds: int = ROUNDS) -> float:
    """Return microseconds a call, in the best of the rounds. `call` gets the number of each."""
    each_s = []
    for first in range(0, calls * rounds, calls):
        start = process_time()
        for turn in range(first, first + calls):
            call(turn)
        each_s.append((process_time() - start) / calls)
    return min(each_s) * 1e6


def decision_us(policy: str, sites: int) -> float:
    fleet = Fleet.of(site(number, Random(number)) for number in range(sites))
    demand = Demand("m", prompt_tokens=120, response_tokens=180.0, kv_tokens=600)
    return min_us(lambda turn: decide(demand, fleet, POLICIES[policy], now_s=0.5, turn=turn))


def affinity_us(sites: int, remembered: PrefixIndex, chars: int) -> float:
    """Measure a decision that looks up a prompt among those remembered, and remembers it."""
    fleet = Fleet.of(site(number, Random(number)) for number in range(sites))
    count = max(10, min(1_000, PROMPTS_CHARS // chars))
    prompts = [f"{number} ".ljust(chars, "x") for number in range(count)]
    for number, prompt in enumerate(prompts):
        remembered.record(prefix_of(prompt, "t", "m"), fleet.sites[number % sites].name, 0.0)

    def decide_once(turn: int) -> None:
        prefix = prefix_of(prompts[turn % len(prompts)], "t", "m")
        few = fleet.few_serving("m", frozenset(), most=MAX_HOLDERS + 1)
        cached = remembered.expected(prefix, few).times(chars / 4)
        demand = Demand("m", prompt_tokens=chars // 4, response_tokens=180.0, kv_tokens=600, cached=cached)
        chosen = decide(demand, fleet, POLICIES["mico"], now_s=0.5, turn=turn)
        assert chosen.site is not None
        remembered.record(prefix, chosen.site.name, 0.0)

    return min_us(decide_once)


def remembered_prefixes() -> tuple[PrefixIndex, float]:
    """Return an index that is nearly full, and its memory in MiB."""
    tracemalloc.start()
    index, number = PrefixIndex(max_age_s=1e9), 0
    while len(index) < 0.97 * MAX_PREFIXES:
        index.record(prefix_of(f"{number} ".ljust(2_000, "x"), "t", "m"), f"s{number % 1000:04d}", 0.0)
        number += 1
    mib = tracemalloc.get_traced_memory()[0] / 2**20
    tracemalloc.stop()
    return index, mib


def news_us() -> float:
    """Measure the update of one site of the fleet, which every report and every assignment costs."""
    fleet = Fleet.of(site(number, Random(number)) for number in range(1000))
    news = [site(number, Random(number + seed)) for seed in (1, 0) for number in range(1000)]
    return min_us(lambda turn: fleet.put(news[turn % 2000]), 1000)


def window_ms(queries: int, sites: int) -> float:
    random = Random(0)
    lengths = [random.expovariate(1 / 180) + 1 for _ in range(queries)]
    speeds = [random.uniform(100, 900) for _ in range(sites)]
    return min_us(lambda _: assign(lengths, speeds), 1, 20) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="only the last JSON line")
    quiet = parser.parse_args().json
    decisions = {sites: decision_us("mico", sites) for sites in SITES}
    remembered, mib = remembered_prefixes()
    affinity = {
        chars: {sites: affinity_us(sites, remembered, chars) for sites in (3, 1000)} for chars in PROMPT_CHARS
    }
    result = {
        "decision_us": decisions,
        "policies_us_1000": {name: decision_us(name, 1000) for name in POLICIES},
        "affinity_us": affinity,
        "remembered_prefixes": len(remembered),
        "prefixes_mib": mib,
        "news_us": news_us(),
        "window_ms": window_ms(1000, 1000),
        "promised": {
            "decision_us": PROMISED_US,
            "affinity_us": PROMISED_AFFINITY_US,
            "window_ms": PROMISED_WINDOW_MS,
        },
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    if not quiet:
        for sites, each_us in decisions.items():
            print(f"{sites:5} sites: {each_us:7.1f} µs a decision")
        for chars, by_sites in affinity.items():
            print(
                f"{chars:,} characters looked up and remembered: "
                f"{by_sites[3]:.1f} µs a decision over 3 sites, {by_sites[1000]:.1f} over 1,000"
            )
        print(f"{len(remembered):,} of at most {MAX_PREFIXES:,} prefixes: {mib:.0f} MiB")
        print(f"one site's update: {result['news_us']:.1f} µs")
        print(f"1,000 queries over 1,000 sites jointly: {result['window_ms']:.1f} ms")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
