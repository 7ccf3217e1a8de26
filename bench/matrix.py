"""Simulate every setting with every rival at every load: python -m bench.matrix RESULTS.jsonl [--jobs N]

Each finished run is a line of RESULTS.jsonl, and what is there already is not run again: one file for one
`--data`, `--queries` and `--parts`. Tables: python -m bench.studies.matrix_tables RESULTS.jsonl

`--parts 3`: three seeds of Poisson, three stretches of each trace, evenly spaced; they overlap where a trace
is shorter than three times `--queries`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from gateway.routing.policies import POLICIES
from mico.simulation import workloads
from mico.simulation.compare import capacity
from mico.simulation.estimators import estimator, expectations
from mico.simulation.federation import Federation, Setting
from mico.simulation.metrics import ORDERS, run_metrics
from mico.simulation.queries import Expected, Query
from mico.simulation.specification import sites_of

TRACES = ("poisson", "azure_conv", "azure_code", "mooncake_conversation")
SITES = ("3", "9")
LOADS = (0.8, 0.9, 0.95, 1.1)
HIGH = 0.95
RIVALS = tuple(name for name in POLICIES if name != "mico")
WITH_FCFS = ("least_requests", "shortest_wait")
ESTIMATORS = ("noisy:0.25", "noisy:0.5", "noisy:1.0", "histogram", "constant")


class Job(NamedTuple):
    """One run. `part` is that of its trace; reports are `delay_s` late."""

    trace: str
    part: int
    sites: str
    load: float
    policy: str = "mico"
    order: str = "work"
    offload: bool = True
    estimator: str = "shipped"
    delay_s: float = 0.0
    gateways: int = 1


class Source(NamedTuple):
    """The folder of the queries, and the number of queries in each of `parts` stretches of every trace."""

    data: Path
    queries: int
    parts: int


def rivals(part: int, loads: tuple[float, ...] = LOADS) -> Iterator[Job]:
    """Yield `mico` as it is; every rival with the order of `mico` and without offload, and two with FCFS."""
    for trace, sites, load in product(TRACES, SITES, loads):
        here = Job(trace, part, sites, load)
        yield here
        yield from (here._replace(policy=name, offload=False) for name in RIVALS)
        yield from (here._replace(policy=name, offload=False, order="fcfs") for name in WITH_FCFS)


def late(part: int) -> Iterator[Job]:
    """Yield runs with reports a second late, for all policies."""
    return (job._replace(delay_s=1.0) for job in rivals(part, (HIGH,)))


def oracle(part: int) -> Iterator[Job]:
    for trace, sites, load in product(TRACES, SITES, LOADS):
        yield Job(trace, part, sites, load, estimator="oracle")


def noise(part: int) -> Iterator[Job]:
    for trace, sites, name in product(TRACES, SITES, ESTIMATORS):
        yield Job(trace, part, sites, HIGH, estimator=name)


def parts_off(part: int) -> Iterator[Job]:
    """Yield runs with offload and the order of `mico` off in turn; at one load its choice of a site too, and
    two gateways.
    """
    for trace, sites, load in product(TRACES, SITES, LOADS):
        here = Job(trace, part, sites, load)
        yield here._replace(offload=False)
        yield here._replace(order="fcfs")
        if load == HIGH:
            yield here._replace(policy="least_requests")
            yield here._replace(gateways=2)


GROUPS = {"rivals": rivals, "late": late, "oracle": oracle, "noise": noise, "off": parts_off}


@cache
def queries_of(trace: str, part: int, source: Source) -> list[Query]:
    texts = corpus(source.data / "length_corpus.parquet")
    if trace == "poisson":
        return workloads.poisson(texts, source.queries, part)
    file = source.data / "traces" / f"{trace}.parquet"
    spare = max(0, len(pd.read_parquet(file)) - source.queries)
    first = spare * part // max(1, source.parts - 1)
    return workloads.from_trace(file, texts, first + source.queries, part)[first:]


@cache
def corpus(path: Path) -> pd.DataFrame:
    return workloads.corpus(path)


@cache
def forecasts_of(trace: str, part: int, source: Source, name: str) -> dict[int, Expected]:
    queries = queries_of(trace, part, source)
    return expectations(queries, estimator(name)(queries))


def run(task: tuple[Job, Source]) -> dict[str, Any]:
    job, source = task
    specs = sites_of(job.sites)
    most = min(spec.kv_tokens for spec in specs)
    fitting = [
        query
        for query in queries_of(job.trace, job.part, source)
        if query.prompt_tokens + query.response_tokens <= most
    ]
    score, starving_after_s = ORDERS[job.order]
    setting = Setting(
        specs=tuple(specs),
        policy=POLICIES[job.policy],
        score=score,
        starving_after_s=starving_after_s,
        offload=job.offload,
        report_delay_s=job.delay_s,
        gateways=job.gateways,
    )
    queries = workloads.at_rate(fitting, job.load * capacity(fitting, specs))
    records = Federation(setting, forecasts_of(job.trace, job.part, source, job.estimator)).run(queries)
    return job._asdict() | {"queries": len(queries)} | run_metrics(records).row()


def read_results(path: Path) -> dict[Job, dict[str, Any]]:
    """Read the runs of a file of results."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {Job(*(row[field] for field in Job._fields)): row for row in rows}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--data", type=Path, default=Path("data"), help="has the corpus, and traces/")
    parser.add_argument("--queries", type=int, default=4000, help="of each trace")
    parser.add_argument("--parts", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--only", default=",".join(GROUPS), help="groups, with commas")
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    source = Source(arguments.data, arguments.queries, arguments.parts)
    done = read_results(arguments.results)
    wanted = [
        job for name in arguments.only.split(",") for n in range(source.parts) for job in GROUPS[name](n)
    ]
    jobs = [job for job in dict.fromkeys(wanted) if job not in done]
    for trace, part in dict.fromkeys((job.trace, job.part) for job in jobs):
        forecasts_of(trace, part, source, "shipped")  # before the fork, so that each process has it
    tasks = [(job, source) for job in jobs]
    pool = multiprocessing.get_context("fork").Pool(arguments.jobs)
    with pool, arguments.results.open("a") as file:
        for number, row in enumerate(pool.imap_unordered(run, tasks), 1):
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(f"{number} of {len(jobs)}", end="\r", flush=True)


if __name__ == "__main__":
    main()
