"""MICO's evaluation again on real Alpaca lengths: Table 1, KV consumption, makespan over its lower bound.

    python -m bench.paper --corpus data/length_corpus.parquet [--seeds 10] [--batches 2,6,10] --json

An iteration is the unit of time, as in the paper: one second of the simulator's clock, whatever the batch.
The prompts are held out from the shipped predictor's training. `paper_ratio` is the range the paper reports
over all its cells; the values of single cells are not at hand.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from gateway.domain import IterationCost
from gateway.routing.policies import POLICIES
from mico.simulation import workloads
from mico.simulation.estimators import estimator, expectations
from mico.simulation.federation import Federation, Setting
from mico.simulation.figures import ORDERS
from mico.simulation.queries import Expected, Query
from mico.simulation.specification import SiteSpec

CLOUDS = (2, 3, 6, 9)
QUERIES = 800
PAPER_RATIO = (1.67, 2.22)
PAPER_KV_REDUCTION = 0.4489


def static_makespan(lengths: Sequence[int], clouds: int, batch: int) -> int:
    """Queries dealt out by number; each cloud runs batches as they come, each until its longest has ended."""
    return max(
        sum(max(dealt[at : at + batch]) for at in range(0, len(dealt), batch))
        for dealt in (lengths[cloud::clouds] for cloud in range(clouds))
    )


def simulated_makespan(
    queries: list[Query], expected: dict[int, Expected], clouds: int, batch: int, *, order: str, offload: bool
) -> float:
    """Iterations until all is answered: the paper's joint assignment, then the sites' order."""
    step = IterationCost(base_s=1.0)
    sites = tuple(SiteSpec(f"s{cloud}", batch, step, 0.0, 1 << 24) for cloud in range(clouds))
    setting = Setting(
        sites, POLICIES["token_balanced"], *ORDERS[order], offload=offload, report_every_s=0.5, window_s=0.0
    )
    records = Federation(setting, expected).run(queries)
    return max(record.finish_s for record in records)


def lower_bound(lengths: Sequence[int], clouds: int, batch: int) -> float:
    return max(sum(lengths) / (clouds * batch), *lengths)


def static_kv(queries: Sequence[Query], batch: int) -> int:
    """Token-places held, summed over iterations: a batch's rows as wide as its longest prompt, to its end."""
    total = 0
    for at in range(0, len(queries), batch):
        rows = queries[at : at + batch]
        width, steps = max(q.prompt_tokens for q in rows), max(q.response_tokens for q in rows)
        total += len(rows) * (steps * width + steps * (steps + 1) // 2)
    return total


def packed_kv(queries: Sequence[Query]) -> int:
    """The same where each row holds its own tokens only, and only until it has ended."""
    return sum(
        q.response_tokens * q.prompt_tokens + q.response_tokens * (q.response_tokens + 1) // 2
        for q in queries
    )


def seeded(texts: Any, seeds: int, name: str) -> list[tuple[list[Query], dict[int, Expected]]]:
    found = []
    for seed in range(seeds):
        queries = workloads.burst(texts, QUERIES, seed)
        found.append((queries, expectations(queries, estimator(name)(queries))))
    return found


def cell(workload: list[tuple[list[Query], dict[int, Expected]]], clouds: int, batch: int) -> dict[str, Any]:
    """Means over the seeds; the worst of them too where a promise holds for each."""
    ratios, over, sorted_over = [], [], []
    for queries, expected in workload:
        lengths = [query.response_tokens for query in queries]
        bound = lower_bound(lengths, clouds, batch)
        paper = simulated_makespan(queries, expected, clouds, batch, order="fcfs", offload=False)
        best = simulated_makespan(queries, expected, clouds, batch, order="longest", offload=True)
        ratios.append(static_makespan(lengths, clouds, batch) / paper)
        over.append(paper / bound)
        sorted_over.append(best / bound)
    return {
        "clouds": clouds,
        "batch": batch,
        "ratio": mean(ratios),
        "least_ratio": min(ratios),
        "paper_ratio": PAPER_RATIO,
        "assigned_over_bound": mean(over),
        "makespan_over_bound": mean(sorted_over),
        "worst_makespan_over_bound": max(sorted_over),
    }


def kv_reduction(workload: list[tuple[list[Query], dict[int, Expected]]], batch: int) -> float:
    return mean(1 - packed_kv(queries) / static_kv(queries, batch) for queries, _ in workload)


def main() -> None:
    arguments = _arguments()
    texts = workloads.corpus(arguments.corpus)
    batches = [int(batch) for batch in arguments.batches.split(",")]
    workload = seeded(texts, arguments.seeds, arguments.estimator)
    print(f"{QUERIES} held-out Alpaca queries, {arguments.seeds} seeds, forecasts: {arguments.estimator}")
    table = []
    for clouds, batch in product(CLOUDS, batches):
        row = cell(workload, clouds, batch)
        table.append(row)
        if not arguments.json:
            over = f"{row['makespan_over_bound']:.3f} (worst {row['worst_makespan_over_bound']:.3f})"
            print(
                f"{clouds} clouds, batch {batch:2}: {row['ratio']:.2f}x static, of the bound: assigned "
                f"{row['assigned_over_bound']:.3f}, longest first with offload {over}"
            )
    reductions = {batch: kv_reduction(workload, batch) for batch in batches}
    result = {
        "table1": table,
        "kv_reduction": reductions,
        "paper_kv_reduction": PAPER_KV_REDUCTION,
        "estimator": arguments.estimator,
        "seeds": arguments.seeds,
        "machine": platform.machine(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    print(json.dumps(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, default=Path("data/length_corpus.parquet"))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--batches", default="2,3,4,5,6,7,8,9,10")
    parser.add_argument("--estimator", default="shipped")
    parser.add_argument("--json", action="store_true", help="only the conditions and the last JSON line")
    return parser.parse_args()


if __name__ == "__main__":
    main()
