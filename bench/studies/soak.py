"""Run the engine for a long time at 95% load with faults injected: does it leak, stall or grow?

    python -m bench.studies.soak --minutes 30

Sends mixed queries with cancels, releases, deadlines, oversize prompts, errors and NaNs in the forward pass,
and gives the engine so small a pool that requests are preempted. The workload's clock counts iterations, so
a busy machine does not change the load. The last line is JSON; the exit status is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from site_engine.model.loader import load
from tests.support.soak import DEMO_MODEL, ITERATION_S, LOAD, MAX_GROWTH_MIB, Ledger, Soak, growth


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    soak = Soak(load(options.model), options.seed)
    soak.faults.armed = True
    rate = LOAD * soak.capacity()
    soak.ledger = Ledger()
    soak.faults.count.clear()
    samples = soak.run(options.minutes, rate)
    left, grown = soak.left(), growth(samples)
    waits = sorted(soak.ledger.waits_s)
    for one in samples[:: max(1, len(samples) // 12)]:
        print(f"minute {one.minute:5.1f}: {one.rss_mib:7.1f} MiB, {one.objects} objects")
    found = {
        "minutes": options.minutes,
        "cpu_minutes": round(time.process_time() / 60, 1),
        "requests_per_iteration": round(rate * ITERATION_S, 4),
        "rows_running": round(soak.ledger.count.pop("rows") / soak.ledger.count["iterations"], 2),
        **soak.ledger.count,
        **soak.faults.count,
        "first_token_p50_iterations": round(waits[len(waits) // 2] / ITERATION_S),
        "first_token_p99_iterations": round(waits[len(waits) * 99 // 100] / ITERATION_S),
        "rss_growth_mib": round(grown, 2),
        "object_growth": samples[-1].objects - samples[len(samples) // 4].objects,
        "left": left,
    }
    print(json.dumps(found))
    wrong = soak.ledger.count["wrong_answers"] + soak.ledger.count["failed_without_reason"]
    return 1 if wrong or any(left.values()) or grown > MAX_GROWTH_MIB else 0


if __name__ == "__main__":
    raise SystemExit(main())
