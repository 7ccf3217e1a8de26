"""The engine on one GPU, random weights: is it right, what does a step cost, how many tokens a second.

`python -m bench.engine_gpu --model bench/models/llama-3.1-8b --do check,steps,sharegpt,alpaca,profile`
Needs torch, transformers and triton, nothing else. Greedy, exact lengths, all queries at once, at most 256
running; new token ids in every repetition; a warm-up run of each is not counted. The last line is JSON.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
import triton

from bench.forced import GREEDY, check, force_plain
from bench.peers import PEERS, room_for
from bench.workload import SHAPES, lengths, queries
from site_engine.attention import triton_launch
from site_engine.attention.triton_launch import DecodeWork, Tile
from site_engine.context import Scoring
from site_engine.cuda.engine import AheadEngine, fast_forward
from site_engine.cuda.layout import MIXED_TOKENS
from site_engine.cuda.lean import LeanForward
from site_engine.cuda.model import TRIED_ROWS
from site_engine.engine import EngineSettings
from site_engine.hf_bridge import LoadedModel, from_model
from site_engine.request import Request, Sampling
from site_engine.scheduler import Entry, Plan

ROWS = 256
LATER_LAYERS = 8  # kernels are timed over so many layers' pages, so that none stays in the cache


def seconds() -> float:
    return time.perf_counter()


def plain_model(folder: str) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(std=0.1)
    return model


# ---- what a step costs


def timed_graph(once: Callable[[], None], calls: int, reps: int = 7) -> float:
    """Microseconds per call inside a captured graph, median."""
    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    took = []
    for _ in range(reps):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        took.append(began.elapsed_time(ended) / calls * 1e3)
    return float(statistics.median(took))


def steady_lengths(workload: str, rows: int) -> list[int]:
    """Contexts met while a workload runs: rows weighted by their response."""
    pairs = lengths(workload, 512)
    rnd = random.Random(1)
    picked = rnd.choices(pairs, weights=[response for _, response in pairs], k=rows)
    return [prompt + rnd.randrange(response) + 1 for prompt, response in picked]


def decode_layers(  # noqa: PLR0917
    engine: AheadEngine,
    layers: int,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    table: torch.Tensor,
    work: DecodeWork,
    out: torch.Tensor,
    tile: Tile,
) -> None:
    scoring = Scoring(inputs[0].shape[2] ** -0.5)
    for keys, values in zip(engine._arena.keys[:layers], engine._arena.values[:layers], strict=True):
        triton_launch.decode(*inputs, keys, values, table, work, out, scoring, tile=tile)


def kernels(engine: AheadEngine) -> None:
    """The decode kernel over mixes of lengths, with the writing of keys and values."""
    arena, shape = engine._arena, engine._model.layers[0]
    config = engine._model.model.config
    heads, dim = config.num_attention_heads, shape.key_dim
    layers = min(LATER_LAYERS, len(arena.keys))
    for workload, rows in (
        ("sharegpt", ROWS),
        ("alpaca", ROWS),
        ("sharegpt", 32),
        ("alpaca", 32),
        ("alpaca", 8),
    ):
        lens = steady_lengths(workload, rows)
        pages = max(-(-one // arena.page_size) for one in lens)
        table = torch.randint(1, arena.keys[0].shape[0], (rows, pages), dtype=torch.int32, device="cuda")
        query = torch.randn(1, rows, heads, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)[0]
        key, value = (
            torch.randn(1, rows, shape.kv_heads, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)[0]
            for _ in range(2)
        )
        out = torch.empty(rows, heads, dim, device="cuda", dtype=torch.bfloat16)
        floor = 4 * sum(lens) * shape.kv_heads * dim / 4.3e6
        told = []
        for chunk, tile in (
            (64, Tile(64, 2, 4)),
            (128, Tile(64, 2, 4)),
            (256, Tile(64, 2, 4)),
            (256, Tile(64, 4, 3)),
            (256, Tile(32, 2, 4)),
            (512, Tile(64, 2, 4)),
            (512, Tile(128, 4, 3)),
        ):
            items = [
                (row, at, one, row)
                for row, one in enumerate(lens)
                for at in range(max(1, -(-(one - 1) // chunk)))
            ]
            counters = torch.zeros(rows * shape.kv_heads, dtype=torch.int32, device="cuda")
            work = DecodeWork(
                torch.tensor(items, dtype=torch.int32, device="cuda"), counters, len(items) > rows, chunk
            )

            once = partial(decode_layers, engine, layers, (query, key, value), table, work, out, tile)
            told.append(f"{chunk} {tuple(tile)}: {timed_graph(once, layers):.1f}")
        print(
            f"KERNEL {workload} rows {rows} mean context {sum(lens) / rows:.0f}, floor {floor:.1f} us; "
            + "; ".join(told),
            flush=True,
        )


def fixed_steps(engine: AheadEngine, prompt_tokens: int, steps: int = 128) -> dict[str, float]:
    """ROWS requests of one length, all decoding: the engine's own loop, wall time per iteration."""
    rnd = random.Random(2)
    for row in range(ROWS):
        prompt = [rnd.randrange(10, 30000) for _ in range(prompt_tokens)]
        engine.submit(
            Request(f"fixed {row}", prompt, Sampling(max_tokens=steps + 40, temperature=0.0, ignore_eos=True))
        )
    took = []
    while engine.has_work:
        began = seconds()
        outputs = engine.step()
        took.append((len(outputs), seconds() - began))
    full = [took_s for count, took_s in took if count == ROWS][-steps - 4 : -4]
    return {"mean_ms": statistics.fmean(full) * 1e3, "median_ms": statistics.median(full) * 1e3}


def buckets(engine: AheadEngine, counts: Sequence[int], context: int = 200) -> None:
    """Device time of decode graphs by rows, and the host's time to launch one."""
    runner, pool = engine._device_runner, engine._pool
    told = []
    for rows in counts:
        requests = []
        for row in range(rows):
            request = Request(f"bucket {row}", [11] * context, GREEDY)
            request.row, request.pages = row, pool.take(pool.pages_for(context)) or []
            requests.append(request)
        plan = Plan([Entry(request, context - 1, 1, True) for request in requests])
        runner.launch(plan).land()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        host_s = []
        began.record()
        for _ in range(30):
            start = seconds()
            runner.launch(plan)
            host_s.append(seconds() - start)
        ended.record()
        ended.synchronize()
        told.append(
            f"{rows}: {began.elapsed_time(ended) / 30:.3f} ({statistics.median(host_s) * 1e6:.0f} us)"
        )
        for request in requests:
            pool.drop(request.pages)
    print(f"BUCKETS rows: ms a step, context {context} (host to launch): " + ", ".join(told), flush=True)


def prefill_rate(engine: AheadEngine, chunks: int, tokens: int) -> float:
    """Tokens/s of a packed prefill of whole prompts, the middle of five."""
    runner, pool = engine._device_runner, engine._pool
    took = []
    for _ in range(5):
        requests = []
        for row in range(chunks):
            request = Request(f"prefill {row}", [random.randrange(10, 30000) for _ in range(tokens)], GREEDY)
            request.row, request.pages = row, pool.take(pool.pages_for(tokens)) or []
            requests.append(request)
        plan = Plan([], [Entry(request, 0, tokens, True) for request in requests])
        torch.cuda.synchronize()
        began = seconds()
        runner.launch(plan).land()
        took.append(seconds() - began)
        for request in requests:
            pool.drop(request.pages)
    return chunks * tokens / statistics.median(took)


# ---- how many tokens a second


class Pass(NamedTuple):
    tokens: int
    wall_s: float
    iterations: int
    step_s: list[float]
    kinds: dict[str, list[float]]  # wall time of the steps in which such a plan was waited for


def kind_of(plan: Plan | None) -> str:
    if plan is None:
        return "first"
    if plan.prefills:
        return "large prefill" if plan.tokens > MIXED_TOKENS[-1] else "mixed"
    rows = len(plan.decodes)
    return f"decode <= {next(limit for limit in (8, 16, 32, 64, 128, 192, 240, 256) if rows <= limit)}"


SAMPLINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "nucleus": {"temperature": 0.8, "top_p": 0.95},
}


def serve(
    engine: AheadEngine, workload: str, repetition: int, sampling: str = "greedy", count: int = 512
) -> Pass:
    work = queries(
        workload, count, vocab_size=engine._model.vocab_size, context_tokens=engine._model.context_tokens,
        repetition=repetition,
    )  # fmt: skip
    gc.collect()
    torch.cuda.synchronize()
    began = seconds()
    for at, query in enumerate(work):
        rules = Sampling(max_tokens=query.response_tokens, ignore_eos=True, **SAMPLINGS[sampling])  # type: ignore[arg-type]
        engine.submit(Request(f"{repetition} {at}", query.prompt, rules))
    tokens, step_s = 0, []
    kinds: dict[str, list[float]] = {}
    while engine.has_work:
        step_began, flight = seconds(), engine._flight
        tokens += sum([len(output.token_ids) for output in engine.step()])
        step_s.append(seconds() - step_began)
        kinds.setdefault(kind_of(None if flight is None else flight.plan), []).append(step_s[-1])
    wall_s = seconds() - began
    assert tokens == sum(query.response_tokens for query in work)
    return Pass(tokens, wall_s, len(step_s), step_s, kinds)


def profile(engine: AheadEngine, context: int = 225) -> None:  # noqa: C901 - a table
    """Where a step goes. Last: after the profiler ran, every replay costs the host more."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    runner, pool = engine._device_runner, engine._pool
    if engine._scheduler.prefixes is not None:
        engine._scheduler.prefixes.clear()
    for rows, prompt in ((ROWS, 0), (16, 0), (ROWS - 1, 161)):
        requests = []
        for row in range(rows):
            request = Request(f"profile {row}", [11] * context, GREEDY)
            request.row, request.pages = row, pool.take(pool.pages_for(context)) or []
            requests.append(request)
        plan = Plan([Entry(request, context - 1, 1, True) for request in requests])
        if prompt:
            request = Request("profile prompt", [11] * prompt, GREEDY)
            request.row, request.pages = rows, pool.take(pool.pages_for(prompt)) or []
            requests.append(request)
            plan.prefills.append(Entry(request, 0, prompt, True))
        runner.launch(plan).land()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(8):
            runner.launch(plan)
        ended.record()
        ended.synchronize()
        print(f"STEP rows {rows} prompt {prompt}: {began.elapsed_time(ended) / 8:.3f} ms")
        with record(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(4):
                runner.launch(plan)
            torch.cuda.synchronize()
        total: dict[str, list[float]] = {}
        for event in seen.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                one = total.setdefault(event.name[:90], [0.0, 0])
                one[0] += event.time_range.elapsed_us()
                one[1] += 1
        busy = sum(one[0] for one in total.values()) / 4e3
        print(
            f"PROFILE rows {rows} prompt {prompt} context {context}: busy {busy:.3f} ms, "
            f"{sum(one[1] for one in total.values()) / 4:.0f} nodes"
        )
        for name, (us, count) in sorted(total.items(), key=lambda item: -item[1][0])[:16]:
            print(f"   {us / 4e3:7.3f} ms  {us / count:7.1f} us x {count / 4:5.0f}  {name}")
        for request in requests:
            pool.drop(request.pages)


def costs(engine: AheadEngine, do: list[str], lap: Callable[[str], None]) -> dict[str, Any]:
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


def rate(engine: AheadEngine, workload: str, reps: int, sampling: str = "greedy") -> dict[str, Any]:
    serve(engine, workload, 99, sampling)
    passes = [serve(engine, workload, repetition, sampling) for repetition in range(reps)]
    rates = [one.tokens / one.wall_s for one in passes]
    found = {
        "out_tok_s": round(statistics.median(rates)),
        "all": [round(one) for one in rates],
        "wall_s": round(statistics.median([one.wall_s for one in passes]), 3),
        "iterations": passes[0].iterations,
        "graphs": len(engine._device_runner._steps),
        "slowest_steps_ms": [round(one * 1e3, 1) for one in sorted(passes[-1].step_s)[-8:]],
    }
    print(f"SERVE {workload} {sampling}: {found}", flush=True)
    for kind, step_s in sorted(passes[-1].kinds.items()):
        print(f"   {kind}: {len(step_s)} x {statistics.fmean(step_s) * 1e3:.3f} ms = {sum(step_s):.3f} s")
    return found


def beside_peers(engine: AheadEngine, plain: Any, workload: str, count: int) -> dict[str, Any]:
    """The first queries of a workload: here, and by transformers' own ways of serving, a short pass first."""
    work = queries(
        workload, count, vocab_size=engine._model.vocab_size, context_tokens=engine._model.context_tokens,
        repetition=7,
    )  # fmt: skip
    serve(engine, workload, 8, count=count)
    one = serve(engine, workload, 7, count=count)
    speeds = {"mico": round(one.tokens / one.wall_s)}
    for name, run in PEERS.items():
        run(plain, work[:4], room_for(work[:4], 4, 8192), seconds)
        speeds[name] = round(run(plain, work, room_for(work, ROWS, 8192), seconds).tokens_per_s)
        torch.cuda.empty_cache()
    print(f"PEERS {workload}, {count} queries, output tokens/s: {speeds}", flush=True)
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--do", default="check,kernels,steps,buckets,prefill,sharegpt,alpaca")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--token-budget", type=int, default=8192)
    parser.add_argument("--kv-tokens", type=int, default=400_000)
    parser.add_argument("--sampling", default="greedy", help=f"some of {', '.join(SAMPLINGS)}")
    parser.add_argument("--peer-queries", type=int, default=0, help="so many for transformers, too; slow")
    parser.add_argument("--peer-workload", default="alpaca", choices=sorted(SHAPES))
    asked = parser.parse_args()
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
    if isinstance(forward, LeanForward):
        print("gate and up apart at rows", [rows for rows in TRIED_ROWS if forward._apart(rows)])
    settings = EngineSettings(slots=ROWS, token_budget=asked.token_budget, kv_tokens=asked.kv_tokens)
    engine = AheadEngine(model, settings, seconds, forward=forward)
    if forced is not None:
        result["check"] = check(engine, forced)
        print(result["check"], flush=True)
    lap(f"{engine.warm()} graphs, {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at most")
    result |= costs(engine, do, lap)
    for workload in [name for name in SHAPES if name in do]:
        for sampling in asked.sampling.split(","):
            name = workload if sampling == "greedy" else f"{workload}_{sampling}"
            result[name] = rate(engine, workload, asked.reps, sampling)
        if peer is not None and workload == asked.peer_workload:
            result[f"{workload}_peers"] = beside_peers(engine, peer, workload, asked.peer_queries)
        lap(workload)
    if "profile" in do:
        profile(engine)
    print(json.dumps(result))


if __name__ == "__main__":
    with torch.no_grad():
        main()
