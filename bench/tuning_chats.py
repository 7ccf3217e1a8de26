"""Measure what a fine-tuning job costs chats that arrive as in a trace, on a GPU with random weights.

    python -m bench.tuning_chats --shape bench/models/qwen2.5-0.5b --trace azure_conv.parquet

The chats have the trace's arrivals and lengths, at parts of the rate at which the engine answers all of them
at once: alone, then beside a job without end. `bench.tuning --only beside` does so on a CPU with the demo
model. Prints its figures; the last line is all of them as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
import transformers

from bench.engine_gpu import plain_model
from bench.support.beside_chats import Chat, Served, chats_of, p99, serve
from bench.tuning_gpu import BETWEEN_S, data_of, engine_of, trainer_of
from site_engine.engine.engine import SiteEngine
from site_engine.model.loader import LoadedModel, from_model
from site_engine.process_settings import set_up_collector, set_up_process

SLOTS = 256
ROWS = 72
"""So many chats of the longest have a place in the memory for keys and values."""
ALONE_S = 8.0
"""For which the job trains alone."""
GOALS = {0.1: (1.15, 0.6), 0.3: (1.25, 0.45), 0.6: (1.6, 0.2)}
"""By load: p99 of the first token over alone, at most; tokens trained a second over alone, at least."""
LATE = 1.05
"""Times the bound of the time between tokens that p99 may take."""


class Scene:
    """An engine, and chats of a trace's arrivals and lengths."""

    def __init__(self, model: LoadedModel, engine: SiteEngine, lengths: Sequence[Chat], batch: int) -> None:
        self.model, self.engine, self.lengths, self.batch = model, engine, lengths, batch
        self._draw = Random(7)

    def chats(self) -> list[Chat]:
        """Return the chats with new tokens: what was computed for the same prompt would be found."""
        most = self.model.vocab_size
        return [
            each._replace(prompt=[self._draw.randrange(most) for _ in each.prompt]) for each in self.lengths
        ]

    def beside_training(self, chats: Sequence[Chat], gap_s: float, seconds: float | None = None) -> Served:
        job = trainer_of(self.engine, self.model, data_of(self.model, 64 * self.batch), self.batch)
        self.engine.training.begin("job", "acme", job)
        try:
            return serve(self.engine, chats, gap_s, seconds)
        finally:
            self.engine.training.stop("job")


def measure(scene: Scene, loads: Sequence[float]) -> dict[str, object]:
    """Answer the chats at parts of what the engine can; return the figures, and whether the goals are met."""
    serve(scene.engine, scene.chats(), 0.0)
    began_s = time.perf_counter()
    serve(scene.engine, scene.chats(), 0.0)
    chat_s = (time.perf_counter() - began_s) / len(scene.lengths)
    alone_per_s = scene.beside_training((), 1.0, ALONE_S).trained_per_s
    found: dict[str, object] = {
        "chats": len(scene.lengths),
        "chats_per_s": round(1 / chat_s, 2),
        "training_alone_tokens_per_s": round(alone_per_s),
        "bound_ms": 1000 * BETWEEN_S,
    }
    kept = True
    for load in loads:
        alone = serve(scene.engine, scene.chats(), chat_s / load)
        beside = scene.beside_training(scene.chats(), chat_s / load)
        later, share = p99(beside.first_s) / p99(alone.first_s), beside.trained_per_s / alone_per_s
        most, least = GOALS.get(load, (math.inf, 0.0))
        kept = kept and later <= most and share >= least and p99(beside.between_s) <= LATE * BETWEEN_S
        found[f"at_{load}"] = {
            "first_ms_p50_p99_most_between_ms_p99": {"alone": marks_ms(alone), "beside": marks_ms(beside)},
            "first_p99_over_alone": round(later, 3),
            "trained_over_alone": round(share, 3),
        }
        print(f"  load {load}: {found[f'at_{load}']}", flush=True)
    return {**found, "kept": kept}


def marks_ms(served: Served) -> list[float]:
    return [round(1000 * each, 2) for each in (statistics.median(served.first_s), *served.marks_s())]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tuning_chats", description=__doc__)
    parser.add_argument("--shape", type=Path, required=True, help="folder of a config.json")
    parser.add_argument("--trace", type=Path, help="arrivals and lengths of chats, as parquet")
    parser.add_argument("--chats", type=int, default=200, help="of the trace, at each load")
    parser.add_argument(
        "--loads", type=float, nargs="+", default=sorted(GOALS), help="of what the engine can"
    )
    parser.add_argument("--batch", type=int, default=64, help="rows of an optimizer step")
    options = parser.parse_args(arguments)
    set_up_process()  # as a site does
    transformers.utils.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = from_model(plain_model(str(options.shape), device), eos_token_ids=())
    room = min(model.context_tokens, 4096) if device == "cuda" else 256
    engine = engine_of(model, ROWS, SLOTS, room)
    engine.training.warm_up()  # as a site does before it joins
    set_up_collector()
    lengths = chats_of(options.trace, options.chats, model.vocab_size, shrink=1, longest=room // 2)
    print(f"{options.shape.name} on {device}, torch {torch.__version__}", flush=True)
    figures = measure(Scene(model, engine, lengths, options.batch), options.loads)
    print(json.dumps(figures))
    return 0 if figures["kept"] or device == "cpu" else 1


if __name__ == "__main__":
    sys.exit(main())
