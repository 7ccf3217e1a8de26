"""Measure how close counted seconds of an offline batch are to those of the real engine, on a CPU.

`python -m bench.blend_cpu --data FOLDER` runs four cells of the grid, an eighth as long, with a small random
model on one thread: the engine's scheduler, prefix cache and attention, fed as the gateway feeds a site. Then
it counts the same lines. Costs of an iteration are fitted to all that were measured in a cell; planning takes
what it takes in the count, times one factor for a cell, since a model leaves the scheduler a cold cache. Each
order runs several times, all of a cell in turns of a few iterations, so that they find the processor alike.
Seconds are of its time, and of an iteration the median. Prints both of each cell and order; the last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from scipy.optimize import nnls

from bench.blend import Job, counted, lines_of
from bench.support.offline_served import ORDERS, Served, Serving
from bench.support.offline_work import Line
from gateway.batches.values import Order
from site_engine.core.load import CostFit
from site_engine.core.pacing import PromptBudget
from site_engine.core.schedule_plan import SchedulePlan
from site_engine.engine.build import packed_runner
from site_engine.engine.engine import SiteEngine
from site_engine.engine.settings import EngineSettings
from site_engine.model.loader import LoadedModel, from_model
from site_engine.model.runner import _groups
from tests.support.counted_engine import Counts

CELLS = (
    "cell azure_code stories 0.8 0.05",
    "cell azure_conv stories 1.1 0.25",
    "cell chats stories 1.4 0.45",
    "cell azure_code reasoning 1.0 0.35",
)
Features = tuple[float, ...]
TURN = 8  # iterations
WARM_SHARE = 8  # one line in so many runs before what is measured
SCALES = np.array([1, 1 / 64, 1 / 4096, 1, 1 / 16, 1 / 512, 1 / 65536])


def shorter(lines: list[Line], times: int) -> list[Line]:
    """Return lines with every length divided; each keeps a token of its own and one of the answer."""
    return [
        line._replace(
            shared_tokens=line.shared_tokens // times,
            prompt_tokens=line.shared_tokens // times
            + max(1, (line.prompt_tokens - line.shared_tokens) // times),
            response_tokens=max(1, line.response_tokens // times),
        )
        for line in lines
    ]


def features(plan: SchedulePlan, page_size: int) -> Features:
    """Return what an iteration's seconds depend on: rows, tokens that they read with padding, prompts."""
    rows = _groups(np.array(sorted(plan.starts), np.int64) + 1, page_size)
    return (
        1,
        len(plan.decoding) + sum([chunk.samples for chunk in plan.prefills]),
        float(sum([(end - begin) * width * page_size for begin, end, width, _ in rows])),
        bool(plan.prefills),
        len(plan.prefills),
        sum([chunk.length for chunk in plan.prefills]),
        sum([chunk.length * (chunk.start + chunk.length) for chunk in plan.prefills]),
    )


class TurnClock:
    """Processor time that passes only in one's turn."""

    def __init__(self) -> None:
        self._before = self._began = 0.0

    def __call__(self) -> float:
        return self._before + time.process_time() - self._began if self._began else self._before

    def begin(self) -> None:
        self._began = time.process_time()

    def end(self) -> None:
        self._before, self._began = self(), 0.0


class Iteration(NamedTuple):
    """An iteration: what its cost depends on, its seconds, and those of planning it."""

    features: Features
    seconds: float
    plan_s: float


class Run(SiteEngine):
    """An engine that serves the lines of one order, and keeps what each plan took to be computed."""

    def __init__(
        self, model: LoadedModel, settings: EngineSettings, lines: list[Line], how: Order, fit: CostFit
    ) -> None:
        """Begin with no line; `fit` paces prompts, so that all runs of an order have the same iterations."""
        self.clock = TurnClock()
        super().__init__(model, packed_runner(model, settings), settings, self.clock)
        self.iterations: list[Iteration] = []
        self.serving = Serving(self, lines, how, 2)
        self._scheduler.prompt_budget = PromptBudget(fit)
        self._scheduler.plan = self._timed(self._scheduler.plan)  # type: ignore[method-assign]
        self._plan_s = 0.0  # of this iteration

    def _timed(self, plan: Callable[..., SchedulePlan]) -> Callable[..., SchedulePlan]:
        def timed(*given: Any, **named: Any) -> SchedulePlan:
            began = self.clock()
            planned = plan(*given, **named)
            self._plan_s = self.clock() - began
            return planned

        return timed

    def _measure(self, plan: SchedulePlan, seconds: float, discarded: int = 0) -> None:
        super()._measure(plan, seconds, discarded)
        self.clock.end()
        self.iterations.append(Iteration(features(plan, self.settings.page_size), seconds, self._plan_s))
        self.clock.begin()

    def turn(self) -> bool:
        """Run a few iterations. Return False once all lines have ended."""
        self.clock.begin()
        runs = all(self.serving.step() for _ in range(TURN))
        self.clock.end()
        return runs


class Costs:
    """Seconds of an iteration: no negative weights of its features, by least squares."""

    def __init__(self, iterations: list[Iteration], page_size: int) -> None:
        self._page_size = page_size
        known = np.array([each.features for each in iterations]) * SCALES
        seconds = np.array([each.seconds - each.plan_s for each in iterations])
        weights, _ = nnls(known, seconds)
        self.weights = (weights * SCALES).tolist()

    def seconds(self, plan: SchedulePlan) -> float:
        return float(
            sum(
                [
                    weight * each
                    for weight, each in zip(self.weights, features(plan, self._page_size), strict=True)
                ]
            )
        )


class Compared(NamedTuple):
    """Seconds of processor time. `cached_tokens`: of prompts, not computed."""

    cell: str
    order: str
    lines: int
    real_s: float
    counted_s: float
    counted_over_real: float
    plan_s: tuple[float, float]  # real, counted, as the others
    iterations: tuple[int, int]
    cached_tokens: tuple[int, int]
    preemptions: tuple[int, int]


def compared(
    job: Job, lines: list[Line], runs: dict[str, Real], settings: EngineSettings, fit: CostFit
) -> list[Compared]:
    """Count what each order takes, at the costs that were measured in all."""
    costs = Costs([each for served in runs.values() for each in served.iterations], settings.page_size)
    budget = settings.token_budget_on("cpu")
    counts = {
        order: counted(job._replace(order=order), lines, costs.seconds, budget, settings.page_size, fit)
        for order in runs
    }
    cold = sum(each.plan_s for served in runs.values() for each in served.iterations)
    cold /= sum(each.plan_s for each in counts.values())
    return [beside(job._replace(order=order), len(lines), runs[order], counts[order], cold) for order in runs]


def beside(job: Job, lines: int, served: Real, counts: Counts, cold: float) -> Compared:
    """Return both of an order; `cold`: how much longer planning takes beside a model."""
    real_s = sum(each.seconds for each in served.iterations)
    counted_s = counts.seconds + cold * counts.plan_s
    return Compared(
        job.workload,
        job.order,
        lines,
        round(real_s, 2),
        round(counted_s, 2),
        round(counted_s / real_s, 3),
        (round(sum(each.plan_s for each in served.iterations), 2), round(cold * counts.plan_s, 2)),
        (served.ended.iterations, counts.iterations),
        (served.ended.cached_tokens, counts.cached),
        (served.ended.preemptions, counts.preemptions),
    )


def small_model(context_tokens: int) -> LoadedModel:
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context_tokens,
    )
    torch.manual_seed(0)
    return from_model(transformers.LlamaForCausalLM(config).eval(), eos_token_ids=())


class Real(NamedTuple):
    """A batch in one order, served several times; the seconds of each iteration are the median."""

    ended: Served
    iterations: list[Iteration]


def real(
    model: LoadedModel, settings: EngineSettings, lines: list[Line], orders: list[str], times: int
) -> tuple[dict[str, Real], CostFit]:
    """Serve lines in each order so many times, all in turns; before that a few of them, whose costs the site
    knows then.
    """
    warm = Run(model, settings, lines[::WARM_SHARE], ORDERS[orders[0]], CostFit())
    while warm.turn():
        pass
    fit = warm._meter.fit
    runs = {
        order: [Run(model, settings, lines, ORDERS[order], fit) for _ in range(times)] for order in orders
    }
    left = [run for each in zip(*runs.values(), strict=True) for run in each]
    while left:
        left = [run for run in left if run.turn()]
    return {order: together(each) for order, each in runs.items()}, fit


def together(runs: list[Run]) -> Real:
    same = list(zip(*(run.iterations for run in runs), strict=True))
    assert all(len({each.features for each in iteration}) == 1 for iteration in same)
    medians = [
        Iteration(
            iteration[0].features,
            statistics.median(each.seconds for each in iteration),
            statistics.median(each.plan_s for each in iteration),
        )
        for iteration in same
    ]
    return Real(runs[0].serving.ended, medians)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.blend_cpu", description=__doc__)
    parser.add_argument("--data", default="", help="folder with traces and lengths of responses")
    parser.add_argument("--cell", action="append", help='e.g. "cell azure_code stories 0.8 0.05"; a workload')
    parser.add_argument("--orders", nargs="+", choices=list(ORDERS), default=list(ORDERS))
    parser.add_argument("--seconds", type=float, default=24.0, help="of computing on a GPU in each cell")
    parser.add_argument("--shorter", type=int, default=8, help="divide all lengths and the memory")
    parser.add_argument("--kv-tokens", type=int, default=75_000, help="before it is divided")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--times", type=int, default=3, help="that each order runs")
    parser.add_argument("--page-size", type=int, default=4)
    return parser.parse_args()


def main() -> int:
    asked = arguments()
    torch.set_num_threads(1)
    settings = EngineSettings(
        slots=asked.rows,
        kv_tokens=asked.kv_tokens // asked.shorter,
        page_size=asked.page_size,
        max_pending=4096,
    )
    model, found = small_model(settings.kv_tokens or 0), list[Compared]()
    for cell in asked.cell or CELLS:
        job = Job(cell, "", 0.0, "peak", asked.seconds, settings.kv_tokens or 0, asked.rows, 0, asked.data)
        lines = shorter(lines_of(job), asked.shorter)
        runs, fit = real(model, settings, lines, asked.orders, asked.times)
        for each in compared(job, lines, runs, settings, fit):
            found.append(each)
            print(each, flush=True)
    print(json.dumps({"conditions": vars(asked), "runs": [each._asdict() for each in found]}))
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        raise SystemExit(main())
