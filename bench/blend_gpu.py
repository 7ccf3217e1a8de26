"""Measure orders of an offline batch on one GPU with random weights, beside what `bench.blend` counts.

`python -m bench.blend_gpu --model bench/models/llama-3.1-8b --workload "documents and stories" --seconds 25`
Lengths are known and exact, answers greedy, ids new in every run. A short run of blend, with a part of the
lines, warms the graphs and is not counted. Every run prints the seconds of its kinds of steps; the last line
is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
from typing import Any

import numpy as np
import torch

from bench.blend import NAMED, NO_DATA, Job, lines_of
from bench.blend import run as count
from bench.engine_gpu import kind_of, plain_model
from bench.support.forced import device_runner
from bench.support.gpu_costs import seconds
from bench.support.offline_orders import Fed
from bench.support.offline_work import Line
from gateway.batches.values import Order
from site_engine.core.request import Lane, Request, Sampling
from site_engine.cuda.forward import fast_forward
from site_engine.engine.build import overlapped_engine, warm_graphs
from site_engine.engine.engine import SiteEngine
from site_engine.engine.settings import EngineSettings
from site_engine.model.loader import from_model

NAMES = {
    "arrival": Order.FILE,
    "longest": Order.LONGEST,
    "prefix": Order.PREFIX,
    "blend": Order.BLEND,
}


def prompts(lines: list[Line], vocab_size: int, seed: int) -> list[list[int]]:
    """Return random ids for each line; those of a group begin with the same ones."""
    rnd = np.random.default_rng(seed)
    shared = {line.group: rnd.integers(10, vocab_size, line.shared_tokens).tolist() for line in lines}
    return [
        [
            *shared[line.group],
            *rnd.integers(10, vocab_size, line.prompt_tokens - line.shared_tokens).tolist(),
        ]
        for line in lines
    ]


def serve(engine: SiteEngine, lines: list[Line], how: Order, seed: int) -> dict[str, Any]:
    """Run all lines; the site is fed as the gateway feeds it."""
    ids, fed = prompts(lines, engine._model.vocab_size, seed), Fed(lines, how, engine.settings.slots)
    graphs, steps, kinds = len(device_runner(engine)._steps), 0, dict[str, list[float]]()
    tokens = cached = preempted = 0
    gc.collect()
    torch.cuda.synchronize()
    began = seconds()
    while True:
        while (at := fed.next()) is not None:
            rules = Sampling(max_tokens=lines[at].response_tokens, ignore_eos=True, temperature=0.0)
            request = Request(f"{seed} {at}", ids[at], rules, lane=Lane.BATCH, tenant=str(seed))
            request.any_order, request.prefill_heavy = fed.any_order, fed.heavy[at]
            engine.submit(request)
        if not engine.has_work:
            break
        step_began, pending = seconds(), engine._pending
        for output in engine.step():
            tokens += len(output.token_ids)
            if output.finish is not None and output.timings is not None:
                fed.ended(int(output.request_id.split()[1]))
                cached += output.timings.cached_prompt_tokens
                preempted += output.timings.preemptions
        steps += 1
        kind = kind_of(None if pending is None else pending.plan)
        kinds.setdefault(kind, []).append(seconds() - step_began)
    took_s = seconds() - began
    assert tokens == sum(line.response_tokens for line in lines)
    for kind, each in sorted(kinds.items()):
        print(f"   {kind}: {len(each)} x {1e3 * sum(each) / len(each):.3f} ms = {sum(each):.2f} s")
    return {
        "took_s": round(took_s, 2),
        "tokens_per_s": round(tokens / took_s, 1),
        "cached_tokens": cached,
        "preemptions": preempted,
        "iterations": steps,
        "new_graphs": len(device_runner(engine)._steps) - graphs,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.blend_gpu", description=__doc__)
    parser.add_argument("--model", required=True, help="folder with a configuration; weights are random")
    parser.add_argument("--workload", default="documents and stories", choices=sorted(NAMED))
    parser.add_argument(
        "--data", default="", help=f"folder with traces; without it only {', '.join(NO_DATA)}"
    )
    parser.add_argument("--orders", nargs="+", default=list(NAMES), choices=list(NAMES))
    parser.add_argument("--seconds", type=float, default=25.0, help="of computing in the workload")
    parser.add_argument("--kv-tokens", type=int, default=75_000)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--longest", type=int, default=8192, help="context that graphs are made for at first")
    return parser.parse_args()


def main() -> None:
    asked, began = arguments(), seconds()
    settings = EngineSettings(slots=asked.rows, kv_tokens=asked.kv_tokens, max_pending=4096)
    model = from_model(plain_model(asked.model), eos_token_ids=())
    engine = overlapped_engine(model, settings, seconds, fast_forward(model))
    made = warm_graphs(engine, asked.longest)
    print(
        f"{torch.cuda.get_device_name()}, {made} graphs, ready after {seconds() - began:.0f} s",
        flush=True,
    )
    jobs = {
        name: Job(
            asked.workload, name, 0.0, "peak", asked.seconds, asked.kv_tokens, asked.rows, 0, asked.data
        )
        for name in asked.orders
    }
    lines = lines_of(next(iter(jobs.values())))
    print(f"warm-up: {serve(engine, lines[:: max(1, len(lines) // 200)], Order.BLEND, 99)}", flush=True)
    found: dict[str, Any] = {}
    for seed, (name, job) in enumerate(jobs.items()):
        found[name] = serve(engine, lines, NAMES[name], seed)
        counted = count(job)
        found[name] |= {"counted_s": counted["took_s"], "counted_iterations": counted["iterations"]}
        found[name]["optimal_s"] = counted["optimal_s"]
        print(f"{asked.workload}, {name}, at {seconds() - began:.0f} s: {found[name]}", flush=True)
    print(json.dumps({"conditions": vars(asked), "lines": len(lines), **found}))


if __name__ == "__main__":
    with torch.no_grad():
        main()
