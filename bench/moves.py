"""Move requests between engine processes while engines are killed, and compare their answers.

    python -m bench.moves [--moves 1000] [--kill-every 25] [--families llama,gemma2] [--seed 0]

Greedy answers of tiny random models in float32 on the CPU in a pool of three processes, with so little KV
memory that requests are preempted: stop strings, end tokens, grammars, log probabilities, penalties, resumed
answers, several choices, cancels. An engine is killed with every `--kill-every`th move, by chance the giving
or the taking one, when the move is asked for or when the request has come over.
Each answer must be as that of one engine that nobody disturbs. Exit status 1 if one is not. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from typing import Any

import torch

from site_engine.text.grammar import Grammars
from tests.support.engine_models import family, tokenizer
from tests.support.engine_split import answer_all, differences, engine, random_cases
from tests.support.pool_moves import STEPS, moved_answers

REQUESTS = 150
"""In one round; rounds follow until there were enough moves."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.moves", description=__doc__)
    parser.add_argument("--moves", type=int, default=1000, help="that bring a request over, in each family")
    parser.add_argument("--kill-every", type=int, default=25, help="moves")
    parser.add_argument("--families", default="llama,gemma2")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}")
    reports = [
        asyncio.run(study(name, options.moves, options.kill_every, options.seed))
        for name in options.families.split(",")
    ]
    print(json.dumps({"families": reports}))
    return 1 if any(report["different"] for report in reports) else 0


async def study(name: str, moves: int, kill_every: int, seed: int) -> dict[str, Any]:
    grammars = Grammars(tokenizer(), family(name).served.vocab_size, ())
    requests = different = asked = moved = 0
    killed, began_s = [0] * len(STEPS), time.monotonic()
    while moved < moves:
        cases = random_cases(REQUESTS, seed)
        async with engine(name, separate=False) as (client, _):
            undisturbed = await answer_all(client, cases, grammars)
        answers, counts = await moved_answers(
            name, cases, grammars, moves=moves, kill_every=kill_every, seed=seed
        )
        found = differences(cases, undisturbed, answers)
        for difference in found[:5]:
            print(f"{name} DIFFERS {difference}", file=sys.stderr)
        requests, different, seed = requests + len(cases), different + len(found), seed + 1
        asked, moved = asked + counts.asked, moved + counts.moved
        killed = [mine + more for mine, more in zip(killed, counts.killed, strict=True)]
        print(f"{name}: {moved} moves, {sum(killed)} engines killed, {different} answers differ", flush=True)
    return {
        "family": name,
        "requests": requests,
        "different": different,
        "moves_asked": asked,
        "moves": moved,
        "killed": dict(zip(STEPS, killed, strict=True)),
        "seconds": round(time.monotonic() - began_s, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
