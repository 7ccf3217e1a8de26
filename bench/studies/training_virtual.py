"""Answer chats beside training with an engine of which the device alone is simulated, to compare rules.

    python -m bench.studies.training_virtual --trace azure_conv.parquet [--loads 0.3 --rules 0:1 4:4]

The engine, its scheduler and its training loop are the real ones. Launching an iteration or running a slice
advances a clock by the time that it takes on an H200 at 0.5B, or on a CPU with the demo model (`--device
cpu`). A rule has two numbers, ENOUGH_ITERATIONS and SCARCE_POWER of `site_engine.core.slack`: 0:1 is the
share of free slots whatever iterations take. Prints p90 and p99 of the first token over those without
training, the mean and p99 of the time between tokens, and the share of training alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import NamedTuple

import transformers

from bench.studies.bookkeeping import DEMO_MODEL
from bench.support.beside_chats import Chat, Served, chats_of, p99, serve
from site_engine.core import slack
from site_engine.core.request import Request
from site_engine.core.schedule_plan import SchedulePlan
from site_engine.core.slack import Bounds, NextSlice, SliceCosts
from site_engine.core.training import StepDone
from site_engine.engine.build import packed_runner
from site_engine.engine.engine import SiteEngine
from site_engine.engine.settings import EngineSettings
from site_engine.model.kv_cache import KVCache
from site_engine.model.loader import LoadedModel, load
from site_engine.model.runner import Logits, StepTokens
from site_engine.training.slices import Slice
from site_engine.training.trainer import Event

TICK_S = 1e-8
"""What reading the clock takes, so that time goes on."""
HOST_S = 1e-4
"""What the host takes to publish an iteration, and between two slices."""
SPREAD = 0.04
"""Standard deviation of the logarithm of each time."""
ALONE_S = 5.0


class Device(NamedTuple):
    """What a device takes, in seconds, and the settings of the engine that has it."""

    launch: float
    iteration: float
    prompts: float  # added to an iteration with prompts
    row: float
    token: float  # of a prompt
    kv_token: float
    slices: dict[Slice, float]
    layers: int
    heads: int
    micro_batch_tokens: int
    settings: EngineSettings
    shrink: int  # of the trace's lengths
    longest: int


DEVICES = {
    "gpu": Device(
        launch=2e-4, iteration=8e-4, prompts=1.5e-4, row=0.0, token=2.3e-6, kv_token=3e-9,
        slices={
            Slice.BEGIN: 2.74e-3, Slice.FORWARD: 2.84e-3, Slice.HEAD: 1.43e-3, Slice.BACKWARD: 1.25e-3,
            Slice.GATE_UP_BACKWARD: 1.01e-3, Slice.ATTENTION_BACKWARD: 2.17e-3, Slice.UPDATE: 4.05e-3,
        },
        layers=24, heads=8, micro_batch_tokens=16384,
        settings=EngineSettings(
            slots=256, kv_tokens=74 * 4096, token_budget=512, training=Bounds(0.02), max_pending=4096
        ),
        shrink=1, longest=2048,
    ),
    "cpu": Device(
        launch=3e-4, iteration=4e-3, prompts=0.0, row=3.5e-4, token=1.6e-4, kv_token=0.0,
        slices={
            Slice.BEGIN: 3e-3, Slice.FORWARD: 4e-3, Slice.HEAD: 3e-3, Slice.RECOMPUTE: 4e-3,
            Slice.BACKWARD: 7e-3, Slice.UPDATE: 4e-3,
        },
        layers=8, heads=2, micro_batch_tokens=256,
        settings=EngineSettings(
            slots=8, kv_tokens=8192, token_budget=256, training=Bounds(0.05), max_pending=4096
        ),
        shrink=16, longest=96,
    ),
}  # fmt: skip


class Clock:
    """A clock that `sleep` and, a little, each reading advances, and the time when the device is free."""

    def __init__(self) -> None:
        self.now_s = self.free_s = 0.0
        self.draw = Random(3)

    def monotonic(self) -> float:
        self.now_s += TICK_S
        return self.now_s

    def sleep(self, seconds: float, /) -> None:
        self.now_s += seconds

    def compute(self, seconds: float) -> float:
        """Let the device compute for about so long, after what it computes; return when it is done."""
        self.free_s = max(self.free_s, self.now_s) + seconds * self.draw.lognormvariate(0.0, SPREAD)
        return self.free_s


class LaunchedStep:
    """An iteration on the simulated device, whose tokens are all the same."""

    def __init__(self, plan: SchedulePlan, clock: Clock, done_s: float) -> None:
        self.plan, self.requests = plan, list[Request](plan.sampled)
        self._clock, self._done_s = clock, done_s

    def finish(self) -> None:
        pass

    def wait(self) -> StepTokens:
        self._clock.now_s = max(self._clock.now_s, self._done_s) + HOST_S
        return StepTokens([5] * len(self.requests), {})


class SimulatedRunner:
    """Launches iterations that take the device's time and compute nothing."""

    def __init__(self, device: Device, clock: Clock, kv_cache: KVCache) -> None:
        self.kv_cache = kv_cache
        self._device, self._clock = device, clock

    def run(self, plan: SchedulePlan) -> Logits:
        raise RuntimeError(f"{plan} is not launched")

    def launch(self, plan: SchedulePlan, rules: object = None) -> LaunchedStep:
        device = self._device
        self._clock.sleep(device.launch)
        seconds = device.iteration + device.row * len(plan.decoding) + device.kv_token * plan.kv_tokens
        if plan.prefills:
            tokens = sum(chunk.length for chunk in plan.prefills)
            seconds += device.prompts + device.token * tokens
        return LaunchedStep(plan, self._clock, self._clock.compute(seconds))


class SimulatedJob:
    """A job without end whose slices take the device's time."""

    ended = False

    def __init__(self, device: Device, clock: Clock) -> None:
        self._device, self._clock = device, clock
        self._costs, self._slices = SliceCosts(), self._run()
        self._events: list[Event] = []
        self._next = next(self._slices)

    @property
    def following(self) -> NextSlice:
        seconds = self._costs.seconds(self._next, 1, self._clock.now_s)
        return NextSlice(seconds, 0.1, self._next is Slice.BEGIN)

    def run_slice(self, *, ahead: bool = False) -> float:
        clock, kind, began_s = self._clock, self._next, self._clock.now_s
        clock.now_s = clock.compute(self._device.slices[kind])
        self._next = next(self._slices)
        taken_s = clock.now_s - began_s
        self._costs.observe(kind, 1, taken_s, clock.now_s)
        clock.sleep(HOST_S)
        return taken_s

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def snapshot(self) -> None:
        return None

    def _run(self) -> Iterator[Slice]:
        device, step = self._device, 0
        ends = Slice.BEGIN, Slice.FORWARD, Slice.HEAD, Slice.UPDATE
        backward = [kind for kind in device.slices if kind not in ends]
        while True:
            yield Slice.BEGIN
            yield from [Slice.FORWARD] * device.layers
            yield from [Slice.HEAD] * device.heads
            yield from backward * device.layers
            yield Slice.UPDATE
            step += 1
            trained = step * device.micro_batch_tokens
            self._events.append(StepDone(step, sys.maxsize, 1.0, 1.0, trained, None))


class Scene:
    """The chats of a trace and engines to answer them, all with one clock."""

    def __init__(self, device: Device, trace: Path | None, count: int) -> None:
        self.clock, self._device = Clock(), device
        model = replace(load(str(DEMO_MODEL)), context_tokens=4096, eos_token_ids=())
        self._model: LoadedModel = model
        self._kv_cache = packed_runner(model, device.settings).kv_cache
        vocabulary, longest = model.vocab_size, device.longest
        self._lengths = chats_of(trace, count, vocabulary, shrink=device.shrink, longest=longest)
        began_s = self.clock.now_s
        self.serve(None, 0.0)
        self.chat_s = (self.clock.now_s - began_s) / count

    def serve(self, seconds: float | None, gap_s: float, *, trains: bool = False) -> Served:
        """Answer the chats, or none for so many seconds."""
        device, clock = self._device, self.clock
        runner = SimulatedRunner(device, clock, self._kv_cache)
        engine = SiteEngine(self._model, runner, device.settings, clock.monotonic)
        if trains:
            engine.training.begin("job", "acme", SimulatedJob(device, clock))  # type: ignore[arg-type]
        return serve(engine, self._chats() if seconds is None else (), gap_s, seconds, clock)

    def _chats(self) -> list[Chat]:
        """Return the chats with new tokens, none of which a cache of prefixes has."""
        draw, most = self.clock.draw, self._model.vocab_size
        return [each._replace(prompt=[draw.randrange(most) for _ in each.prompt]) for each in self._lengths]


def compared(beside: Served, alone: Served, alone_per_s: float) -> dict[str, float]:
    def p90(served: Served) -> float:
        return statistics.quantiles(served.first_s, n=10)[8]

    return {
        "first_p90_over_alone": round(p90(beside) / p90(alone), 2),
        "first_p99_over_alone": round(p99(beside.first_s) / p99(alone.first_s), 2),
        "between_ms_mean": round(1000 * statistics.fmean(beside.between_s), 2),
        "between_ms_p99": round(1000 * p99(beside.between_s), 1),
        "trained_over_alone": round(beside.trained_per_s / alone_per_s, 3),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.training_virtual", description=__doc__)
    parser.add_argument("--device", choices=DEVICES, default="gpu")
    parser.add_argument("--trace", type=Path, help="arrivals and lengths of chats, as parquet")
    parser.add_argument("--chats", type=int, default=1000)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.1, 0.3, 0.6])
    parser.add_argument("--rules", nargs="+", default=["0:1", "4:4"])
    options = parser.parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()
    scene = Scene(DEVICES[options.device], options.trace, options.chats)
    alone_per_s = scene.serve(ALONE_S, 1.0, trains=True).trained_per_s
    figures: dict[str, object] = {
        "chats_per_s": round(1 / scene.chat_s, 1),
        "training_alone_tokens_per_s": round(alone_per_s),
    }
    for gap_s, load_share in ((scene.chat_s / each, each) for each in options.loads):
        alone = scene.serve(None, gap_s)
        for rule in options.rules:
            enough, _, power = rule.partition(":")
            slack.ENOUGH_ITERATIONS, slack.SCARCE_POWER = float(enough), int(power)
            beside = scene.serve(None, gap_s, trains=True)
            name = f"load {load_share}, rule {rule}"
            figures[name] = compared(beside, alone, alone_per_s)
            print(f"  {name}: {figures[name]}", flush=True)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
