"""Hit rates and latency by how gateways use prefix caches: python -m bench.affinity --data DIR

Simulated on the traces of Mooncake, which name the blocks of their prompts, and on made agents. DIR has
`length_corpus.parquet` and `traces/`; without it only agents run, forecast by a histogram. The rivals choose
sites themselves, with the order of `mico` and without offload. Runs repeat exactly. Each seed is another
part of a trace, another draw of agents, and other texts; a setting is the mean of its seeds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import pandas as pd

from gateway.routing.policies import POLICIES
from mico.simulation import prompts, workloads
from mico.simulation.affinity import affinity
from mico.simulation.compare import capacity
from mico.simulation.estimators import estimator, expectations
from mico.simulation.federation import Federation, Setting
from mico.simulation.metrics import ORDERS, run_metrics
from mico.simulation.queries import Expected, Query
from mico.simulation.specification import sites_of

TRACES = ("mooncake_conversation", "mooncake_synthetic", "agents")
UNSHARED = ("azure_conv", "azure_code")
ROOMY = "1x16@1~5/1000000,1x8@1.7~80/500000,1x32@2.2~250/2000000"
SITES = {"3": "3", "9": "9", "roomy": ROOMY}
"""The unequal sites of the simulator; the first three with four times the KV."""
OURS = ("prefix", "untold", "none")
RIVALS = ("hash", "session", "tree", "tree:8")
MEASURES = {
    "mean_ttft_s": "mean TTFT",
    "p99_ttft_s": "p99 TTFT",
    "mean_normalized_latency": "mean s/token",
    "p99_normalized_latency": "p99 s/token",
}


class Job(NamedTuple):
    trace: str
    sites: str
    load: float
    gateways: int
    affinity: str
    seed: int


class Source(NamedTuple):
    data: Path | None
    queries: int


@cache
def workload(trace: str, seed: int, source: Source) -> tuple[list[Query], dict[int, Expected]]:
    count = source.queries
    if source.data is None:
        queries = prompts.agents(count, seed)
        return queries, expectations(queries, estimator("histogram")(queries))
    texts = workloads.corpus(source.data / "length_corpus.parquet")
    if trace == "agents":
        queries = workloads.agents(texts, count, seed)
    else:
        file = source.data / "traces" / f"{trace}.parquet"
        parts = max(1, len(pd.read_parquet(file, columns=["arrival_s"])) // count)
        first = seed % parts * count
        queries = workloads.from_trace(file, texts, count, seed, first=first, prefixes=True)
    return queries, expectations(queries, estimator("shipped")(queries))


def run(task: tuple[Job, Source]) -> tuple[Job, dict[str, Any]]:
    job, source = task
    queries, expected = workload(job.trace, job.seed, source)
    specs = sites_of(SITES[job.sites])
    most = min(131_072, *(spec.kv_tokens for spec in specs))
    fitting = [query for query in queries if query.prompt_tokens + query.response_tokens <= most]
    setting = Setting(
        tuple(specs),
        POLICIES["mico"],
        *ORDERS["work"],
        offload=job.affinity in OURS,
        gateways=job.gateways,
        block_tokens=prompts.BLOCK_TOKENS,
        affinity=affinity(job.affinity),
    )
    scaled = workloads.at_rate(fitting, job.load * capacity(fitting, specs))
    return job, run_metrics(Federation(setting, expected).run(scaled)).row()


def jobs(options: argparse.Namespace) -> Iterator[Job]:
    """Yield every setting with every affinity; prompts that share nothing with ours alone."""
    settings = options.sites, options.loads, options.gateways
    shared = TRACES if options.data else TRACES[-1:]
    unshared = UNSHARED if options.data else ()
    for traces, affinities in ((shared, options.affinities), (unshared, OURS)):
        kept = [each for each in affinities if each in options.affinities]
        yield from (Job(*each) for each in product(traces, *settings, kept, range(options.seeds)))


def mean_of_seeds(runs: Mapping[Job, Mapping[str, Any]]) -> dict[Job, dict[str, float]]:
    """Return the mean of each setting, under the job of its first seed."""
    rows: dict[Job, list[Mapping[str, Any]]] = {}
    for job, row in runs.items():
        rows.setdefault(job._replace(seed=0), []).append(row)
    measures = (*MEASURES, "hit_rate")
    return {job: {m: fmean(row[m] for row in each) for m in measures} for job, each in rows.items()}


def tables(found: Mapping[Job, Mapping[str, Any]]) -> Iterator[str]:
    names = list(MEASURES.values())
    yield f"| trace | sites | load | gateways | affinity | hit rate | {' | '.join(names)} |"
    yield "|---" * (6 + len(names)) + "|"
    for job, row in found.items():
        cells = " | ".join(f"{row[measure]:.3g}" for measure in MEASURES)
        yield (
            f"| {job.trace} | {job.sites} | {job.load:.2f} | {job.gateways} | {job.affinity} "
            f"| {row['hit_rate']:.3f} | {cells} |"
        )


def comparison(runs: Mapping[Job, Mapping[str, Any]]) -> Iterator[str]:
    """Compare `prefix` with each other affinity in each setting, over the seeds that both have."""
    settings = list(dict.fromkeys(job._replace(seed=0) for job in runs if job.affinity == "prefix"))
    others = [each for each in dict.fromkeys(job.affinity for job in runs) if each != "prefix"]
    shown = [(measure, other) for measure in list(MEASURES)[:2] for other in others]
    columns = [f"{MEASURES[measure]} over {other}" for measure, other in shown]
    yield f"| trace | sites | load | gateways | {' | '.join(columns)} |"
    yield "|---" * (4 + len(columns)) + "|"
    for job in settings:
        cells = " | ".join(_ratio(runs, job, other, measure) for measure, other in shown)
        yield f"| {job.trace} | {job.sites} | {job.load:.2f} | {job.gateways} | {cells} |"


def _ratio(runs: Mapping[Job, Mapping[str, Any]], job: Job, other: str, measure: str) -> str:
    """Return the geometric mean of a setting's runs over another affinity, and its standard error."""
    ours = [each for each in runs if each._replace(seed=0) == job]
    pairs = [(runs[each], runs.get(each._replace(affinity=other))) for each in ours]
    logs = [log(mine[measure] / theirs[measure]) for mine, theirs in pairs if theirs is not None]
    if not logs:
        return ""
    error = stdev(logs) / sqrt(len(logs)) if len(logs) > 1 else 0.0
    return f"{exp(fmean(logs)):.3f} ± {error:.3f}"


def summary(found: Mapping[Job, Mapping[str, Any]]) -> dict[str, Any]:
    """Compare with no affinity, in geometric mean, and count where ours is best."""
    shared = [
        job._replace(affinity="none") for job in found if job.affinity == "none" and job.trace in TRACES
    ]
    to_95 = [job for job in shared if job.load <= 0.95]
    answer: dict[str, Any] = {"settings": len(shared), "settings_to_95": len(to_95)}
    run = {job.affinity for job in found}
    for name in [each for each in (*OURS[:-1], *RIVALS) if each in run]:
        ratios = {measure: _over_none(found, shared, name, measure) for measure in MEASURES}
        answer[name] = {
            "over_none": {m: round(exp(sum(map(log, r)) / len(r)), 3) for m, r in ratios.items()},
            "over_none_at_worst": {m: round(max(r), 3) for m, r in ratios.items()},
        }
    for name, measure in product(run.intersection(OURS[:-1]), MEASURES):
        best = [job.load <= 0.95 for job in shared if _is_best(found, job, name, measure)]
        answer[name] |= {f"best_{measure}_to_95": sum(best), f"best_{measure}": len(best)}
    unshared = [job for job in found if job.affinity == "none" and job.trace in UNSHARED]
    ours = run.intersection(OURS)
    worst = [abs(r - 1) for n in ours for m in MEASURES for r in _over_none(found, unshared, n, m)]
    return answer | {"unshared_off_at_most": max(worst, default=None)}


def _over_none(
    found: Mapping[Job, Mapping[str, Any]], settings: Sequence[Job], name: str, measure: str
) -> list[float]:
    return [
        found[job._replace(affinity=name)][measure] / found[job._replace(affinity="none")][measure]
        for job in settings
    ]


def _is_best(found: Mapping[Job, Mapping[str, Any]], job: Job, name: str, measure: str) -> bool:
    others = (found.get(job._replace(affinity=other)) for other in ("none", *RIVALS))
    return bool(found[job._replace(affinity=name)][measure] <= min(row[measure] for row in others if row))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.affinity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, help="folder of the corpus and of traces/")
    parser.add_argument("--queries", type=int, default=2000, help="of each trace")
    parser.add_argument("--sites", nargs="+", default=["3"], choices=SITES)
    parser.add_argument("--loads", nargs="+", type=float, default=[0.95], help="without hits, of capacity")
    parser.add_argument("--gateways", nargs="+", type=int, default=[2])
    parser.add_argument("--seeds", type=int, default=1, help="runs of each setting, whose means are printed")
    parser.add_argument("--affinities", nargs="+", default=[*OURS, *RIVALS], help="`none` among them")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    began_s = time.monotonic()
    source = Source(options.data, options.queries)
    wanted = list(jobs(options))
    for trace, seed in dict.fromkeys((job.trace, job.seed) for job in wanted):
        workload(trace, seed, source)  # before the fork, so that each process has it
    pool = multiprocessing.get_context("fork").Pool(options.jobs)
    done = {}
    with pool:
        for number, (job, row) in enumerate(pool.imap_unordered(run, [(job, source) for job in wanted]), 1):
            done[job] = row
            print(f"{number} of {len(wanted)}", end="\r", file=sys.stderr, flush=True)
    found = mean_of_seeds({job: done[job] for job in wanted})
    print(*tables(found), sep="\n")
    print("", *comparison(done), sep="\n")
    print(f"\n{len(done)} runs of {options.queries} queries in {time.monotonic() - began_s:.0f} s")
    print(json.dumps(summary(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
