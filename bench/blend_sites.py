"""Measure a batch on several counted sites that the gateway feeds: how much faster, and one that dies.

`python -m bench.blend_sites` runs workloads that need no recorded data on one site, on several, and on
several of which one dies when a third of the time is over. Every line must be answered once in each. The last
line is JSON: seconds, how many times one site's speed, and the share of the prefixes' tokens not computed.
`bound_s`: no order takes less with several. `times_at_best`: if each were as quick as the one, and
one of them had the longest answer. `killed_at_best_s`: if the sites that are left did the rest at the same
speed each, and computed again what the dead site had in memory of lines that ran. `split_scanners_s`: with
the dual scanner's lists, fixed before the first line starts.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from bench.blend import NAMED, NO_DATA, TOKEN_BUDGET, Job, as_requests, lines_of, seconds_of
from bench.support.dual_scanner import DualScanner, parts_of, split_over
from bench.support.offline_orders import ChosenQueue
from bench.support.offline_sites import CountedSites, Ended
from bench.support.offline_work import H200
from site_engine.core.request_queue import AdmissionQueue
from tests.support.counted_engine import CountedEngine


def engine_of(job: Job, lengths: dict[str, int], queue: AdmissionQueue) -> CountedEngine:
    """Return an engine that has the rows and the memory of the job."""
    return CountedEngine(
        lengths,
        seconds_of,
        kv_tokens=job.kv_tokens,
        slots=job.rows,
        token_budget=TOKEN_BUDGET,
        queue=queue,
    )


def run(job: Job, sites: int, kill_s: float = math.inf) -> Ended:
    lines = lines_of(job)
    expected, request = as_requests(job, lines)
    lengths = {str(at): line.response_tokens for at, line in enumerate(lines)}

    ended = CountedSites(
        expected, request, lambda queue: engine_of(job, lengths, queue), sites, job.rows
    ).run(kill_s)
    assert ended.answers == dict.fromkeys(range(len(lines)), 1), "a line was not answered once"
    return ended


def run_split(job: Job, sites: int) -> float:
    """Return the seconds with lists of equal work and density, each taken from both ends at its own site."""
    lines = lines_of(job)
    expected, request = as_requests(job, lines)
    lengths = {str(at): line.response_tokens for at, line in enumerate(lines)}
    ended_s = []
    for its in split_over(parts_of(expected, range(len(lines))), sites):
        queue = ChosenQueue(DualScanner(expected, which=its), request)
        engine = engine_of(job, lengths, queue)
        queue.scheduler = engine.scheduler
        ended_s.append(engine.run().seconds)
    return max(ended_s)


def _at_best_s(several_s: float, killed: Ended, sites: int) -> float:
    rest_s = 2 / 3 * several_s * sites + H200.compute_again_s(killed.lost)
    return several_s / 3 + rest_s / (sites - 1)


def compare(job: Job, sites: int) -> dict[str, Any]:
    lines = lines_of(job)
    shareable = sum(line.shared_tokens for line in lines) - sum(
        {line.group: line.shared_tokens for line in lines}.values()
    )
    one, several = run(job, 1), run(job, sites)
    killed = run(job, sites, several.seconds / 3)
    longest = max(line.response_tokens for line in lines)
    at_best_s = H200.several_at_best_s(one.seconds, longest, job.kv_tokens, sites)
    return {
        "workload": job.workload,
        "lines": len(lines),
        "one_s": round(one.seconds, 1),
        "several_s": round(several.seconds, 1),
        "times": round(one.seconds / several.seconds, 2),
        "times_at_best": round(one.seconds / at_best_s, 2),
        "bound_s": round(H200.bound(lines, job.kv_tokens, job.rows, sites), 1),
        "killed_s": round(killed.seconds, 1),
        "killed_at_best_s": round(_at_best_s(several.seconds, killed, sites), 1),
        "split_scanners_s": round(run_split(job, sites), 1),
        "shared": [round(each.cached / max(1, shareable), 3) for each in (one, several, killed)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.blend_sites", description=__doc__)
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--workload", action="append", choices=sorted(NAMED))
    parser.add_argument("--data", default="", help="folder with traces and lengths of responses")
    parser.add_argument("--seconds", type=float, default=240.0, help="of computing in each workload")
    parser.add_argument("--kv-tokens", type=int, default=75_000)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--wrong-by", type=float, default=0.0, help="standard deviation of log forecasts")
    asked = parser.parse_args()
    found = []
    for name in asked.workload or NO_DATA:
        job = Job(
            name,
            "blend",
            asked.wrong_by,
            "peak",
            asked.seconds,
            asked.kv_tokens,
            asked.rows,
            0,
            asked.data,
        )
        found.append(compare(job, asked.sites))
        print(found[-1], flush=True)
    print(json.dumps({"conditions": vars(asked), "workloads": found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
