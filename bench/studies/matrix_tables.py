"""Print the tables of bench/results/simulation.md: python -m bench.studies.matrix_tables RESULTS.jsonl

Reads the runs of bench.matrix. A figure is the geometric mean of a setting's parts, a rival's too; the best
of all rivals in that figure is named. Where `mico` is above it: (=), or (-) beyond the spread, that is if the
mean of the parts' log ratios to that rival is greater than their standard deviation.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import exp, log
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from bench.matrix import ESTIMATORS, LOADS, RIVALS, SITES, TRACES, WITH_FCFS, Job, read_results

MEASURES = ("mean_normalized_latency", "p99_normalized_latency", "p99_ttft_s")
Runs = Mapping[Job, dict[str, Any]]


class Against(NamedTuple):
    """`mico` and its best rival in one figure of one setting."""

    mico: float
    best: float
    rival: str
    log_ratios: tuple[float, ...]

    @property
    def missed(self) -> bool:
        return fmean(self.log_ratios) > 0

    @property
    def beyond_spread(self) -> bool:
        spread = stdev(self.log_ratios) if len(self.log_ratios) > 1 else 0.0
        return fmean(self.log_ratios) > spread


def parts(runs: Runs, job: Job, measure: str) -> list[float]:
    """Return the figure in each part, in their order."""
    same = sorted((key.part, row[measure]) for key, row in runs.items() if key._replace(part=0) == job)
    return [value for _, value in same]


def middle(values: Sequence[float]) -> float:
    """Return the geometric mean, nan of none."""
    return exp(fmean(map(log, values))) if values else float("nan")


def opponents(job: Job, fcfs: bool = True) -> dict[str, Job]:
    found = {name: job._replace(policy=name, offload=False) for name in RIVALS}
    if fcfs:
        found |= {f"{name} (fcfs)": found[name]._replace(order="fcfs") for name in WITH_FCFS}
    return found


def against(runs: Runs, job: Job, measure: str, fcfs: bool = True) -> Against:
    ours = parts(runs, job, measure)
    theirs = {name: parts(runs, rival, measure) for name, rival in opponents(job, fcfs).items()}
    rival = min((name for name in theirs if theirs[name]), key=lambda name: middle(theirs[name]))
    ratios = tuple(log(our / their) for our, their in zip(ours, theirs[rival], strict=True))
    return Against(middle(ours), middle(theirs[rival]), rival, ratios)


def settings(delay_s: float = 0.0, loads: Sequence[float] = LOADS) -> list[Job]:
    return [
        Job(trace, 0, sites, load, delay_s=delay_s) for trace in TRACES for sites in SITES for load in loads
    ]


def cell(found: Against) -> str:
    mark = "" if not found.missed else " (=)" if not found.beyond_spread else " (-)"
    return f"{found.mico:.3g} / {found.best:.3g} {found.rival}{mark}"


def whole(runs: Runs) -> list[str]:
    lines = [
        "| trace | sites | load | mean s/token | p99 s/token | p99 TTFT s | LR | oracle | Jain | longest |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for job in settings():
        if not parts(runs, job, MEASURES[0]):
            continue
        cells = [cell(against(runs, job, measure)) for measure in MEASURES]
        jain, longest = min(parts(runs, job, "jain")), middle(parts(runs, job, "max_ttft_over_median"))
        cells = [job.trace, job.sites, f"{job.load:.2f}", *cells]
        cells += [f"{least_requests_share(runs, job):.2f}", oracle_share(runs, job)]
        lines.append(f"| {' | '.join(cells)} | {jain:.3f} | {longest:.0f} |")
    return lines


def least_requests_share(runs: Runs, job: Job) -> float:
    """Return p99 s/token over that of `least_requests` with FCFS."""
    rival = opponents(job)["least_requests (fcfs)"]
    return middle(parts(runs, job, MEASURES[1])) / middle(parts(runs, rival, MEASURES[1]))


def oracle_share(runs: Runs, job: Job) -> str:
    """Return mean and p99 s/token over those with known lengths."""
    perfect = job._replace(estimator="oracle")
    if not parts(runs, perfect, MEASURES[0]):
        return "-"
    shares = (middle(parts(runs, job, m)) / middle(parts(runs, perfect, m)) for m in MEASURES[:2])
    return ", ".join(f"{share:.2f}" for share in shares)


def counts(runs: Runs, delay_s: float = 0.0) -> list[str]:
    """Count, at each load, the settings in which `mico` is at least as good as every rival."""
    lines = [
        "| load | rivals | mean s/token | p99 s/token | p99 TTFT | geometric mean over the best |",
        "|---|---|---|---|---|---|",
    ]
    for load in LOADS:
        jobs = [job for job in settings(delay_s, [load]) if parts(runs, job, MEASURES[0])]
        for fcfs, name in ((True, "all"), (False, "with the same order")):
            if jobs:
                cells = _counted(runs, jobs, fcfs)
                lines.append(f"| {load:.2f} | {name} | {' | '.join(cells)} |")
    return lines


def _counted(runs: Runs, jobs: Sequence[Job], fcfs: bool) -> list[str]:
    cells, ratios = [], []
    for measure in MEASURES:
        found = [against(runs, job, measure, fcfs) for job in jobs]
        strictly = sum(not each.missed for each in found)
        but_for_spread = sum(not each.beyond_spread for each in found)
        cells.append(f"{strictly} ({but_for_spread}) of {len(found)}")
        ratios.append(f"{middle([each.mico / each.best for each in found]):.3f}")
    return [*cells, ", ".join(ratios)]


def variations(runs: Runs, load: float) -> list[str]:
    """Compare forecasts and parts at a load: over `mico` as it is, in geometric mean over the settings."""
    changed: dict[str, dict[str, Any]] = {"oracle": {"estimator": "oracle"}}
    changed |= {name: {"estimator": name} for name in ESTIMATORS}
    changed |= {
        "without offload": {"offload": False},
        "FCFS at the sites": {"order": "fcfs"},
        "`least_requests` with order and offload": {"policy": "least_requests"},
        "reports a second late": {"delay_s": 1.0},
        "two gateways": {"gateways": 2},
    }
    lines = ["| | mean s/token | p99 s/token | p99 TTFT | worst p99 s/token |", "|---|---|---|---|---|"]
    for name, change in changed.items():
        ratios = defaultdict(list)
        for job in settings(loads=[load]):
            other = job._replace(**change)
            for measure in MEASURES:
                if values := parts(runs, other, measure):
                    ratios[measure].append(middle(values) / middle(parts(runs, job, measure)))
        if ratios:
            cells = [f"{middle(ratios[measure]):.2f}" for measure in MEASURES]
            lines.append(f"| {name} | {' | '.join(cells)} | {max(ratios[MEASURES[1]]):.2f} |")
    return lines


def first_tokens(runs: Runs) -> list[str]:
    """Return p99 TTFT over that of `shortest_wait` with FCFS, at each load and of all settings that have the
    runs.

    In brackets: of the three on three sites without Mooncake.
    """
    kinds: dict[str, dict[str, Any]] = {
        "`mico`": {},
        "`mico` with FCFS": {"order": "fcfs"},
        "`shortest_wait` with the order of `mico`": {"policy": "shortest_wait", "offload": False},
    }
    lines = [f"| | {' | '.join(f'{load:.2f}' for load in LOADS)} |", f"|---{'|---' * len(LOADS)}|"]
    for name, change in kinds.items():
        cells = []
        for load in LOADS:
            ratios = dict(_over_least_wait(runs, settings(loads=[load]), change))
            lost = [
                ratios[job] for job in ratios if job.sites == "3" and not job.trace.startswith("mooncake")
            ]
            cells.append(f"{middle(list(ratios.values())):.2f} ({middle(lost):.2f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _over_least_wait(
    runs: Runs, jobs: Sequence[Job], change: Mapping[str, Any]
) -> Iterator[tuple[Job, float]]:
    for job in jobs:
        ours = parts(runs, job._replace(**change), MEASURES[2])
        theirs = parts(runs, opponents(job)["shortest_wait (fcfs)"], MEASURES[2])
        if ours and theirs:
            yield job, middle(ours) / middle(theirs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    runs = read_results(parser.parse_args().results)
    for title, lines in (
        ("The whole against the others", whole(runs)),
        ("At least as good as every rival (not behind by more than the spread)", counts(runs)),
        ("The same with reports a second late", counts(runs, 1.0)),
        *((f"Forecasts and parts, at {load:.0%}", variations(runs, load)) for load in LOADS),
        ("p99 TTFT over that of `shortest_wait` with FCFS", first_tokens(runs)),
    ):
        print(f"\n{title}\n", *lines, sep="\n")


if __name__ == "__main__":
    main()
