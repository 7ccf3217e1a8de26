"""Compare the engine with `generate` and transformers' continuous batching on random requests.

The requests vary over families, runners, policies, engine shapes, tight pools and sharing.

`python -m bench.studies.exactness [--requests 2000]` compares float32 greedy tokens; the last line is JSON.
A difference counts unless the plain model's two best logits there are closer than rounding.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import random
import sys
import time
from collections import Counter
from functools import cache
from typing import Any, NamedTuple

import torch
import transformers

from bench.support.peers import Limits, run_continuous
from bench.support.workload import Query
from site_engine.core.remaining_curve import RemainingCurve, RemainingPoint
from site_engine.core.request import Request, Sampling
from site_engine.core.request_queue import DEFAULT_POLICY, POLICIES
from site_engine.engine.build import packed_engine
from site_engine.engine.engine import SiteEngine
from site_engine.engine.settings import EngineSettings
from site_engine.model.loader import LoadedModel, from_model
from tests.support.model_families import VOCAB, random_model, tiny_config
from tests.support.padded_batch import padded_engine

FAMILIES = ("gpt2", "llama", "qwen2", "mistral", "gemma2", "gpt_neo", "mixtral", "gpt_oss", "deepseek_v3")
NOT_CONTINUOUS = ("gpt_neo", "deepseek_v3")  # transformers' continuous batching fails on these
RUNNERS = ("packed", "packed", "packed", "packed", "dense", "decoupled")
REQUESTS_PER_ENGINE = 25
ROUNDING = 1e-4
TOO_SHORT = RemainingCurve((RemainingPoint(0, 1.0, 1),))


class Pair(NamedTuple):
    plain: Any
    served: LoadedModel


@cache
def pair(name: str) -> Pair:
    plain = random_model(tiny_config(name))
    return Pair(plain, from_model(copy.deepcopy(plain), eos_token_ids=()))


def random_engine(rnd: random.Random, served: LoadedModel) -> SiteEngine:
    """Return an engine of a random shape; most have a pool so tight that requests are preempted."""
    slots, runner = rnd.randint(1, 16), rnd.choice(RUNNERS)
    kv_tokens = rnd.choice([128, 144, 192, 4096])
    paged = runner == "packed"
    settings = EngineSettings(
        slots=slots,
        token_budget=slots + rnd.randint(0, 60),
        page_size=rnd.choice([1, 2, 4, 8, 16] if kv_tokens < 4096 else [1, 16, 64, 256]),
        kv_tokens=kv_tokens,
        policy=rnd.choice([*POLICIES.values(), *[DEFAULT_POLICY] * 5]),
        prefix_cache=paged and rnd.random() < 0.7,
        debug_poison=paged,
    )
    ticks = itertools.count()

    def clock() -> float:
        return next(ticks) * 1e-3

    if not paged:
        return padded_engine(served, settings, clock, apart=runner == "decoupled")
    return packed_engine(served, settings, clock)


def random_requests(rnd: random.Random) -> list[Request]:
    """Return requests of which some begin alike; forecasts are too short, so that nothing is reserved."""
    beginnings = [[rnd.randrange(1, VOCAB) for _ in range(rnd.choice([8, 24, 40]))] for _ in range(3)]
    requests = []
    for at in range(REQUESTS_PER_ENGINE):
        prompt = [rnd.randrange(1, VOCAB) for _ in range(rnd.choice([1, 2, 7, 20, 50]))]
        if rnd.random() < 0.4:
            prompt = rnd.choice(beginnings) + prompt[:20]
        sampling = Sampling(max_tokens=rnd.choice([1, 4, 12, 30]), temperature=0.0)
        requests.append(Request(str(at), prompt, sampling, remaining=TOO_SHORT))
    return requests


def serve(
    engine: SiteEngine, requests: list[Request], rnd: random.Random
) -> tuple[dict[str, list[int]], Counter[str]]:
    """Return all answers; requests trickle in while others run."""
    answers: dict[str, list[int]] = {request.id: [] for request in requests}
    seen: Counter[str] = Counter()
    waiting = list(requests)
    while waiting or engine.has_work:
        for _ in range(rnd.randint(0, 3)):
            if waiting:
                engine.submit(waiting.pop(0))
        for output in engine.step():
            answers[output.request_id] += output.token_ids
            if output.timings is not None:
                seen["preemptions"] += output.timings.preemptions
                seen["shared_tokens"] += output.timings.cached_prompt_tokens
                seen[f"ended_by_{output.finish}"] += 1
    return answers, seen


def alone(model: Any, request: Request) -> list[int]:
    with torch.no_grad():
        whole = model.generate(
            torch.tensor([list(request.prompt)]),
            attention_mask=torch.ones(1, len(request.prompt), dtype=torch.long),
            max_new_tokens=request.max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    answer: list[int] = whole[0, len(request.prompt) :].tolist()
    return answer


@cache
def continuous_copy(name: str) -> Any:
    return copy.deepcopy(pair(name).plain)


def together(name: str, requests: list[Request]) -> list[list[int]]:
    """Return the answers of transformers' continuous batching to all requests."""
    work = [Query(list(request.prompt), request.max_tokens) for request in requests]
    return run_continuous(continuous_copy(name), work, Limits(8, 128, 4096), time.perf_counter).answers


def is_a_tie(model: Any, request: Request, answer: list[int], expected: list[int]) -> bool:
    """Return whether the first different token is a matter of rounding."""
    at = next((n for n, two in enumerate(zip(answer, expected, strict=False)) if two[0] != two[1]), None)
    if at is None:
        return False
    with torch.no_grad():
        ids = torch.tensor([[*request.prompt, *expected[:at]]])
        best = model(input_ids=ids, use_cache=False).logits[0, -1].topk(2).values
    return bool(best[0] - best[1] < ROUNDING * best[0].abs().clamp(min=1.0))


def compare(
    where: str, plain: Any, requests: list[Request], answers: dict[str, list[int]], expected: list[list[int]]
) -> Counter[str]:
    """Count the answers that differ, and those of them that differ by rounding alone."""
    count: Counter[str] = Counter()
    for request, wanted in zip(requests, expected, strict=True):
        if answers[request.id] != wanted:
            tie = is_a_tie(plain, request, answers[request.id], wanted)
            count["ties" if tie else "mismatches"] += 1
            print(f"{where}, request {request.id}: {'tie' if tie else 'WRONG'}", file=sys.stderr)
    return count


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.exactness", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    count: Counter[str] = Counter()
    for number in range(-(-options.requests // REQUESTS_PER_ENGINE)):
        rnd = random.Random(options.seed * 100_000 + number)
        name = FAMILIES[number % len(FAMILIES)]
        plain, served = pair(name)
        engine, requests = random_engine(rnd, served), random_requests(rnd)
        answers, seen = serve(engine, requests, rnd)
        count.update(seen)
        count["leaked_pages"] += engine._pool.capacity - engine._pool.available
        count[f"requests_{type(engine).__name__}"] += len(requests)
        oracles = {"generate": [alone(plain, request) for request in requests]}
        if name not in NOT_CONTINUOUS:
            oracles["continuous batching"] = together(name, requests)
        for oracle, expected in oracles.items():
            count[f"against {oracle}"] += len(requests)
            count.update(compare(f"{name}, engine {number}", plain, requests, answers, expected))
        count["requests"] += len(requests)
        count["tokens"] += sum(map(len, oracles["generate"]))
    found = {"mismatches": 0, "ties": 0, **count, "families": len(FAMILIES), "torch": torch.__version__}
    print(json.dumps(found))
    return 1 if found["mismatches"] or found["leaked_pages"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
