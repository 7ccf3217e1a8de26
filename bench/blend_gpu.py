"""Measure orders of offline batches on one GPU with random weights, beside what `bench.blend` counts.

`python -m bench.blend_gpu --model bench/models/llama-3.1-8b --workload documents --seconds 25` takes several
workloads and loads the model once. Lengths are exact, answers greedy, ids new in every run. `--wrong-by`
gives the engine forecasts instead, and `--reserve p90 peak` compares what a request reserves. A short run of
blend, with a part of the lines, warms the graphs and is not counted. `seconds_with_new_graphs` are those of
iterations that captured graphs all the same; costs are not fitted to them. Prints the seconds of the kinds of
steps and, at the end, what a prompt's token took by the size of its piece, and what is counted of each run,
at the costs of bench/results/gpu.md and at those fitted to all other iterations here. `--vllm` names
workloads that vLLM serves afterwards, in the orders that a file can have, with as many rows and as much
memory for keys and values; without `--orders` only vLLM runs. With `--out` every run is at once a line there.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import nnls

from bench.blend import NAMED, NO_DATA, TOKEN_BUDGET, Job, as_requests, counted, lines_of
from bench.engine_gpu import kind_of, plain_model
from bench.support import beside_vllm
from bench.support.beside_vllm import Pass, Took
from bench.support.forced import device_runner
from bench.support.gpu_costs import seconds
from bench.support.offline_served import ORDERS, Forecasts, Serving, prompts
from bench.support.offline_work import H200, Line
from gateway.batches.order import order as in_order
from site_engine.core.reserve import Reservation
from site_engine.core.schedule_plan import SchedulePlan
from site_engine.cuda.forward import fast_forward
from site_engine.cuda.runner import DeviceRunner
from site_engine.engine.build import overlapped_engine, warm_graphs
from site_engine.engine.engine import SiteEngine
from site_engine.engine.settings import EngineSettings
from site_engine.model.loader import from_model
from tests.support.held_to_the_end import HeldToTheEnd
from tests.support.line_sizes import sizes_of

Features = tuple[float, ...]
RIDGE = 165  # tokens that take as long to multiply as the weights to read
SCALES = np.array([1, 1e-2, 1e-3, 1e-5, 1e-6, 1])
WARM_LINES, WARM_ANSWER = 512, 300
VLLM_ORDERS, VLLM_WARM_LINES = ("arrival", "longest", "prefix"), 64


def features(plan: SchedulePlan) -> Features:
    """Return what the seconds of an iteration depend on, as the terms of `Cost.seconds`."""
    decodes, prompt = len(plan.decoding), sum([chunk.length for chunk in plan.prefills])
    tokens = decodes + prompt
    return (
        1,
        tokens,
        max(0, tokens - RIDGE),
        sum(plan.starts),
        sum([chunk.length * (chunk.start + chunk.length / 2) for chunk in plan.prefills]),
        bool(plan.prefills),
    )


def decodes_of(known: list[tuple[Features, float]]) -> Callable[[int, float], float]:
    """Return the seconds of an iteration without prompts, by its rows and the tokens that they read."""
    seen = [(each, took) for each, took in known if not each[-1]]
    rows = np.array([(1, each[1], max(0.0, each[1] - RIDGE / 2), each[3]) for each, _ in seen])
    weights, _ = nnls(rows * SCALES[:4], np.array([took for _, took in seen]))
    scaled = weights * SCALES[:4]
    return lambda count, read: float(scaled @ (1, count, max(0.0, count - RIDGE / 2), read))


def prices(known: list[tuple[Features, float]], decodes: list[int]) -> list[dict[str, float]]:
    """Return what a prompt's token took beyond the decodes of its iteration, by rows and prompt tokens."""
    alone, found = decodes_of(known), dict[tuple[int, int], list[tuple[float, float]]]()
    for (each, took), rows in zip(known, decodes, strict=True):
        prompt = each[1] - rows
        if prompt > 0:
            kind = int(math.log2(rows + 1)), int(2 * math.log2(prompt))
            found.setdefault(kind, []).append((took - alone(rows, each[3]), prompt))
    return [
        {
            "rows_from": 2**rows - 1,
            "prompt_tokens": round(sum(tokens for _, tokens in each) / len(each)),
            "iterations": len(each),
            "token_us": round(1e6 * sum(more for more, _ in each) / sum(tokens for _, tokens in each), 2),
        }
        for (rows, _), each in sorted(found.items())
    ]


class Fit:
    """Seconds of an iteration: no negative weights of its features, by least squares."""

    def __init__(self, known: list[tuple[Features, float]]) -> None:
        rows = np.array([each for each, _ in known]) * SCALES
        weights, _ = nnls(rows, np.array([took for _, took in known]))
        self.weights: list[float] = (weights * SCALES).tolist()

    def seconds(self, plan: SchedulePlan) -> float:
        return sum([weight * each for weight, each in zip(self.weights, features(plan), strict=True)])

    def optimum(self, lines: list[Line]) -> float:
        """Return the least seconds in sequence: all tokens computed, shared ones once, and all reads."""
        _, first_s, more_s, read_s, square_s, _ = self.weights
        token_s = first_s + more_s
        seen: set[int] = set()
        total = 0.0
        for group, shared, prompt, response, _ in lines:
            hit = shared if group in seen else 0
            seen.add(group)
            total += token_s * (prompt - hit + response) + square_s * (prompt**2 - hit**2) / 2
            total += read_s * response * (prompt + response / 2)
        return total


class Run(NamedTuple):
    """One run of a workload."""

    job: Job
    lines: list[Line]
    figures: dict[str, Any]


class Measured:
    """An engine on the GPU, and what its iterations took."""

    def __init__(self, engine: SiteEngine) -> None:
        self._engine = engine
        self._peak: Reservation = engine._scheduler.reservation
        self.iterations: list[tuple[Features, float]] = []
        self.decodes: list[int] = []  # rows of each of these iterations that decoded

    def serve(self, job: Job, lines: list[Line], seed: int) -> dict[str, Any]:
        """Run all lines, print the seconds of each kind of steps, and return what they took."""
        engine, kinds = self._engine, dict[str, list[float]]()
        graphs = known_graphs = len(_graphs(engine))
        graphs_s = 0.0
        engine._scheduler.reservation = HeldToTheEnd(engine._pool) if job.reserve == "p90" else self._peak
        serving = Serving(engine, lines, ORDERS[job.order], seed, known(job, lines))
        gc.collect()
        synchronize()
        began = step_began = seconds()
        pending = engine._pending
        while serving.step():
            now = seconds()
            plan = None if pending is None else pending.plan
            kinds.setdefault(kind_of(plan), []).append(now - step_began)
            if (made := len(_graphs(engine))) > known_graphs:
                graphs_s, known_graphs = graphs_s + now - step_began, made
            elif plan is not None and plan.chunks:
                self.iterations.append((features(plan), now - step_began))
                self.decodes.append(len(plan.decoding))
            step_began, pending = now, engine._pending
        took_s, ended = seconds() - began, serving.ended
        for kind, each in sorted(kinds.items()):
            print(f"   {kind}: {len(each)} x {1e3 * sum(each) / len(each):.3f} ms = {sum(each):.2f} s")
        return {
            "took_s": round(took_s, 2),
            "tokens_per_s": round(ended.tokens / took_s, 1),
            "cached_tokens": ended.cached_tokens,
            "shared": round(ended.cached_tokens / max(1, shareable(lines)), 3),
            "preemptions": ended.preemptions,
            "iterations": ended.iterations,
            "new_graphs": known_graphs - graphs,
            "seconds_with_new_graphs": round(graphs_s, 2),
        }


def _graphs(engine: SiteEngine) -> dict[Any, Any]:
    return device_runner(engine)._steps if isinstance(engine.runner, DeviceRunner) else {}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def shareable(lines: list[Line]) -> int:
    return sum(line.shared_tokens for line in lines) - sum(
        {line.group: line.shared_tokens for line in lines}.values()
    )


def known(job: Job, lines: list[Line]) -> Forecasts | None:
    if not job.wrong_by:
        return None
    expected, request = as_requests(job, lines)
    return Forecasts(expected, [request(at).remaining for at in range(len(lines))])


def counts(run: Run, fit: Fit, simulated: Sequence[str]) -> dict[str, Any]:
    """Return what is counted of a run, at recorded costs and at fitted ones, and so of other orders."""
    compute_s, memory_s = H200.least(run.lines)
    plain, fitted = (counted(run.job, run.lines, *cost) for cost in ((), (fit.seconds,)))
    others = {
        order: round(counted(run.job._replace(order=order), run.lines, fit.seconds).seconds, 2)
        for order in simulated
    }
    return {
        "others_at_fitted_costs_s": others,
        "counted_s": round(plain.seconds, 2),
        "counted_iterations": plain.iterations,
        "at_fitted_costs_s": round(fitted.seconds, 2),
        "optimal_s": round(compute_s + memory_s, 2),
        "optimal_at_fitted_costs_s": round(fit.optimum(run.lines), 2),
        "bound_s": round(H200.bound(run.lines, run.job.kv_tokens, run.job.rows), 2),
        "density": round(compute_s / memory_s, 3),
    }


def build(asked: argparse.Namespace) -> SiteEngine:
    settings = EngineSettings(
        slots=asked.rows, token_budget=TOKEN_BUDGET, kv_tokens=asked.kv_tokens, max_pending=1 << 14
    )
    model = from_model(plain_model(asked.model), eos_token_ids=())
    engine = overlapped_engine(model, settings, seconds, fast_forward(model))
    print(f"{torch.cuda.get_device_name()}, {warm_graphs(engine, asked.longest)} graphs", flush=True)
    return engine


def work(
    asked: argparse.Namespace, workloads: Sequence[str], orders: Sequence[str], reserves: Sequence[str]
) -> list[tuple[Job, list[Line]]]:
    """Return the runs of workloads in orders."""
    found = []
    for name, how, reserve in product(workloads, orders, reserves):
        job = Job(
            name, how, asked.wrong_by, reserve, asked.seconds, asked.kv_tokens, asked.rows, 0, asked.data
        )
        lines = lines_of(job)
        found.append((job, [shorter(line, asked.longest_answer) for line in lines]))
    return found


def shorter(line: Line, most: int) -> Line:
    return line._replace(response_tokens=min(most, line.response_tokens))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.blend_gpu", description=__doc__)
    parser.add_argument("--model", required=True, help="folder with a configuration; weights are random")
    parser.add_argument("--workload", nargs="+", default=["documents and stories"], choices=sorted(NAMED))
    parser.add_argument(
        "--data", default="", help=f"folder with traces; without it only {', '.join(NO_DATA)}"
    )
    parser.add_argument("--orders", nargs="*", default=list(ORDERS), choices=list(ORDERS))
    parser.add_argument("--vllm", nargs="*", default=[], choices=sorted(NAMED), help="workloads of vLLM")
    parser.add_argument("--vllm-orders", nargs="+", default=list(VLLM_ORDERS), choices=VLLM_ORDERS)
    beside_vllm.add_arguments(parser)
    parser.add_argument("--simulate", nargs="*", default=[], help="orders to count at the fitted costs alone")
    parser.add_argument("--reserve", nargs="+", default=["peak"], choices=("peak", "p90"))
    parser.add_argument("--wrong-by", type=float, default=0.0, help="standard deviation of log forecasts")
    parser.add_argument("--seconds", type=float, default=25.0, help="of computing in the workload")
    parser.add_argument("--longest-answer", type=int, default=16_000, help="longer ones are cut to this")
    parser.add_argument("--kv-tokens", type=int, default=75_000)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--longest", type=int, default=8192, help="context that graphs are made for at first")
    parser.add_argument("--out", type=Path, help="a file of JSON lines, one a run")
    return parser.parse_args()


def measure(measured: Measured, todo: list[tuple[Job, list[Line]]], out: Path | None) -> list[Run]:
    """Run all, after a few lines of each workload that are not counted."""
    began, runs, warmed = seconds(), list[Run](), set[str]()
    for seed, (job, lines) in enumerate(todo):
        if job.workload not in warmed:
            few = first_few(lines, WARM_LINES)
            print(f"warm-up: {measured.serve(job._replace(order='blend'), few, 1000 + seed)}", flush=True)
            warmed.add(job.workload)
        try:
            figures = measured.serve(job, lines, seed)
        except KeyboardInterrupt:  # what has ended is counted
            break
        runs.append(Run(job, lines, figures))
        print(
            f"{job.workload}, {job.order}, {job.reserve}, at {seconds() - began:.0f} s: {figures}", flush=True
        )
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps({**job._asdict(), "lines": len(lines), **figures}) + "\n")
    return runs


def first_few(lines: list[Line], count: int) -> list[Line]:
    """Return lines that warm an engine up."""
    return [shorter(line, WARM_ANSWER) for line in lines[:: max(1, len(lines) // count)]]


def vllm_passes(todo: Sequence[tuple[Job, list[Line]]], vocab_size: int) -> list[Pass]:
    """Return what vLLM is asked: some lines to warm up, then all of each run in its order, with new ids."""
    few = first_few(todo[0][1], VLLM_WARM_LINES)
    passes = [Pass("warm", prompts(few, vocab_size, 1000), [line.response_tokens for line in few])]
    for seed, (job, lines) in enumerate(todo):
        ids = prompts(lines, vocab_size, seed)
        listed = in_order(sizes_of(lines), ORDERS[job.order]).tolist()
        answers = [lines[at].response_tokens for at in listed]
        passes.append(Pass(f"{job.workload}, {job.order}", [ids[at] for at in listed], answers))
    return passes


def run_vllm(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Have vLLM serve the workloads that are asked of it; return a line for each run, or for its error."""
    todo = work(asked, asked.vllm, asked.vllm_orders, ["vLLM's"])
    config = json.loads((Path(asked.model) / "config.json").read_text())
    longest = max(line.prompt_tokens + line.response_tokens for _, lines in todo for line in lines)
    arguments = {"max_num_seqs": asked.rows, "max_model_len": longest + 1}
    arguments |= beside_vllm.limited(asked.kv_tokens)
    passes = vllm_passes(todo, config["vocab_size"])
    runs, found = {f"{job.workload}, {job.order}": (job, lines) for job, lines in todo}, []

    def ended(name: str, took: Took) -> None:
        if name in runs:
            found.append(vllm_run(*runs[name], took))
            write(asked.out, found[-1])

    served = beside_vllm.serve(
        asked.vllm_path, Path(asked.model), arguments, passes, within_s=asked.vllm_within, ended=ended
    )
    found.append({"engine": "vLLM", **served.figures()})
    write(asked.out, found[-1])
    return found


def vllm_run(job: Job, lines: list[Line], took: Took) -> dict[str, Any]:
    """Return the figures of a run of vLLM, as of our engine's."""
    tokens = sum(line.response_tokens for line in lines)
    return {
        "engine": "vLLM",
        **job._asdict(),
        "lines": len(lines),
        "took_s": round(took.seconds, 2),
        "tokens_per_s": round(tokens / took.seconds, 1),
        "cached_tokens": took.cached_tokens,
        "shared": round(took.cached_tokens / max(1, shareable(lines)), 3),
    }


def write(out: Path | None, record: dict[str, Any]) -> None:
    """Print a run, and append it to a file if there is one."""
    print(record, flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(record) + "\n")


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return the seconds of all runs, those of a workload together."""
    rows = [f"{'workload':22s} {'engine':6s} {'order':8s} {'seconds':>8s} {'tokens/s':>9s} shared"]
    for run in sorted((run for run in runs if "took_s" in run), key=lambda run: str(run["workload"])):
        rows.append(
            f"{run['workload']:22s} {run['engine']:6s} {run['order']:8s} {run['took_s']:8.2f} "
            f"{run['tokens_per_s']:9,.0f} {run['shared']:6.3f}"
        )
    return "\n".join([*rows, *(f"vLLM failed: {run['error']}" for run in runs if "error" in run)])


def run_ours(asked: argparse.Namespace) -> tuple[list[float], list[dict[str, Any]]]:
    """Serve what is asked of our engine; return fitted costs of an iteration and a line for each run."""
    began = seconds()
    measured = Measured(build(asked))
    print(f"ready after {seconds() - began:.0f} s", flush=True)
    runs = measure(measured, work(asked, asked.workload, asked.orders, asked.reserve), asked.out)
    fit = Fit(measured.iterations)
    for price in prices(measured.iterations, measured.decodes):
        print(price, flush=True)
    found, done = [], set[str]()
    for run in runs:
        simulated = () if run.job.workload in done else asked.simulate
        done.add(run.job.workload)
        found.append(
            {
                "engine": "Mico",
                **run.job._asdict(),
                "lines": len(run.lines),
                **run.figures,
                **counts(run, fit, simulated),
            }
        )
        print(found[-1], flush=True)
    return fit.weights, found


def main() -> None:
    asked = arguments()
    weights, found = run_ours(asked) if asked.orders else ([], [])
    found += run_vllm(asked) if asked.vllm else []
    print(table(found))
    print(json.dumps({"conditions": vars(asked), "fit": weights, "runs": found}, default=str))


if __name__ == "__main__":
    with torch.no_grad():
        main()
