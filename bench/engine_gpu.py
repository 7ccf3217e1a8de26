"""Measure the engine on one GPU with random weights: correctness, the cost of a step, tokens a second.

`python -m bench.engine_gpu --model bench/models/llama-3.1-8b --do check,steps,sharegpt,alpaca,profile`
Needs torch, transformers and triton, nothing else. Greedy, exact lengths, all queries at once, at most
`--slots` running, in order of arrival unless `--order` is chat or batch, which go by the lengths. New ids
in every repetition; a warm-up run of each is not counted. The last line is JSON.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import platform
import statistics
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import torch
import transformers
import triton

from bench.support.forced import check, device_runner, force_plain
from bench.support.gpu_costs import ROWS, buckets, fixed_steps, kernels, prefill_rate, profile, seconds
from bench.support.order import ORDERS
from bench.support.peers import PEERS, limits_for
from bench.support.workload import SHAPES, queries
from site_engine.core.request import Request, Sampling
from site_engine.core.request_queue import AdmissionQueue
from site_engine.core.schedule_plan import SchedulePlan
from site_engine.cuda.batch_layout import MIXED_TOKENS
from site_engine.cuda.compile import TIMED_ROWS
from site_engine.cuda.forward import fast_forward
from site_engine.cuda.llama_forward import LlamaForward
from site_engine.engine.build import overlapped_engine, warm_graphs
from site_engine.engine.engine import SiteEngine
from site_engine.engine.settings import EngineSettings
from site_engine.model.loader import LoadedModel, from_model


def plain_model(folder: str, device: str = "cuda") -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(std=0.1)
    return model


# ---- tokens a second


class Pass(NamedTuple):
    tokens: int
    wall_s: float
    iterations: int
    step_s: list[float]
    kinds: dict[str, list[float]]  # wall time of the steps in which such a plan was waited for


def kind_of(plan: SchedulePlan | None) -> str:
    if plan is None:
        return "first"
    if plan.prefills:
        return "large prefill" if plan.tokens > MIXED_TOKENS[-1] else "mixed"
    rows = len(plan.decoding)
    limits = (8, 16, 32, 64, 128, 192, 240, 256, 384, 512, 768)
    return f"decode <= {next((limit for limit in limits if rows <= limit), 1024)}"


SAMPLINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "nucleus": {"temperature": 0.8, "top_p": 0.95},
}


def serve(
    engine: SiteEngine,
    workload: str,
    repetition: int,
    *,
    sampling: str = "greedy",
    order: str = "arrival",
    count: int = 512,
) -> Pass:
    work = queries(
        workload, count, vocab_size=engine._model.vocab_size, context_tokens=engine._model.context_tokens,
        repetition=repetition,
    )  # fmt: skip
    chosen = ORDERS[order]
    engine._scheduler.queue = AdmissionQueue(chosen.policy.score)
    gc.collect()
    torch.cuda.synchronize()
    began = seconds()
    for at, query in enumerate(work):
        rules = Sampling(max_tokens=query.response_tokens, ignore_eos=True, **SAMPLINGS[sampling])  # type: ignore[arg-type]
        engine.submit(Request(f"{repetition} {at}", query.prompt, rules, lane=chosen.lane))
    tokens, step_s = 0, []
    kinds: dict[str, list[float]] = {}
    while engine.has_work:
        step_began, pending = seconds(), engine._pending
        tokens += sum([len(output.token_ids) for output in engine.step()])
        step_s.append(seconds() - step_began)
        kinds.setdefault(kind_of(None if pending is None else pending.plan), []).append(step_s[-1])
    wall_s = seconds() - began
    assert tokens == sum(query.response_tokens for query in work)
    return Pass(tokens, wall_s, len(step_s), step_s, kinds)


def costs(engine: SiteEngine, do: list[str], lap: Callable[[str], None]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "kernels" in do:
        kernels(engine)
        lap("kernels")
    if "buckets" in do:
        buckets(engine, (2, 8, 16, 32, 64, 96, 128, 192, 256))
        lap("buckets")
    if "prefill" in do:
        prompts = ((16, 512), (50, 161), (100, 161))
        found["prefill_tok_s"] = [round(prefill_rate(engine, *one)) for one in prompts]
        print("PREFILL tokens/s of 16 x 512, 50 x 161, 100 x 161:", found["prefill_tok_s"])
        lap("prefill")
    for context in (161, 600) if "steps" in do else ():
        fixed_steps(engine, context, 16)
        found[f"step_{context}"] = fixed_steps(engine, context)
        print(f"STEP 256 rows, context {context}-{context + 128}: {found[f'step_{context}']}", flush=True)
    return found


def rate(
    engine: SiteEngine, workload: str, reps: int, count: int, *, sampling: str = "greedy", order: str
) -> dict[str, Any]:
    serve(engine, workload, 99, sampling=sampling, order=order, count=count)
    passes = [
        serve(engine, workload, repetition, sampling=sampling, order=order, count=count)
        for repetition in range(reps)
    ]
    rates = [one.tokens / one.wall_s for one in passes]
    found = {
        "out_tok_s": round(statistics.median(rates)),
        "all": [round(one) for one in rates],
        "wall_s": round(statistics.median([one.wall_s for one in passes]), 3),
        "iterations": passes[0].iterations,
        "graphs": len(device_runner(engine)._steps),
        "slowest_steps_ms": [round(one * 1e3, 1) for one in sorted(passes[-1].step_s)[-8:]],
    }
    print(f"SERVE {workload} {sampling} {order}: {found}", flush=True)
    for kind, step_s in sorted(passes[-1].kinds.items()):
        print(f"   {kind}: {len(step_s)} x {statistics.fmean(step_s) * 1e3:.3f} ms = {sum(step_s):.3f} s")
    return found


def beside_peers(engine: SiteEngine, plain: Any, workload: str, count: int) -> dict[str, Any]:
    """Run the first queries of a workload here and by transformers' ways of serving, after a short pass."""
    work = queries(
        workload, count, vocab_size=engine._model.vocab_size, context_tokens=engine._model.context_tokens,
        repetition=7,
    )  # fmt: skip
    serve(engine, workload, 8, count=count)
    one = serve(engine, workload, 7, count=count)
    speeds: dict[str, Any] = {"mico": round(one.tokens / one.wall_s)}
    for name, run in PEERS.items():
        try:
            run(plain, work[:4], limits_for(work[:4], 4, 8192), seconds)
            speeds[name] = round(run(plain, work, limits_for(work, ROWS, 8192), seconds).tokens_per_s)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is theirs
            speeds[name] = f"{type(error).__name__}: {error}"
        torch.cuda.empty_cache()
        print(f"PEERS {workload}, {count} queries, output tokens/s: {speeds}", flush=True)
    return speeds


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--do", default="check,kernels,steps,buckets,prefill,sharegpt,alpaca")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--slots", type=int, default=ROWS, help="requests that run at once")
    parser.add_argument("--count", type=int, default=512, help="queries of a workload")
    parser.add_argument("--token-budget", type=int, help="of an iteration; a site's own without it")
    parser.add_argument("--kv-tokens", type=int, default=400_000)
    parser.add_argument("--sampling", default="greedy", help=f"some of {', '.join(SAMPLINGS)}")
    parser.add_argument("--order", default="arrival", help=f"some of {', '.join(ORDERS)}")
    parser.add_argument("--peer-queries", type=int, default=0, help="also run by transformers; slow")
    parser.add_argument("--peer-workload", default="alpaca", choices=sorted(SHAPES))
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    do = asked.do.split(",")
    result: dict[str, Any] = {"model": asked.model, "device": torch.cuda.get_device_name()}
    print(
        f"{asked.model} on {result['device']}; torch {torch.__version__}, transformers "
        f"{transformers.__version__}, triton {triton.__version__}, python {platform.python_version()}"
    )
    began = seconds()

    def lap(what: str) -> None:
        print(f"-- {what} at {seconds() - began:.1f} s", flush=True)

    plain = plain_model(asked.model)
    peer = copy.deepcopy(plain) if asked.peer_queries else None
    forced = force_plain(plain, plain.config.vocab_size) if "check" in do else None
    model: LoadedModel = from_model(plain, eos_token_ids=())
    lap("certified")
    forward = fast_forward(model)
    if isinstance(forward, LlamaForward):
        print("gate and up as two GEMMs at rows", [rows for rows in TIMED_ROWS if forward._split_gate(rows)])
    settings = EngineSettings(
        slots=asked.slots,
        token_budget=asked.token_budget,
        kv_tokens=asked.kv_tokens,
        max_pending=max(1024, 2 * asked.count),  # one tenant has a part of it
    )
    engine = overlapped_engine(model, settings, seconds, forward)
    if forced is not None:
        result["check"] = check(engine, forced)
        print(result["check"], flush=True)
    lap(f"{warm_graphs(engine)} graphs, {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at most")
    result |= costs(engine, do, lap)
    for workload in [name for name in SHAPES if name in do]:
        for sampling, order in product(asked.sampling.split(","), asked.order.split(",")):
            result[f"{workload}_{sampling}_{order}"] = rate(
                engine, workload, asked.reps, asked.count, sampling=sampling, order=order
            )
        if peer is not None and workload == asked.peer_workload:
            result[f"{workload}_peers"] = beside_peers(engine, peer, workload, asked.peer_queries)
        lap(workload)
    if "profile" in do:
        profile(engine)
    print(json.dumps(result))


if __name__ == "__main__":
    with torch.no_grad():
        main()
