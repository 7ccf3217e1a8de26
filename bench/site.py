"""Measure a device that serves many applications of one base, in common batches and otherwise.

    python -m bench.site --model bench/models/qwen2.5-0.5b

The applications are tuned as those of BlockLLM (2024): fully, by LoRA, BitFit, prefix tuning and bottleneck
adapters, in equal shares; LoRA stands in for bottleneck adapters, which are refused here, and for BitFit
where the base has no biases. Three arrangements serve the same queries: all that share the base in common
batches; shared weights, but no batch common to two applications; a process for each, its adapter merged.
Fully tuned ones have an engine of their own in each. Engines take turns on the device, and all have room for
all their rows: what weights that are not shared cost in memory is not counted against them.

Up to 12 applications are real engines; the same and more are simulated: the engine's own scheduler over
iterations whose costs are measured first, or given by --costs. Ratios are held beside those that were
published for 3 to 30 applications. On a CPU they show that the benchmark runs, no more.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bench.support.adapter_demand import Asked, arrivals, zipf_queries
from bench.support.applications import Engines, Kind, Place, Sizes
from bench.support.claims import Claims, quantile
from bench.support.device_demand import (
    CountedDevice,
    CountedMember,
    Member,
    RealDevice,
    Serve,
    Served,
    StepCost,
    real,
    serve,
)
from bench.support.variant_engines import BASE, Query, decode
from bench.support.variant_engines import serve as answer
from site_engine.process_settings import set_up_process

TOGETHER, APART, ALONE = "common batches", "shared parameters", "process per model"
PUBLISHED = {3: 1.35, 6: 1.50, 9: 2.01, 12: 2.26, 20: 1.71, 30: 1.85}
"""Throughput beside a process for each model, by applications (BlockLLM, 2024)."""
PUBLISHED_SHARED, PUBLISHED_P95 = {20: 1.46}, {20: 0.665, 30: 0.626}
"""Throughput beside shared parameters, and p95 latency beside a process for each model."""
OF_CAPACITY = 0.8  # of a process per model, at which latencies are measured
AGREES = 0.10  # of simulated with real throughput
ANY_VOCABULARY = 1000

Arrangement = dict[str, tuple[Member, str]]


class Bench(Claims):
    """Serves the demand of some applications in each arrangement; keeps the claims."""

    def __init__(self, asked: argparse.Namespace) -> None:
        super().__init__()
        self.asked = asked
        self.vocab_size = ANY_VOCABULARY  # until there is a model

    def queries(self, names: Sequence[str], seed: int) -> list[Asked]:
        limits = {"vocab_size": self.vocab_size, "context_tokens": self.asked.context_tokens}
        count = self.asked.queries * len(names)
        return zipf_queries(names, count, self.asked.zipf, **limits, seed=seed)

    def compare(
        self,
        names: Sequence[str],
        made: Callable[[str], Serve],
    ) -> dict[str, Served]:
        """Serve all queries at once, then as they come at a rate that all can bear, in each arrangement."""
        asked, at_once = self.queries(names, 1), dict[str, Served]()
        for arrangement in (TOGETHER, APART, ALONE):
            run = made(arrangement)
            run(self.queries(names, 2)[: len(asked) // 2], [0.0] * len(asked))  # not counted
            at_once[arrangement] = run(asked, [0.0] * len(asked))
        per_s = OF_CAPACITY * len(asked) / at_once[ALONE].seconds
        due_s = arrivals(len(asked), per_s)
        paced = {each: made(each)(asked, due_s) for each in at_once}
        p95_s = {each: quantile(one.latency_s, 0.95) for each, one in paced.items()}
        for each, one in at_once.items():
            self.log(applications=len(names), arrangement=each, tokens_per_s=round(one.tokens_per_s, 1),
                     queries_per_s=round(per_s, 2), p95_s=round(p95_s[each], 4),
                     p50_s=round(quantile(paced[each].latency_s, 0.5), 4))  # fmt: skip
        self.hold(len(names), at_once, p95_s)
        return at_once

    def hold(self, count: int, at_once: dict[str, Served], p95_s: dict[str, float]) -> None:
        """Claim what was published for so many applications."""
        ours = at_once[TOGETHER].tokens_per_s
        for other, published in ((ALONE, PUBLISHED), (APART, PUBLISHED_SHARED)):
            times = ours / at_once[other].tokens_per_s
            self.log(applications=count, times_the_tokens_of=other, value=round(times, 3))
            if count in published:
                self.claim(f"{count}: times the tokens/s of {other}", times, published[count], at_least=True)
        share = p95_s[TOGETHER] / p95_s[ALONE]
        self.log(applications=count, p95_of=ALONE, value=round(share, 3))
        if count in PUBLISHED_P95:
            self.claim(f"{count}: p95 of {ALONE}", share, PUBLISHED_P95[count], at_least=False)

    def real(self, places: dict[str, dict[str, Place]], count: int) -> dict[str, Served]:
        """Serve so many applications by engines; in float32 the arrangements must answer alike."""
        names = list(places[TOGETHER])[:count]

        def made(arrangement: str) -> Serve:
            members = real({name: places[arrangement][name] for name in names})
            return lambda asked, due_s: serve(members, asked, due_s, RealDevice())

        found = self.compare(names, made)
        pairs = zip(*(found[each].answers for each in (TOGETHER, APART, ALONE)), strict=True)
        same = sum(one == other == third for one, other, third in pairs)
        total = len(found[TOGETHER].answers)
        self.log(applications=count, same_answers=f"{same} of {total}")
        if self.asked.device != "cuda":
            self.claim(f"{count}: share of equal answers", same / total, 1.0, at_least=True)
        return found

    def simulated(self, cost: StepCost, kinds: dict[str, Kind]) -> dict[str, Served]:
        """Serve as many applications by counted iterations."""
        rows, kv_tokens = self.asked.rows, (self.asked.rows + 2) * (self.asked.context_tokens + 36)
        adapted = {name for name, kind in kinds.items() if kind not in {Kind.FULL, Kind.PREFIX}}

        def made(arrangement: str) -> Serve:
            def run(asked: Sequence[Asked], due_s: Sequence[float]) -> Served:
                device = CountedDevice()
                with_adapters = () if arrangement == ALONE else adapted

                def member() -> Member:
                    return CountedMember(device, cost, with_adapters, rows, kv_tokens)

                shared = member()
                together = {name: shared for name, kind in kinds.items() if kind is not Kind.FULL}
                kept = together if arrangement == TOGETHER else {}
                members: Arrangement = {name: (kept.get(name) or member(), name) for name in kinds}
                return serve(members, asked, due_s, device)

            return run

        return self.compare(list(kinds), made)


def measured_cost(engines: Engines, rows: Sequence[int], steps: int) -> StepCost:
    """Measure steps of rows of the base, of one adapter and of all, and prompts."""
    adapted = [one.name for one in engines.applications if one.kind not in {Kind.FULL, Kind.PREFIX}]

    def prompt(seed: int) -> list[int]:
        return [10 + (seed * 7919 + at) % (engines.base.vocab_size - 10) for at in range(128)]

    def median_s(chains: Sequence[str], count: int) -> float:
        work = [Query(chains[at % len(chains)], prompt(1000 * count + at)) for at in range(count)]
        decode(engines.shared, work, 4)
        return statistics.median(decode(engines.shared, work, steps))

    base = {count: median_s([BASE], count) for count in rows}
    slope, intercept = statistics.linear_regression(list(base), list(base.values()))
    most = rows[-1]
    one = median_s(adapted[:1], most) - base[most]
    every = median_s(adapted, most) - base[most]
    spread = (every - one) / max(1, min(len(adapted), most) - 1)
    answer(engines.shared, [Query(BASE, prompt(at)) for at in range(most)], 1)
    took_s, _ = answer(engines.shared, [Query(BASE, prompt(90 + at)) for at in range(most)], 1)
    each_adapter = max(0.0, spread)
    return StepCost(
        max(0.0, intercept),
        max(0.0, slope),
        took_s / (most * 128),
        max(0.0, one - each_adapter),
        each_adapter,
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.site",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="folder of a model, or of a config.json alone")
    parser.add_argument("--real", default="3,6,9,12", help="numbers of applications that engines serve")
    parser.add_argument("--simulated", default="3,6,9,12,20,30", help="numbers that are simulated")
    parser.add_argument("--costs", help="JSON of the costs of an iteration, instead of measuring them")
    parser.add_argument("--rows", type=int, default=64, help="of each engine that decode at once")
    parser.add_argument("--queries", type=int, default=24, help="for each application")
    parser.add_argument("--zipf", type=float, default=1.0, help="demand falls with the rank to this power")
    parser.add_argument("--steps", type=int, default=24, help="of which the median is a cost")
    parser.add_argument("--context-tokens", type=int, default=512, help="of a prompt and its answer")
    parser.add_argument("--seconds", type=float, default=1e9, help="no part begins after so many")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each]


def main() -> int:
    asked = arguments()
    set_up_process()  # as the process of an engine does
    bench = Bench(asked)
    name = torch.cuda.get_device_name() if asked.device == "cuda" else platform.processor() or "CPU"
    cost = StepCost(**json.loads(asked.costs)) if asked.costs else None
    found: dict[int, dict[str, Served]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        most = max(numbers(asked.real), default=0)
        if most:
            sizes = Sizes(asked.rows, asked.context_tokens)
            engines = Engines(asked.model, asked.device, Path(temporary), most, sizes)
            bench.vocab_size = engines.base.vocab_size
            kinds = {each.name: each.kind for each in engines.applications}
            bench.log(model=asked.model, device=name, torch=torch.__version__, kinds=kinds,
                      base_bytes=engines.weight_bytes)  # fmt: skip
            rows = sorted({1, max(2, asked.rows // 8), max(2, asked.rows // 2)})
            cost = cost or measured_cost(engines, rows, asked.steps)
            places = {TOGETHER: engines.together(), APART: engines.apart(), ALONE: engines.alone()}
            bench.log(engines={name: len({id(each.engine) for each in made.values()})
                               for name, made in places.items()})  # fmt: skip
            for count in numbers(asked.real):
                if bench.seconds > asked.seconds:
                    bench.log(applications=count, error="no time")
                    continue
                found[count] = bench.real(places, count)
    if cost is None:
        raise SystemExit("without engines the costs of an iteration come from --costs")
    bench.log(costs=cost._asdict())
    for count in numbers(asked.simulated):
        kinds = {f"application-{at}": list(Kind)[at % len(Kind)] for at in range(count)}
        simulated = bench.simulated(cost, kinds)
        for arrangement, one in found.get(count, {}).items():
            off = abs(simulated[arrangement].tokens_per_s / one.tokens_per_s - 1)
            what = f"{count}: simulated tokens/s of {arrangement}, off by"
            bench.claim(what, off, AGREES, at_least=False)
    print(json.dumps({"claims": [{**each._asdict(), "held": each.held} for each in bench.claims]}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
