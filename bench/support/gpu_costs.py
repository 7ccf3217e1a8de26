"""Measure the engine's costs on a GPU: the decode kernel, steps by rows, prefill, parts of a step."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from bench.support.forced import GREEDY, device_runner
from bench.support.workload import lengths
from site_engine.core.request import Request, Sampling
from site_engine.core.schedule_plan import ScheduledChunk, SchedulePlan
from site_engine.cuda import attention_launch
from site_engine.cuda.attention_launch import DecodeWork, Tile
from site_engine.engine.engine import SiteEngine
from site_engine.model.attention_context import Scoring

ROWS = 256
STAGGER = 24  # iterations until all requests have begun
SETTLING = 2  # iterations in which those before are still waited for
LATER_LAYERS = 8  # kernels are timed over the pages of several layers, so that none stays in the cache


def seconds() -> float:
    return time.perf_counter()


def timed_graph(once: Callable[[], None], calls: int) -> float:
    """Return microseconds per call inside a captured graph, median."""
    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    took = []
    for _ in range(7):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        took.append(began.elapsed_time(ended) / calls * 1e3)
    return float(statistics.median(took))


def steady_lengths(workload: str, rows: int) -> list[int]:
    """Return the contexts met while a workload runs: rows weighted by their response."""
    pairs = lengths(workload, 512)
    rnd = random.Random(1)
    picked = rnd.choices(pairs, weights=[response for _, response in pairs], k=rows)
    return [prompt + rnd.randrange(response) + 1 for prompt, response in picked]


def decode_layers(  # noqa: PLR0917
    engine: SiteEngine,
    layers: int,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    table: torch.Tensor,
    work: DecodeWork,
    out: torch.Tensor,
    tile: Tile,
) -> None:
    scoring = Scoring(inputs[0].shape[2] ** -0.5)
    for keys, values in zip(engine._kv_cache.keys[:layers], engine._kv_cache.values[:layers], strict=True):
        attention_launch.decode(*inputs, keys, values, table, work, out, scoring, tile=tile)


def kernels(engine: SiteEngine) -> None:
    """Time the decode kernel over mixes of lengths, with the writing of keys and values."""
    kv_cache, shape = engine._kv_cache, engine._model.layers[0]
    config = engine._model.model.config
    heads, dim = config.num_attention_heads, shape.key_dim
    layers = min(LATER_LAYERS, len(kv_cache.keys))
    for workload, rows in (
        ("sharegpt", ROWS),
        ("alpaca", ROWS),
        ("sharegpt", 32),
        ("alpaca", 32),
        ("alpaca", 8),
    ):
        lens = steady_lengths(workload, rows)
        pages = max(-(-one // kv_cache.page_size) for one in lens)
        table = torch.randint(1, kv_cache.keys[0].shape[0], (rows, pages), dtype=torch.int32, device="cuda")
        query = torch.randn(1, rows, heads, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)[0]
        key, value = (
            torch.randn(1, rows, shape.kv_heads, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)[0]
            for _ in range(2)
        )
        out = torch.empty(rows, heads, dim, device="cuda", dtype=torch.bfloat16)
        floor = 4 * sum(lens) * shape.kv_heads * dim / 4.3e6
        parts = []
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
            parts.append(f"{chunk} {tuple(tile)}: {timed_graph(once, layers):.1f}")
        print(
            f"KERNEL {workload} rows {rows} mean context {sum(lens) / rows:.0f}, floor {floor:.1f} us; "
            + "; ".join(parts),
            flush=True,
        )


def fixed_steps(engine: SiteEngine, prompt_tokens: int, steps: int = 128) -> dict[str, float]:
    """Time ROWS requests of one length, all decoding: the engine's own loop, wall time per iteration.

    Counts from the first iteration with all of them, so contexts go from `prompt_tokens` to `steps` more.
    """
    rnd = random.Random(2)
    for row in range(ROWS):
        prompt = [rnd.randrange(10, 30000) for _ in range(prompt_tokens)]
        engine.submit(
            Request(
                f"fixed {row}", prompt, Sampling(max_tokens=steps + STAGGER, temperature=0.0, ignore_eos=True)
            )
        )
    took = []
    while engine.has_work:
        began = seconds()
        outputs = engine.step()
        took.append((len(outputs), seconds() - began))
    full = [took_s for count, took_s in took if count == ROWS][SETTLING : SETTLING + steps]
    assert len(full) == steps
    return {"mean_ms": statistics.fmean(full) * 1e3, "median_ms": statistics.median(full) * 1e3}


def buckets(engine: SiteEngine, counts: Sequence[int], context: int = 200) -> None:
    """Time decode graphs by rows on the device, and the host's launch of one."""
    runner, pool = device_runner(engine), engine._pool
    parts = []
    for rows in counts:
        requests = []
        for row in range(rows):
            request = Request(f"bucket {row}", [11] * context, GREEDY)
            request.row, request.pages = row, pool.take(pool.pages_for(context)) or []
            requests.append(request)
        plan = SchedulePlan([ScheduledChunk(request, context - 1, 1, True) for request in requests])
        runner.launch(plan).wait()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        host_s = []
        began.record()
        for _ in range(30):
            start = seconds()
            runner.launch(plan)
            host_s.append(seconds() - start)
        ended.record()
        ended.synchronize()
        parts.append(
            f"{rows}: {began.elapsed_time(ended) / 30:.3f} ({statistics.median(host_s) * 1e6:.0f} us)"
        )
        for request in requests:
            pool.drop(request.pages)
    print(f"BUCKETS rows: ms a step, context {context} (host to launch): " + ", ".join(parts), flush=True)


def prefill_rate(engine: SiteEngine, chunks: int, tokens: int) -> float:
    """Return tokens/s of a packed prefill of whole prompts, the middle of five."""
    runner, pool = device_runner(engine), engine._pool
    took = []
    for _ in range(5):
        requests = []
        for row in range(chunks):
            request = Request(f"prefill {row}", [random.randrange(10, 30000) for _ in range(tokens)], GREEDY)
            request.row, request.pages = row, pool.take(pool.pages_for(tokens)) or []
            requests.append(request)
        plan = SchedulePlan([], [ScheduledChunk(request, 0, tokens, True) for request in requests])
        torch.cuda.synchronize()
        began = seconds()
        runner.launch(plan).wait()
        took.append(seconds() - began)
        for request in requests:
            pool.drop(request.pages)
    return chunks * tokens / statistics.median(took)


def profile(engine: SiteEngine, context: int = 225) -> None:  # noqa: C901 - a table
    """Profile a step's parts. Run it last: after the profiler ran, every replay costs the host more."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    runner, pool = device_runner(engine), engine._pool
    if engine._scheduler.kv_cache_manager.prefixes is not None:
        engine._scheduler.kv_cache_manager.prefixes.clear()
    for rows, prompt in ((ROWS, 0), (16, 0), (ROWS - 1, 161)):
        requests = []
        for row in range(rows):
            request = Request(f"profile {row}", [11] * context, GREEDY)
            request.row, request.pages = row, pool.take(pool.pages_for(context)) or []
            requests.append(request)
        plan = SchedulePlan([ScheduledChunk(request, context - 1, 1, True) for request in requests])
        if prompt:
            request = Request("profile prompt", [11] * prompt, GREEDY)
            request.row, request.pages = rows, pool.take(pool.pages_for(prompt)) or []
            requests.append(request)
            plan.prefills.append(ScheduledChunk(request, 0, prompt, True))
        runner.launch(plan).wait()
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
