"""Measure orders of an offline batch on one GPU with random weights, beside what `bench.blend` counts.

    python -m bench.blend_gpu --model bench/models/llama-3.1-8b --data FOLDER --workload chats

Lengths are known and exact, answers greedy, ids new in every run. A short run of blend, with a part of the
lines, warms the graphs and is not counted. Every run prints the seconds of its kinds of steps; the last line
is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
from itertools import product
from typing import Any

import torch

from bench.blend import NAMED, NO_DATA, Job, lines_of
from bench.blend import run as count
from bench.engine_gpu import kind_of, plain_model
from bench.support.forced import device_runner
from bench.support.gpu_costs import seconds
from bench.support.offline_served import ORDERS, Serving
from bench.support.offline_work import Line
from gateway.batches.values import Order
from site_engine.cuda.forward import fast_forward
from site_engine.engine.build import overlapped_engine, warm_graphs
from site_engine.engine.engine import SiteEngine
from site_engine.engine.settings import EngineSettings
from site_engine.model.loader import from_model


def serve(engine: SiteEngine, lines: list[Line], how: Order, seed: int) -> dict[str, Any]:
    """Run all lines, print the seconds of each kind of steps, and return what they took."""
    graphs, kinds = len(device_runner(engine)._steps), dict[str, list[float]]()
    serving = Serving(engine, lines, how, seed)
    gc.collect()
    torch.cuda.synchronize()
    began = step_began = seconds()
    pending = engine._pending
    while serving.step():
        now = seconds()
        kinds.setdefault(kind_of(None if pending is None else pending.plan), []).append(now - step_began)
        step_began, pending = now, engine._pending
    took_s, ended = seconds() - began, serving.ended
    for kind, each in sorted(kinds.items()):
        print(f"   {kind}: {len(each)} x {1e3 * sum(each) / len(each):.3f} ms = {sum(each):.2f} s")
    return {
        "took_s": round(took_s, 2),
        "tokens_per_s": round(ended.tokens / took_s, 1),
        "cached_tokens": ended.cached_tokens,
        "preemptions": ended.preemptions,
        "iterations": ended.iterations,
        "new_graphs": len(device_runner(engine)._steps) - graphs,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.blend_gpu", description=__doc__)
    parser.add_argument("--model", required=True, help="folder with a configuration; weights are random")
    parser.add_argument("--workload", nargs="+", default=["documents and stories"], choices=sorted(NAMED))
    parser.add_argument(
        "--data", default="", help=f"folder with traces; without it only {', '.join(NO_DATA)}"
    )
    parser.add_argument("--orders", nargs="+", default=list(ORDERS), choices=list(ORDERS))
    parser.add_argument("--seconds", type=float, default=25.0, help="of computing in the workload")
    parser.add_argument("--kv-tokens", type=int, default=75_000)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--longest", type=int, default=8192, help="context that graphs are made for at first")
    return parser.parse_args()


def job_of(asked: argparse.Namespace, workload: str, order: str) -> Job:
    return Job(workload, order, 0.0, "peak", asked.seconds, asked.kv_tokens, asked.rows, 0, asked.data)


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
    warm = lines_of(job_of(asked, asked.workload[0], asked.orders[0]))
    print(f"warm-up: {serve(engine, warm[:: max(1, len(warm) // 200)], Order.BLEND, 99)}", flush=True)
    found: dict[str, Any] = {}
    for seed, (workload, order) in enumerate(product(asked.workload, asked.orders)):
        job = job_of(asked, workload, order)
        lines = lines_of(job)
        one = serve(engine, lines, ORDERS[order], seed)
        counted = count(job)
        one |= {"lines": len(lines), "counted_s": counted["took_s"]}
        one |= {"counted_iterations": counted["iterations"], "optimal_s": counted["optimal_s"]}
        found.setdefault(workload, {})[order] = one
        print(f"{workload}, {order}, at {seconds() - began:.0f} s: {one}", flush=True)
    print(json.dumps({"conditions": vars(asked), **found}))


if __name__ == "__main__":
    with torch.no_grad():
        main()
