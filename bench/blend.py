"""Measure orders of an offline batch on the engine's own scheduler, with iterations that are counted.

`python -m bench.blend --data FOLDER` compares every order on named workloads; `--grid` on cells of density
and sharing, `--random N` on random ones. Costs of iterations are those of Llama-3.1-8B on an H200. FOLDER has
`traces/*.parquet` and `length_corpus.parquet`; without it, sources that need none are used. Every finished
run is a line of `--out`, and what is there already is not run again. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import statistics
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from bench.support.offline_orders import ORDERS, ChosenQueue, queue_of
from bench.support.offline_work import H200, Line, draw, mix
from site_engine.core.load import CostFit
from site_engine.core.remaining_curve import RemainingCurve, RemainingPoint
from site_engine.core.request import Lane, Request
from site_engine.core.schedule_plan import SchedulePlan
from tests.support.counted_engine import CountedEngine, Counts
from tests.support.held_to_the_end import HeldToTheEnd

TOKEN_BUDGET = 8192
ENDLESS = 1 << 20
NAMED: dict[str, dict[str, Any]] = {
    "code and stories": {"mix": ("azure_code", "stories", 1.1, 0.35)},
    "code and reasoning": {"mix": ("azure_code", "reasoning", 1.1, 0.2)},
    "chats and reasoning": {"mix": ("chats", "reasoning", 1.1, 0.35)},
    "alpaca and stories": {"mix": ("alpaca", "stories", 1.1, 0.05)},
    "documents": {"counts": {"documents": 1600}},
    "documents and stories": {"counts": {"documents": 800, "stories": 150}},
    "chats": {"counts": {"chats": 2000}},
}
NO_DATA = ("documents", "documents and stories", "chats")
GRID_SOURCES = (
    ("azure_code", "stories"),
    ("azure_conv", "stories"),
    ("chats", "stories"),
    ("azure_code", "reasoning"),
)
DENSITIES = tuple(round(0.8 + 0.05 * at, 2) for at in range(13))
SHARINGS = (0.05, 0.15, 0.25, 0.35, 0.45)


class Job(NamedTuple):
    """One run: a workload, an order, how well lengths are known, and what a request reserves."""

    workload: str
    order: str
    wrong_by: float
    reserve: str
    seconds: float
    kv_tokens: int
    rows: int
    seed: int
    data: str


def lines_of(job: Job) -> list[Line]:
    """Return the lines of a workload: a named one, a cell of the grid, or a random mixture."""
    kind, _, rest = job.workload.partition(" ")
    data = Path(job.data)
    if kind == "cell":
        first, second, *numbers = rest.split()
        return mix(first, second, float(numbers[0]), float(numbers[1]), job.seconds, data, job.seed)
    if kind == "random":
        return _random_lines(int(rest), job, data)
    named = NAMED[job.workload]
    if "mix" in named:
        compute, memory, density, sharing = named["mix"]
        return mix(compute, memory, density, sharing, job.seconds, data, job.seed)
    counts = {name: round(count * job.seconds / 60) for name, count in named["counts"].items()}
    return draw(counts, data, job.seed)


def _random_lines(number: int, job: Job, data: Path) -> list[Line]:
    """Mix one to four sources that need no recorded data, each with up to so many seconds of work."""
    rnd = random.Random(number)
    names = rnd.sample(["chats", "stories", "few_shot", "documents"], rnd.randint(1, 4))
    weights = {name: rnd.expovariate(1) for name in names}
    counts = {}
    for name, weight in weights.items():
        probe = draw({name: 400}, data, 1)
        per_line_s = sum(H200.least(probe)) / 400
        counts[name] = max(1, round(job.seconds * weight / sum(weights.values()) / per_line_s))
    return draw(counts, data, job.seed + number)


class Forecast(NamedTuple):
    """The length is lognormal: its median, and the standard deviation of its logarithm."""

    median: float
    deviation: float

    @property
    def is_exact(self) -> bool:
        return self.deviation < 0.01

    @property
    def mean(self) -> float:
        return self.median if self.is_exact else self.median * math.exp(self.deviation**2 / 2)


def forecasts(lines: list[Line], wrong_by: float, seed: int) -> list[Forecast]:
    """Return what a calibrated forecast would know of each line if it were wrong by `wrong_by`.

    Where the lengths of a source differ by less, it knows the source alone.
    """
    rnd = np.random.default_rng(seed + 9)
    logs = np.log([line.response_tokens for line in lines])
    found = [Forecast(1.0, 0.0)] * len(lines)
    for source in sorted({line.source for line in lines}):  # the same draws in every process
        at = [index for index, line in enumerate(lines) if line.source == source]
        mean, variance = float(logs[at].mean()), float(logs[at].var())
        known = max(0.0, 1 - wrong_by**2 / variance) if variance else 1.0
        spread = math.sqrt(known * (1 - known) * variance)
        medians = np.exp(mean + known * (logs[at] - mean) + spread * rnd.normal(0, 1, len(at)))
        deviation = min(wrong_by, math.sqrt(variance))
        for index, median in zip(at, medians.tolist(), strict=True):
            found[index] = Forecast(max(1.0, median), deviation)
    return found


@cache
def _curve(deviation: float) -> tuple[tuple[float, float, float], ...]:
    """Return (part, mean, p90) of what remains after that part of the median of a lognormal length."""
    normal, found = NormalDist(), []
    for part in (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0):
        begins = math.log(part) / deviation if part else -9.0
        left, above = 1 - normal.cdf(begins), 1 - normal.cdf(begins - deviation)
        if left < 1e-9:
            break
        mean = math.exp(deviation**2 / 2) * above / left
        found.append((part, mean - part, math.exp(deviation * normal.inv_cdf(1 - 0.1 * left)) - part))
    return tuple(found)


def remaining(forecast: Forecast, tokens: int) -> RemainingCurve:
    if forecast.is_exact:
        return RemainingCurve.exactly(tokens)
    points: dict[int, RemainingPoint] = {}
    for part, mean, p90 in _curve(round(forecast.deviation, 3)):
        at, median = round(part * forecast.median), forecast.median
        points.setdefault(at, RemainingPoint(at, max(1.0, mean * median), max(1, round(p90 * median))))
    return RemainingCurve(tuple(points.values()))


def seconds_of(plan: SchedulePlan) -> float:
    """Return what an iteration costs on the device."""
    prompt = sum([chunk.length for chunk in plan.prefills])
    return H200.seconds(
        len(plan.decoding),
        sum(plan.starts) + len(plan.decoding),
        prompt,
        sum([chunk.samples for chunk in plan.prefills]),
        sum([chunk.length * (chunk.start + chunk.length / 2) for chunk in plan.prefills]),
    )


def as_requests(job: Job, lines: list[Line]) -> tuple[list[Line], Callable[[int], Request]]:
    """Return the lines as they are forecast, and what makes the request of a line."""
    known = forecasts(lines, job.wrong_by, job.seed)
    expected = [
        line._replace(response_tokens=max(1, round(each.mean)))  # as the gateway has it
        for line, each in zip(lines, known, strict=True)
    ]

    def request(at: int) -> Request:
        line = lines[at]
        shared = range((line.group + 1) << 24, ((line.group + 1) << 24) + line.shared_tokens)
        own = range((at + 1) << 44, ((at + 1) << 44) + line.prompt_tokens - line.shared_tokens)
        curve = remaining(known[at], line.response_tokens)
        made = Request(str(at), [*shared, *own], remaining=curve, lane=Lane.BATCH)
        made.max_tokens = line.response_tokens if known[at].is_exact else ENDLESS
        return made

    return expected, request


def run(job: Job) -> dict[str, Any]:
    lines = lines_of(job)
    return {**job._asdict(), **_figures(counted(job, lines), lines, job)}


def counted(  # noqa: PLR0917 - as an engine has them
    job: Job,
    lines: list[Line],
    seconds: Callable[[SchedulePlan], float] = seconds_of,
    token_budget: int = TOKEN_BUDGET,
    page_size: int = 16,
    fit: CostFit | None = None,
) -> Counts:
    """Run lines in the order of a job; `seconds`: what an iteration costs, `fit`: what the site knows."""
    expected, request = as_requests(job, lines)
    queue = queue_of(job.order, lines, expected, request, job.rows)
    engine = CountedEngine(
        {str(at): line.response_tokens for at, line in enumerate(lines)},
        seconds,
        kv_tokens=job.kv_tokens,
        slots=job.rows,
        token_budget=token_budget,
        page_size=page_size,
        queue=queue,
        fit=fit,
    )
    if isinstance(queue, ChosenQueue):
        queue.scheduler = engine.scheduler
    if job.reserve == "p90":
        engine.scheduler.reservation = HeldToTheEnd(engine.pool)
    return engine.run()


def _figures(counts: Counts, lines: list[Line], job: Job) -> dict[str, Any]:
    compute_s, memory_s = H200.least(lines)
    unshared_s, _ = H200.least(lines, shared=False)
    prompt_tokens = sum(line.prompt_tokens for line in lines)
    seen = {line.group: line.shared_tokens for line in lines}
    shareable = sum(line.shared_tokens for line in lines) - sum(seen.values())
    return {
        "lines": len(lines),
        "took_s": round(counts.seconds, 2),
        "optimal_s": round(compute_s + memory_s, 2),
        "bound_s": round(H200.bound(lines, job.kv_tokens, job.rows), 2),
        "density": round(compute_s / memory_s, 3),
        "sharing": round(1 - compute_s / unshared_s, 3),
        "tokens_per_s": round(counts.output / counts.seconds, 1),
        "shared": round(counts.cached / max(1, shareable), 3),
        "prompt_tokens": prompt_tokens,
        "iterations": counts.iterations,
        "preemptions": counts.preemptions,
    }


def workloads(options: argparse.Namespace) -> list[str]:
    if options.grid:
        return [f"cell {c} {m} {d} {s}" for c, m in GRID_SOURCES for d in DENSITIES for s in SHARINGS]
    if options.random:
        return [f"random {number}" for number in range(options.random)]
    return [name for name in NAMED if options.data or name in NO_DATA]


def jobs(options: argparse.Namespace) -> list[Job]:
    return [
        Job(
            workload,
            order,
            options.wrong_by,
            options.reserve,
            options.seconds,
            options.kv_tokens,
            options.rows,
            options.seed,
            options.data,
        )
        for workload in options.workload or workloads(options)[options.part[0] :: options.part[1]]
        for order in options.orders
    ]


def run_all(todo: list[Job], processes: int) -> Iterator[dict[str, Any]]:
    if processes == 1:
        yield from map(run, todo)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(run, todo)


def finished(out: Path | None) -> list[dict[str, Any]]:
    if out is None or not out.exists():
        return []
    return [json.loads(line) for line in out.read_text().splitlines()]


def summary(found: list[dict[str, Any]], orders: list[str]) -> dict[str, Any]:
    """Return the mean ratio of each order's seconds to those of blend, and how far blend is behind any."""
    by_workload: dict[str, dict[str, float]] = {}
    for each in found:
        by_workload.setdefault(each["workload"], {})[each["order"]] = each["took_s"]
    whole = [took for took in by_workload.values() if set(orders) <= set(took)]
    if not whole or "blend" not in orders:
        return {"workloads": len(whole)}
    others = [name for name in orders if name != "blend"]
    behind = [took["blend"] / min(took[name] for name in others) - 1 for took in whole] if others else [0.0]
    return {
        "workloads": len(whole),
        "times_blend": {
            name: round(statistics.geometric_mean([took[name] / took["blend"] for took in whole]), 4)
            for name in others
        },
        "most_behind_best": round(max(behind), 4),
        "behind_by_2_percent": sum(each > 0.02 for each in behind),
    }


def part(text: str) -> tuple[int, int]:
    first, _, step = text.partition("/")
    return int(first) - 1, int(step)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.blend", description=__doc__)
    parser.add_argument("--data", default="", help="folder with traces and lengths of responses")
    parser.add_argument("--workload", action="append", choices=sorted(NAMED))
    parser.add_argument("--grid", action="store_true", help="65 cells of density and sharing x 4 sources")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N random mixtures")
    parser.add_argument("--part", type=part, default=(0, 1), metavar="K/N", help="every Nth workload, from K")
    parser.add_argument("--orders", nargs="+", choices=sorted(ORDERS), default=list(ORDERS))
    parser.add_argument("--wrong-by", type=float, default=0.0, help="standard deviation of log forecasts")
    parser.add_argument("--reserve", choices=("peak", "p90"), default="peak")
    parser.add_argument("--seconds", type=float, default=6.0, help="of computing in each workload")
    parser.add_argument("--kv-tokens", type=int, default=H200.kv_tokens)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a file of JSON lines, one a run")
    return parser.parse_args()


def main() -> int:
    options = parse()
    found = finished(options.out)
    done = {tuple(each[name] for name in Job._fields) for each in found}
    for each in run_all([job for job in jobs(options) if tuple(job) not in done], options.jobs):
        found.append(each)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(each) + "\n")
        print(
            f"{each['workload']:30s} {each['order']:13s} {each['took_s']:8.2f} s "
            f"({each['took_s'] / each['bound_s']:.2f} of the bound) shared {each['shared']:.2f} "
            f"preempted {each['preemptions']} | density {each['density']} sharing {each['sharing']}",
            flush=True,
        )
    wanted = set(map(tuple, jobs(options)))
    mine = [each for each in found if tuple(each[name] for name in Job._fields) in wanted]
    print(json.dumps({**summary(mine, options.orders), "conditions": _conditions(options)}))
    return 0


def _conditions(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if name not in {"data", "out", "jobs"}}


if __name__ == "__main__":
    raise SystemExit(main())
