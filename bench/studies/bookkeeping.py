"""Measure an iteration's CPU time beside the model: planning, packing, sampling, text, load figures.

`python -m bench.studies.bookkeeping [--rows 256]` replaces the forward pass by fixed logits. With `--device`
it measures the thread of an engine's process beside a GPU: tokens without text, each step launched before the
one before is read and packed for the site, queries that end and follow each other, and nothing launched on
the device. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from site_engine.core.request import Request, Sampling
from site_engine.core.step_outputs import with_more_than_a_token
from site_engine.cuda.cuda_graph import Step
from site_engine.engine.build import device_runner, packed_engine, packed_runner
from site_engine.engine.engine import SiteEngine
from site_engine.engine.process_messages import frame
from site_engine.engine.process_packing import to_step
from site_engine.engine.settings import EngineSettings
from site_engine.model import attention_context
from site_engine.model.loader import load
from site_engine.model.torch_attention import ReferenceContext
from site_engine.process_settings import set_up_collector
from site_engine.text.detokenize import TokenNames

DEMO_MODEL = Path(__file__).parents[2] / "mico" / "demo_model" / "weights"
WARM_UP_STEPS = 20
MEAN_PROMPT, LONGEST_PROMPT = 90, 800  # tokens, of the queries of `bench.http`
MEAN_ANSWER, LONGEST_ANSWER = 340, 1024


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


def device_step_times(rows: int, steps: int) -> Times:
    """Time iterations of an engine's process whose rows come and go; nothing is launched on a device."""
    model = replace(load(str(DEMO_MODEL)), vocabulary=TokenNames())
    settings = EngineSettings(slots=rows, kv_tokens=rows * (LONGEST_PROMPT + LONGEST_ANSWER))
    runner = device_runner(model, settings, packed_runner(model, settings))
    engine = SiteEngine(model, runner, settings, time.perf_counter)
    rnd, numbers = random.Random(0), dict[str, int]()

    def submit() -> None:
        number = numbers[str(len(numbers))] = len(numbers)
        prompt = rnd.choices(range(10, model.vocab_size), k=1 + int(rnd.expovariate(1 / MEAN_PROMPT)))
        answer = min(1 + int(rnd.expovariate(1 / MEAN_ANSWER)), LONGEST_ANSWER)
        sampling = Sampling(max_tokens=answer, temperature=0.0, ignore_eos=True)
        engine.submit(Request(str(number), prompt[:LONGEST_PROMPT], sampling))

    for _ in range(rows):
        submit()
    times = Times([], [], [])
    set_up_collector()
    with patch.object(Step, "run", lambda step: step.chosen.fill_(10)):
        for step in range(2 * MEAN_ANSWER + steps):  # until their lengths are mixed
            began, began_wall = time.thread_time(), time.perf_counter()
            outputs = engine.step()
            frame(to_step(outputs, numbers))
            if step >= 2 * MEAN_ANSWER:
                times.cpu.append((time.thread_time() - began) * 1e3)
                times.wall.append((time.perf_counter() - began_wall) * 1e3)
            for output in with_more_than_a_token(outputs):
                if output.finish is not None:
                    submit()
            began = time.thread_time()
            engine.load()
            times.load_figures.append((time.thread_time() - began) * 1e3)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.bookkeeping", description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", action="store_true", help="as an engine's process beside a GPU")
    options = parser.parse_args()
    torch.set_num_threads(1)
    times = (device_step_times if options.device else step_times)(options.rows, options.steps)
    found = {
        "rows": options.rows,
        "steps": options.steps,
        "device": options.device,
        "median_ms": round(statistics.median(times.cpu), 3),
        "mean_ms": round(statistics.fmean(times.cpu), 3),
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
