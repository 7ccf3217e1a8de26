"""Answer chats beside a job whose slices leave more of the bound as slots fill, by powers of what is free.

    python -m bench.studies.training_slots --trace azure_conv.parquet [--loads 0.3 --powers 0 1 2]

As `bench.tuning --only beside`, but in time of the processor: idle time is skipped, and what other processes
do on the same core does not count, but for what they take of its caches. Slices have the share of free slots
to a power: 0 is the whole bound however many slots are free, 1 the engine's rule. Each of several `--first`
is a window of the trace; at the end the median of the windows is printed, and p99 of all their first tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

import torch
import transformers

from bench.support.beside_chats import ALONE_S, Served, chats_of, engine_of, p99, serve
from bench.tuning import DEMO, endless
from site_engine.core.slack import Bounds, Deferral, NextSlice, Serving, Slack
from site_engine.engine.engine import SiteEngine
from site_engine.model import loader
from site_engine.training.job import open_job


class ProcessorTime:
    """The processor's time of this process, and the time that it would have slept."""

    def __init__(self) -> None:
        self._slept_s = 0.0

    def monotonic(self) -> float:
        return time.process_time() + self._slept_s

    def sleep(self, seconds: float, /) -> None:
        self._slept_s += seconds


class PowerSlack(Slack):
    """Shares time by a power of the share of free slots."""

    def __init__(self, bounds: Bounds, power: float) -> None:
        super().__init__(bounds)
        self._power = power

    def takes(self, serving: Serving, following: NextSlice) -> bool:
        return super().takes(serving._replace(free_share=serving.free_share**self._power), following)


def of_windows(pairs: Sequence[tuple[Served, Served]], alone_per_s: float) -> dict[str, float]:
    """Compare what was served beside training with the same chats alone."""
    beside, alone = (
        [each for served in side for each in served.first_s] for side in zip(*pairs, strict=True)
    )
    trained = [served.trained_per_s / alone_per_s for served, _ in pairs]
    return {
        "first_p99_over_alone_median": round(median(b.marks_s()[0] / a.marks_s()[0] for b, a in pairs), 2),
        "first_p99_over_alone_pooled": round(p99(beside) / p99(alone), 2),
        "between_ms_p99_most": round(1000 * max(served.marks_s()[2] for served, _ in pairs), 1),
        "training_of_alone_mean": round(fmean(trained), 3),
        "training_of_alone_least": round(min(trained), 3),
    }


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.training_slots", description=__doc__)
    parser.add_argument("--trace", type=Path, help="arrivals and lengths of chats, as parquet")
    parser.add_argument("--chats", type=int, default=200, help="of the trace, at each load")
    parser.add_argument(
        "--first", type=int, nargs="+", default=[0], help="chats of the trace that come first"
    )
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3], help="of what the engine can")
    parser.add_argument("--powers", type=float, nargs="+", default=[0.0, 1.0, 2.0])
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    model, timer = loader.load(str(DEMO)), ProcessorTime()

    def trains(power: float) -> SiteEngine:
        engine = engine_of(model, Deferral.SLICE, timer)
        engine.training._slack = PowerSlack(engine.training._slack.bounds, power)
        engine.training.begin("bench", "bench", open_job(model, endless(), timer.monotonic))
        return engine

    def show(name: str, served: Served, alone: Served) -> None:
        first_s, longest_s, between_s = served.marks_s()
        found = {
            "first_ms_p99_longest": [round(1000 * first_s, 1), round(1000 * longest_s, 1)],
            "first_p99_over_alone": round(first_s / alone.marks_s()[0], 2),
            "between_ms_p99": round(1000 * between_s, 1),
            "training_of_alone": round(served.trained_per_s / alone_per_s, 3),
        }
        figures[name] = found
        print(f"  {name}: {found}", flush=True)

    chats = chats_of(options.trace, options.chats, model.vocab_size, options.first[0])
    began_s = timer.monotonic()
    serve(engine_of(model, Deferral.SLICE, timer), chats, 0.0, timer=timer)
    chat_s = (timer.monotonic() - began_s) / len(chats)
    alone_per_s = serve(trains(1.0), (), 1.0, ALONE_S, timer).trained_per_s
    figures: dict[str, object] = {"chats_per_s": 1 / chat_s, "training_alone_tokens_per_s": alone_per_s}
    print(figures, flush=True)
    windows: dict[tuple[float, float], list[tuple[Served, Served]]] = {}
    for first in options.first:
        chats = chats_of(options.trace, options.chats, model.vocab_size, first)
        for load in options.loads:
            alone = serve(engine_of(model, Deferral.SLICE, timer), chats, chat_s / load, timer=timer)
            show(f"load {load}, from chat {first}, alone", alone, alone)
            for power in options.powers:
                beside = serve(trains(power), chats, chat_s / load, timer=timer)
                show(f"load {load}, from chat {first}, power {power}", beside, alone)
                windows.setdefault((load, power), []).append((beside, alone))
    for (load, power), pairs in windows.items():
        found = of_windows(pairs, alone_per_s)
        figures[f"load {load}, power {power}, all windows"] = found
        print(f"  load {load}, power {power}, {len(pairs)} windows: {found}", flush=True)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
