"""Measure an iteration's CPU time beside the model: planning, packing, sampling, text, load figures.

`python -m bench.studies.bookkeeping [--rows 256]` replaces the forward pass by fixed logits; the last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from site_engine.core.request import Request, Sampling
from site_engine.engine.build import packed_engine
from site_engine.engine.settings import EngineSettings
from site_engine.model import attention_context
from site_engine.model.loader import load
from site_engine.model.torch_attention import ReferenceContext

DEMO_MODEL = Path(__file__).parents[2] / "mico" / "demo_model" / "weights"
WARM_UP_STEPS = 20


class Times(NamedTuple):
    """Milliseconds, one number an iteration."""

    cpu: list[float]
    wall: list[float]
    load_figures: list[float]  # CPU time of asking for them, which a site does every 50 ms


def step_times(rows: int, steps: int) -> Times:
    """Time decode iterations of the demo model with all rows running, text included, without its forward
    pass.
    """
    model = load(str(DEMO_MODEL))
    settings = EngineSettings(slots=rows, token_budget=max(8192, rows), kv_tokens=rows * 512)
    engine = packed_engine(model, settings, time.perf_counter)
    rnd = random.Random(0)
    limit = steps + WARM_UP_STEPS + 10
    for row in range(rows):
        prompt = [rnd.randrange(10, model.vocab_size) for _ in range(50)]
        sampling = Sampling(max_tokens=limit, temperature=0.0, ignore_eos=True)
        engine.submit(Request(str(row), prompt, sampling))
    logits = torch.randn(rows, model.vocab_size, generator=torch.Generator().manual_seed(0))

    def forward(ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        running = attention_context.current()
        assert isinstance(running, ReferenceContext)
        running.layer = len(model.layers)
        return logits[: wanted.shape[0]]

    runner: Any = engine.runner
    runner._forward = forward
    times = Times([], [], [])
    for step in range(WARM_UP_STEPS + steps):
        began, began_wall = time.process_time(), time.perf_counter()
        outputs = engine.step()
        if step >= WARM_UP_STEPS:
            assert len(outputs) == rows
            times.cpu.append((time.process_time() - began) * 1e3)
            times.wall.append((time.perf_counter() - began_wall) * 1e3)
            began = time.process_time()
            engine.load()
            times.load_figures.append((time.process_time() - began) * 1e3)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.bookkeeping", description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    times = step_times(options.rows, options.steps)
    found = {
        "rows": options.rows,
        "steps": options.steps,
        "median_ms": round(statistics.median(times.cpu), 3),
        "fastest_tenth_ms": round(sorted(times.cpu)[options.steps // 10], 3),
        "wall_median_ms": round(statistics.median(times.wall), 3),
        "load_figures_ms": round(statistics.median(times.load_figures), 3),
        "load_of_the_machine": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
    }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
