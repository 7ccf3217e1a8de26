"""Compare the answers of an engine in the site's process with those of one in a process of its own.

    python -m bench.studies.process_split [--requests 2000] [--families llama,gpt2,…] [--seed 0]

Greedy answers of tiny random models in float32 on the CPU, with a KV cache so small that requests are
preempted: stop strings, end tokens, least lengths, grammars, log probabilities, resumed answers, several
choices, cancels. Text, tokens, counts and reasons must be equal; of a cancelled answer the shorter must begin
the longer. The CPU seconds are of all processes, for these requests and for as many plain ones. Exit status 1
if an answer differs. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
from collections import Counter
from typing import Any

import torch

from site_engine.core.request import Finish, Sampling
from tests.support.engine_models import FAMILIES
from tests.support.engine_split import Case, compare, differences, random_cases

PLAIN_TOKENS = 64


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.process_split", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="over all families")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = options.families.split(",")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}")
    reports = [
        study(name, options.requests // len(names), options.seed + at) for at, name in enumerate(names)
    ]
    different = sum(report["different"] for report in reports)
    print(json.dumps({"requests": sum(report["requests"] for report in reports), "families": reports}))
    return 1 if different else 0


def study(name: str, count: int, seed: int) -> dict[str, Any]:
    cases = random_cases(count, seed)
    compared = asyncio.run(compare(name, cases))
    found = differences(cases, compared.here, compared.there)
    for difference in found[:5]:
        print(f"{name} DIFFERS {difference}", file=sys.stderr)
    results = [result for choices in compared.there for result in choices]
    finishes = Counter(result.finish.value for result in results if result.finish is not None)
    greedy = Sampling(max_tokens=PLAIN_TOKENS, temperature=0.0, ignore_eos=True)
    plain = [Case(case.prompt, greedy) for case in cases]
    beside = asyncio.run(compare(name, plain, slots=32, kv_tokens=8192, token_budget=512))
    tokens = sum(len(result.token_ids) for (result,) in beside.there)
    report = {
        "family": name,
        "requests": count,
        "different": len(found) + len(differences(plain, beside.here, beside.there)),
        "tokens": sum(len(result.token_ids) for result in results),
        "finishes": dict(finishes),
        "stopped_by_text": sum(bool(result.stop_sequence) for result in results),
        "preempted": sum(result.preemptions > 0 for result in results),
        "grammars": sum(bool(case.grammar) for case in cases),
        "resumed": sum(bool(case.resumed) for case in cases),
        "refused": sum(result.finish is Finish.FAILED for result in results),
        "cpu_s": {"one_process": round(compared.here_cpu_s, 2), "two": round(compared.there_cpu_s, 2)},
        "plain_cpu_us_per_token": {
            "one_process": round(1e6 * beside.here_cpu_s / tokens, 1),
            "two": round(1e6 * beside.there_cpu_s / tokens, 1),
        },
    }
    print(json.dumps(report), flush=True)
    return report


if __name__ == "__main__":
    sys.exit(main())
