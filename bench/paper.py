"""Repeat MICO's evaluation on real Alpaca lengths: Table 1, KV consumption, makespan over its lower bound.

    python -m bench.paper --corpus data/length_corpus.parquet [--seeds 10] [--batches 2,6,10] --json

An iteration is the unit of time, as in the paper: one second of the simulator's clock, whatever the batch.
The prompts are held out from the shipped predictor's training. `paper_ratio` is the range the paper reports
over all its cells; the values of single cells are not at hand. `ratio` is of the whole of ours,
`assigned_ratio` of the paper's method, `bound_ratio` of a perfect schedule of the same queries.
`kv_reduction` is the mean over the batch sizes, as the paper has one figure, `kv_reduction_by_batch` each of
them. `--plots DIR` draws them and needs the extra `plots`.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from heapq import heapreplace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from gateway.domain import IterationCost
from gateway.routing.policies import POLICIES
from gateway.routing.window import assign
from mico.simulation import workloads
from mico.simulation.estimators import estimator, expectations
from mico.simulation.federation import Federation, Setting
from mico.simulation.metrics import ORDERS
from mico.simulation.queries import Expected, Query, expected_length
from mico.simulation.specification import SiteSpec

CLOUDS = (2, 3, 6, 9)
QUERIES = 800
PAPER_RATIO = (1.67, 2.22)
PAPER_KV_REDUCTION = 0.4489


def static_makespan(lengths: Sequence[int], clouds: int, batch: int) -> int:
    """Deal queries out by number; each cloud runs batches in order of arrival, each until its longest has
    ended.
    """
    return max(
        sum(max(dealt[at : at + batch]) for at in range(0, len(dealt), batch))
        for dealt in (lengths[cloud::clouds] for cloud in range(clouds))
    )


def simulated_makespan(
    queries: list[Query], expected: dict[int, Expected], clouds: int, batch: int, *, best: bool
) -> float:
    """Return the iterations until all is answered: the paper's joint assignment, first come first served.

    `best`: assigned and ordered by the possible length of an answer, and offloaded.
    """
    step = IterationCost(base_s=1.0)
    sites = tuple(SiteSpec(f"s{cloud}", batch, step, 0.0, 1 << 24) for cloud in range(clouds))
    setting = Setting(
        sites,
        POLICIES["token_balanced"],
        *ORDERS["longest" if best else "fcfs"],
        offload=best,
        report_every_s=0.5,
        window_s=0.0,
        window_length=possible_length if best else expected_length,
    )
    records = Federation(setting, expected).run(queries)
    return max(record.finish_s for record in records)


def possible_length(expected: Expected) -> float:
    """Return the length that one such answer in a thousand exceeds.

    The answer that ends a batch is rarely forecast to be long.
    """
    last = expected.curve.points[-1]
    return last.generated + last.expected


def inserted_makespan(lengths: Sequence[int], clouds: int, batch: int) -> int:
    """Return the makespan of the paper's inference framework without its scheduling: queries are dealt out by
    number, and a row that ends makes place for the next.
    """
    ends = []
    for cloud in range(clouds):
        rows = [0] * batch
        for length in lengths[cloud::clouds]:
            heapreplace(rows, rows[0] + length)
        ends.append(max(rows))
    return max(ends)


def scheduled_makespan(
    queries: Sequence[Query], expected: dict[int, Expected], clouds: int, batch: int
) -> int:
    """Return the makespan of the paper's scheduling without its inference framework: assigned jointly, in
    static batches of like forecasts.
    """
    forecast = [expected_length(expected[query.number]) for query in queries]
    places = assign(forecast, [1.0] * clouds)
    order = sorted(range(len(queries)), key=lambda index: -forecast[index])
    ends = []
    for cloud in range(clouds):
        own = [queries[index].response_tokens for index in order if places[index] == cloud]
        ends.append(sum(max(own[at : at + batch]) for at in range(0, len(own), batch)))
    return max(ends)


def lower_bound(lengths: Sequence[int], clouds: int, batch: int) -> float:
    return max(sum(lengths) / (clouds * batch), *lengths)


def static_kv(queries: Sequence[Query], batch: int) -> int:
    """Sum token-places over iterations: a batch's rows as wide as its longest prompt, to its end."""
    total = 0
    for at in range(0, len(queries), batch):
        rows = queries[at : at + batch]
        width, steps = max(q.prompt_tokens for q in rows), max(q.response_tokens for q in rows)
        total += len(rows) * (steps * width + steps * (steps + 1) // 2)
    return total


def packed_kv(queries: Sequence[Query]) -> int:
    """Sum token-places where each row has its own tokens only, and only until it has ended."""
    return sum(
        q.response_tokens * q.prompt_tokens + q.response_tokens * (q.response_tokens + 1) // 2
        for q in queries
    )


def seeded(texts: Any, seeds: int, name: str) -> list[tuple[list[Query], dict[int, Expected]]]:
    found = []
    for seed in range(seeds):
        queries = workloads.assign_classes(workloads.burst(texts, QUERIES, seed), 1.0, {})  # lines of a batch
        found.append((queries, expectations(queries, estimator(name)(queries))))
    return found


class Makespans(NamedTuple):
    """Makespans of one workload on a number of clouds and rows, in iterations."""

    static: float
    scheduled: float
    inserted: float
    paper: float
    best: float
    bound: float


def makespans(queries: list[Query], expected: dict[int, Expected], clouds: int, batch: int) -> Makespans:
    lengths = [query.response_tokens for query in queries]
    return Makespans(
        static=static_makespan(lengths, clouds, batch),
        scheduled=scheduled_makespan(queries, expected, clouds, batch),
        inserted=inserted_makespan(lengths, clouds, batch),
        paper=simulated_makespan(queries, expected, clouds, batch, best=False),
        best=simulated_makespan(queries, expected, clouds, batch, best=True),
        bound=lower_bound(lengths, clouds, batch),
    )


def cell(workload: list[tuple[list[Query], dict[int, Expected]]], clouds: int, batch: int) -> dict[str, Any]:
    """Return means over the seeds; the worst of them too where a promise is for each."""
    found = [makespans(queries, expected, clouds, batch) for queries, expected in workload]
    return {
        "clouds": clouds,
        "batch": batch,
        "ratio": mean(each.static / each.best for each in found),
        "least_ratio": min(each.static / each.best for each in found),
        "paper_ratio": PAPER_RATIO,
        "bound_ratio": mean(each.static / each.bound for each in found),
        "assigned_ratio": mean(each.static / each.paper for each in found),
        "only_scheduling_ratio": mean(each.static / each.scheduled for each in found),
        "only_insertion_ratio": mean(each.static / each.inserted for each in found),
        "assigned_over_bound": mean(each.paper / each.bound for each in found),
        "makespan_over_bound": mean(each.best / each.bound for each in found),
        "worst_makespan_over_bound": max(each.best / each.bound for each in found),
    }


def kv_reduction(workload: list[tuple[list[Query], dict[int, Expected]]], batch: int) -> float:
    return mean(1 - packed_kv(queries) / static_kv(queries, batch) for queries, _ in workload)


def format_row(row: dict[str, Any]) -> str:
    return (
        "{clouds} clouds, batch {batch:2}: {ratio:.2f}x static (only scheduling {only_scheduling_ratio:.2f}, "
        "only insertion {only_insertion_ratio:.2f}, both {assigned_ratio:.2f}, at best {bound_ratio:.2f}), "
        "of the bound: assigned {assigned_over_bound:.3f}, longest first with offload "
        "{makespan_over_bound:.3f} (worst {worst_makespan_over_bound:.3f})"
    ).format(**row)


LINES = {
    "throughput": ("ratio", "bound_ratio"),
    "makespan": ("assigned_over_bound", "makespan_over_bound"),
    "ablation": ("only_scheduling_ratio", "only_insertion_ratio", "assigned_ratio", "ratio"),
}
"""A picture each: its rows' values over the batch, a panel for each number of clouds."""


def draw(result: dict[str, Any], folder: Path) -> None:
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    for name, values in LINES.items():
        figure, panels = pyplot.subplots(1, len(CLOUDS), figsize=(14, 3.5), sharey=True)
        for panel, clouds in zip(panels, CLOUDS, strict=True):
            rows = [row for row in result["table1"] if row["clouds"] == clouds]
            for value in values:
                panel.plot([row["batch"] for row in rows], [row[value] for row in rows], "o-", label=value)
            panel.set(title=f"{clouds} clouds", xlabel="batch")
        panels[0].legend()
        figure.savefig(folder / f"{name}.svg")
    figure, panel = pyplot.subplots(figsize=(5, 3.5))
    by_batch = result["kv_reduction_by_batch"]
    panel.bar([str(batch) for batch in by_batch], list(by_batch.values()))
    panel.axhline(PAPER_KV_REDUCTION, color="black")
    panel.set(title="KV consumption saved; line: the paper", xlabel="batch")
    figure.savefig(folder / "kv.svg")


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
            print(format_row(row), flush=True)
    reductions = {batch: kv_reduction(workload, batch) for batch in batches}
    result = {
        "table1": table,
        "kv_reduction": mean(reductions.values()),
        "kv_reduction_by_batch": reductions,
        "paper_kv_reduction": PAPER_KV_REDUCTION,
        "estimator": arguments.estimator,
        "seeds": arguments.seeds,
        "machine": platform.machine(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    if arguments.plots is not None:
        draw(result, arguments.plots)
    print(json.dumps(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, default=Path("data/length_corpus.parquet"))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--batches", default="2,3,4,5,6,7,8,9,10")
    parser.add_argument("--estimator", default="shipped")
    parser.add_argument("--plots", type=Path, help="write pictures (SVG) into this folder")
    parser.add_argument("--json", action="store_true", help="only the conditions and the last JSON line")
    return parser.parse_args()


if __name__ == "__main__":
    main()
