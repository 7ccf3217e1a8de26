"""Measure latency per token by rate of arrival, from pages and padded, and what an iteration is spent on.

`python -m bench.normalized`: the demo model on one thread answers the same chats, arriving at random, from
pages, with MICO's padded insertion, and in static batches, each at parts of the rate that it can answer. A
knee is the highest rate up to which the mean latency per token stays below a bound, the same for all. The
overhead is the time of PyTorch's operators by kind, and of the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import torch
import transformers

from bench.support.beside_chats import Chat, chats_of, serve
from site_engine.core.request import Request, Sampling
from site_engine.core.request_queue import POLICIES
from site_engine.engine.build import packed_engine
from site_engine.engine.engine import SiteEngine
from site_engine.engine.settings import EngineSettings
from site_engine.model import loader
from site_engine.model.loader import LoadedModel
from tests.support.padded_batch import padded_engine

DEMO = Path(__file__).parents[1] / "mico/demo_model/weights"
LOADS = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
"""Of the rate at which an engine answers chats that are all there at once."""
SLOTS, KV_TOKENS = 8, 8192
BOUND = 5.0
"""Of the latency per token, in multiples of that of one chat alone from pages."""
KINDS = {
    "attention": ("attention", "bmm", "softmax"),
    "linear layers": ("mm", "linear"),
    "KV writes": ("index", "scatter", "copy"),
    "sampling": ("argmax", "multinomial", "sort", "topk", "exponential", "isfinite"),
}
"""Operators by a part of their names, of the first kind that has one; the rest are norms and the like."""
REST = "norms, activations, sums"


def engines(model: LoadedModel) -> dict[str, Callable[[], SiteEngine]]:
    """Return what makes an engine of each kind."""
    limits = EngineSettings(slots=SLOTS, kv_tokens=KV_TOKENS, prefix_cache=False, max_pending=10_000)
    static = replace(limits, policy=POLICIES["static"])
    return {
        "pages": lambda: packed_engine(model, limits, time.monotonic),
        "padded": lambda: padded_engine(model, limits, time.monotonic),
        "static": lambda: padded_engine(model, static, time.monotonic),
    }


def curves(model: LoadedModel, chats: Sequence[Chat]) -> dict[str, object]:
    """Return the mean milliseconds per token of each kind of engine by chats a second, and the knees."""
    made = engines(model)
    for make in made.values():  # warm-up
        serve(make(), chats[: 2 * SLOTS], 0.0)
    alone_s = {
        name: statistics.fmean(
            serve(make(), [chat._replace(at=0.0)], 0.0).per_token_s[0] for chat in chats[: 2 * SLOTS]
        )
        for name, make in made.items()
    }
    found: dict[str, object] = {f"{name}_alone_ms": round(1000 * each, 2) for name, each in alone_s.items()}
    knees: dict[str, float] = {}
    for name, make in made.items():
        began_s = time.monotonic()
        serve(make(), chats, 0.0)
        most_per_s = len(chats) / (time.monotonic() - began_s)
        by_rate, within = dict[float, float](), True
        for load in LOADS:
            rate = load * most_per_s
            per_token_s = statistics.fmean(serve(make(), chats, 1 / rate).per_token_s)
            by_rate[round(rate, 2)] = round(1000 * per_token_s, 2)
            within = within and per_token_s <= BOUND * alone_s["pages"]
            knees |= {name: round(rate, 2)} if within else {}
        found |= {f"{name}_most_per_s": round(most_per_s, 2), name: by_rate}
        print(f"  {name}: ms per token by chats a second {by_rate}", flush=True)
    return {**found, "knees_chats_per_s": knees}


def kind_of(operator: str) -> str:
    for kind, parts in KINDS.items():
        if any(part in operator for part in parts):
            return kind
    return REST


def overhead(model: LoadedModel, prompt: int, tokens: int) -> dict[str, object]:
    """Return the shares of the time in which full slots are answered from pages."""
    engine, draw = engines(model)["pages"](), Random(1)
    for run in range(2):
        for row in range(SLOTS):
            ids = [draw.randrange(model.vocab_size) for _ in range(prompt)]
            engine.submit(Request(f"{run} {row}", ids, Sampling(max_tokens=tokens, ignore_eos=True)))
        began_s = time.perf_counter()
        if not run:
            while engine.has_work:
                engine.step()
            whole_s = time.perf_counter() - began_s
            continue
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            began_s = time.perf_counter()
            while engine.has_work:
                engine.step()
            profiled_s = time.perf_counter() - began_s
    spent = dict.fromkeys([*KINDS, REST], 0.0)
    for event in profile.key_averages():
        spent[kind_of(event.key)] += event.self_cpu_time_total / 1e6
    host_s = max(0.0, profiled_s - sum(spent.values()))
    shares = {kind: round(seconds / profiled_s, 3) for kind, seconds in {**spent, "host": host_s}.items()}
    return {
        "rows": SLOTS,
        "of": [prompt, tokens],
        "seconds": round(whole_s, 2),
        "profiled": round(profiled_s, 2),
        "shares": shares,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.normalized", description=__doc__)
    parser.add_argument("--chats", type=int, default=200, help="of each rate")
    parser.add_argument("--trace", type=Path, help="arrivals and lengths of chats, as parquet")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the prompts of the overhead")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of its answers")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    model = loader.load(str(DEMO))
    print(f"torch {torch.__version__}; the demo model in float32 on one thread, {SLOTS} rows")
    found = {"curves": curves(model, chats_of(options.trace, options.chats, model.vocab_size))}
    found["overhead"] = overhead(model, options.prompt, options.tokens)
    for part, figures in found.items():
        print(f"{part}: {figures}")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
