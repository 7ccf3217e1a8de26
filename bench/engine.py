"""Measure the engine's speed on one device, beside transformers' own ways of serving in the same run.

`python -m bench.engine --model FOLDER --workload alpaca --requests 64 --slots 32 --peer transformers-cb`
A folder with nothing but a config.json gets random weights. Greedy; every answer has its given length; as
many queries are in flight as there are slots, in order of arrival unless `--order` names another for the
engine. Needs torch, transformers, on a GPU triton. The last line is JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from bench.support import roofline
from bench.support.order import ORDERS, Order
from bench.support.peers import CLOCKS, PEERS, Clock, Limits, Run, limits_for
from bench.support.workload import SHAPES, Query, lengths, queries
from site_engine.core.request import Lane, Request, Sampling
from site_engine.core.request_queue import POLICIES
from site_engine.engine.build import build_engine
from site_engine.engine.engine import SiteEngine
from site_engine.engine.settings import EngineSettings
from site_engine.model.cpu_optimize import optimize_for_cpu
from site_engine.model.loader import LoadedModel, from_model
from tests.support.padded_batch import padded_engine

RUNNERS = ("packed", "dense", "decoupled", "static")
Contender = Callable[[list[Query]], Run]
LONGEST_TOKENS = 2048  # prompt and response of one query


def load_plain(source: str, device: str, dtype: str) -> Any:
    """Load a model with transformers: real weights, or random ones in the shape of a config.json."""
    chosen = getattr(torch, dtype)
    if Path(source).is_dir() and not any(Path(source).glob("*.safetensors")):
        config = transformers.AutoConfig.from_pretrained(source)
        torch.manual_seed(0)
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=chosen)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=chosen).to(device)
    return model.eval().requires_grad_(False)


def make_engine(model: LoadedModel, runner: str, limits: Limits, clock: Clock, order: Order) -> SiteEngine:
    """Make the engine as a site runs it, or over a padded batch as in the papers."""
    budget = limits.token_budget
    if runner == "static":  # the prompts of a batch start together
        budget = max(budget, limits.kv_tokens)
    settings = EngineSettings(
        slots=limits.slots,
        token_budget=budget,
        kv_tokens=limits.kv_tokens,
        policy=POLICIES["static"] if runner == "static" else order.policy,
        prefix_cache=runner == "packed",
    )
    if runner != "packed":
        return padded_engine(model, settings, clock, apart=runner == "decoupled")
    return build_engine(model, settings, clock)


def run_mico(engine: SiteEngine, work: list[Query], clock: Clock, lane: Lane = Lane.CHAT) -> Run:
    answers: list[list[int]] = [[] for _ in work]
    decode_s: list[float] = []
    began = clock()
    for at, query in enumerate(work):
        sampling = Sampling(max_tokens=query.response_tokens, temperature=0.0, ignore_eos=True)
        engine.submit(Request(str(at), query.prompt, sampling, lane=lane))
    while engine.has_work:
        step_began = clock()
        outputs = engine.step()
        if len(outputs) == engine.settings.slots:
            decode_s.append(clock() - step_began)
        for output in outputs:
            answers[int(output.request_id)] += output.token_ids
    seconds = clock() - began
    return Run(seconds, answers, statistics.median(decode_s) * 1e3 if decode_s else None)


def same_answers(mine: Run, other: Run) -> float:
    """Return the share of queries answered with exactly the same tokens."""
    return sum(a == b for a, b in zip(mine.answers, other.answers, strict=True)) / len(mine.answers)


class Runs(NamedTuple):
    """Runs by name, the engine's as "mico"; and the reason for each peer that could not run."""

    of: dict[str, list[Run]]
    failed: dict[str, str]


def run_all(options: argparse.Namespace, plain: Any, served: LoadedModel) -> Runs:
    """Run the engine and each peer, in turn; new token ids in each repetition; a first round warms up."""
    clock = CLOCKS[options.clock]

    def work(repetition: int) -> list[Query]:
        return queries(
            options.workload,
            options.requests,
            vocab_size=served.vocab_size,
            context_tokens=min(served.context_tokens, LONGEST_TOKENS),
            repetition=repetition,
        )

    limits = limits_for(work(0), options.slots, options.token_budget)
    order = ORDERS[options.order]
    engine = make_engine(served, options.runner, limits, clock, order)
    contenders: dict[str, Contender] = {"mico": lambda queries: run_mico(engine, queries, clock, order.lane)}
    for name in options.peer:
        model = copy.deepcopy(plain)
        contenders[name] = partial(_run_peer, name, model, limits, clock)
    # on a GPU the engine captures the graphs of all shapes of the run
    contenders["mico"](work(-1) if served.device.type == "cuda" else work(-1)[:2])
    failed = _drop_failing(contenders, work(-1)[:2])
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    for repetition in range(options.repeat):
        for name, run in _in_turn(contenders, work(repetition), options.slots).items():
            runs[name].append(run)
    return Runs(runs, failed)


def _in_turn(contenders: dict[str, Contender], work: list[Query], slots: int) -> dict[str, Run]:
    """Run all queries by each contender. With one slot, contenders take turns at every query: the speed of a
    shared machine changes within seconds.
    """
    pieces = [[query] for query in work] if slots == 1 else [work]
    runs = {name: list[Run]() for name in contenders}
    for piece in pieces:
        for name, contend in contenders.items():
            runs[name].append(contend(piece))
    return {name: _joined(each) for name, each in runs.items()}


def _joined(runs: list[Run]) -> Run:
    steps = [run.step_ms for run in runs if run.step_ms is not None]
    return Run(
        sum(run.seconds for run in runs),
        [answer for run in runs for answer in run.answers],
        statistics.median(steps) if steps else None,
    )


def _drop_failing(contenders: dict[str, Contender], work: list[Query]) -> dict[str, str]:
    """Run a first, short pass of each peer and take out those that fail, with the reason."""
    failed = {}
    for name in [name for name in contenders if name != "mico"]:
        try:
            contenders[name](work)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is theirs
            failed[name] = f"{type(error).__name__}: {error}"
            del contenders[name]
    return failed


def _run_peer(name: str, model: Any, limits: Limits, clock: Clock, work: list[Query]) -> Run:
    return PEERS[name](model, work, limits, clock)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    plain = load_plain(options.model, options.device, options.dtype)
    served = from_model(optimize_for_cpu(copy.deepcopy(plain)), name=Path(options.model).name)
    floor = _roofline(options, served)
    runs, failed = run_all(options, plain, served)
    speeds = {name: statistics.median(run.tokens_per_s for run in each) for name, each in runs.items()}
    mine, speed = runs.pop("mico"), speeds.pop("mico")
    steps = [run.step_ms for run in mine if run.step_ms is not None]
    return {
        "out_tok_s": round(speed, 1),
        "wall_s": round(statistics.median(run.seconds for run in mine), 3),
        "peers": {name: round(other, 1) for name, other in speeds.items()},
        "ratio": {name: round(speed / other, 2) for name, other in speeds.items()},
        "same_answers": {
            name: min(same_answers(*pair) for pair in zip(mine, each, strict=True))
            for name, each in runs.items()
        },
        "failed": failed,
        "step_ms": round(statistics.median(steps), 3) if steps else None,
        "roofline_fraction": None if floor is None else round(speed / floor, 4),
        "roofline_tok_s": None if floor is None else round(floor, 1),
        "conditions": _conditions(options),
    }


def _roofline(options: argparse.Namespace, served: LoadedModel) -> float | None:
    """Return the output tokens per second if only this device's memory and products took time."""
    sizes = roofline.sizes(served)
    if sizes is None:
        return None
    weight_bytes = (sizes.body + sizes.head) * sizes.number_bytes
    rates = roofline.measure(served.device, served.dtype, weight_bytes, CLOCKS[options.clock])
    work = lengths(options.workload, options.requests)
    seconds = roofline.ideal_seconds(work, options.slots, sizes, rates)
    return sum(response for _, response in work) / seconds


def _conditions(options: argparse.Namespace) -> dict[str, Any]:
    kept = (
        *("workload", "runner", "order", "requests", "slots"),
        *("token_budget", "device", "dtype", "threads", "repeat"),
    )
    return {
        "model": Path(options.model).name,
        **{name: getattr(options, name) for name in (*kept, "clock")},
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument(
        "--model", required=True, help="a folder, with weights or a config.json alone, or a Hub id"
    )
    parser.add_argument("--workload", choices=sorted(SHAPES), default="alpaca")
    parser.add_argument("--runner", choices=RUNNERS, default="packed", help="all but packed: padded batches")
    parser.add_argument("--order", choices=sorted(ORDERS), default="arrival", help="of the engine's queries")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--slots", type=int, default=256, help="requests that run at once")
    parser.add_argument("--token-budget", type=int, default=8192, help="tokens of one iteration")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall", help="cpu: on a shared machine")
    parser.add_argument("--peer", action="append", choices=sorted(PEERS), default=[])
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found = measure(options)
    if not options.json:
        print(f"mico {found['out_tok_s']} tokens/s, a full decode step {found['step_ms']} ms")
        for name, speed in found["peers"].items():
            ratio, same = found["ratio"][name], found["same_answers"][name]
            print(f"{name} {speed} tokens/s: mico is {ratio} times as fast, {same:.0%} same answers")
        for name, reason in found["failed"].items():
            print(f"{name} could not run: {reason}")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
