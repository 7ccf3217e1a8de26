"""Compare what replicated layers gain, by the published model and by the time of a step, with measured steps.

    python -m bench.studies.modules [--copies] [--layers 1,10,20,30,40]

The steps are those of the 8B shape on one H200 (stage 5, docs/decisions/gpu-stages.md). A replica that has
half the rows takes the measured step of half the rows; what scattering and gathering take is left out there,
and counted by the formula. `--copies` times layers of 605 MB, as LLaMA-13B has, copied on a device, from
pinned memory, and between two devices where there are two: it needs a GPU. Beside them stand the published
figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.support.module_scaling import (
    Holders,
    LayerCost,
    predicted_speedup,
    published_speedup,
    scale_up,
)

LAYERS = 32
STEP_MS = {2: 4.140, 8: 4.254, 16: 4.402, 32: 4.700, 64: 4.835, 96: 5.654, 128: 6.023, 192: 7.543, 256: 9.246}
"""A step of the 8B shape on one H200 by rows, at a context of 200 tokens."""
CONTEXT_TOKENS = 200
BODY_NUMBERS = 6_979_321_856
HEAD_NUMBERS = 4096 * 128_256
KV_TOKEN_BYTES = 131_072
BYTES_PER_S, FLOP_PER_S = 4.30e12, 652e12
"""Of copies, and reached in prefill, on the same card."""
SMALL_KERNELS_S = 0.42e-3
"""Of a step: what does not shrink with the rows."""
HOP_S = 25e-6
"""Assumed: of small copies between two devices in a graph; not measured."""
LAYER_BYTES = 605_000_000
PUBLISHED_COPY_S = {1: 0.30, 10: 0.36, 20: 0.38, 30: 0.49, 40: 0.89}
PUBLISHED_GAINS = {(30, 2): 4.3, (15, 2): 1.45, (20, 4): 2.64}
"""Throughput of LLaMA-13B with so many of its 40 layers so many times, against none."""
REPEATS = 5


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.modules", description=__doc__)
    parser.add_argument("--copies", action="store_true", help="time copies of layers; needs a GPU")
    parser.add_argument("--layers", default="1,10,20,30,40", help="how many are copied")
    options = parser.parse_args()
    report: dict[str, Any] = {"gains": gains(), "published": published()}
    if options.copies:
        report["copies"] = copies([int(each) for each in options.layers.split(",")])
    print(json.dumps(report))
    return 0


def cost_of_layer() -> tuple[LayerCost, float]:
    """Return the cost of a layer by sizes and rates, and the seconds of a step beside layers."""
    weights_s = 2 * BODY_NUMBERS / LAYERS / BYTES_PER_S
    row_s = 2 * BODY_NUMBERS / LAYERS / FLOP_PER_S
    kv_row_s = CONTEXT_TOKENS * KV_TOKEN_BYTES / LAYERS / BYTES_PER_S
    return LayerCost(weights_s, row_s, kv_row_s, HOP_S), SMALL_KERNELS_S + 2 * HEAD_NUMBERS / BYTES_PER_S


def measured_speedup(twice: int, rows: int) -> float:
    """Return the speed-up by measured steps, of which layers take equal parts; without hops."""
    share = twice / LAYERS
    return STEP_MS[rows] / ((1 - share) * STEP_MS[rows] + share * STEP_MS[rows // 2])


def gains() -> list[dict[str, float]]:
    """Print and return the gains of layers that are on two devices."""
    cost, rest_s = cost_of_layer()
    found = []
    print("8B on H200s, layers on two devices: published model, step's time, measured steps")
    for twice in (8, 16, 32):
        holders: Holders = scale_up((frozenset({0}),) * LAYERS, {1: twice})
        for rows in (16, 32, 64, 128, 256):
            one = {
                "layers": twice,
                "rows": rows,
                "published": round(published_speedup(holders), 3),
                "predicted": round(predicted_speedup(holders, rows, cost, rest_s), 3),
                "measured": round(measured_speedup(twice, rows), 3),
            }
            print(
                "  {layers:2} layers {rows:3} rows: {published:.2f} {predicted:.2f} {measured:.2f}".format(
                    **one
                )
            )
            found.append(one)
    for rows in (64, 128, 256):
        chosen = scale_up(
            (frozenset({0}),) * LAYERS,
            {1: LAYERS},
            partial(predicted_speedup, rows=rows, cost=cost, rest_s=rest_s),
        )
        print(f"  scale-up by the step's time, {rows} rows: {sum(len(each) > 1 for each in chosen)} layers")
    return found


def published() -> list[dict[str, float]]:
    """Print and return the published gains beside their model's."""
    found = []
    for (layers, times), gain in PUBLISHED_GAINS.items():
        holders = tuple(frozenset(range(times if at < layers else 1)) for at in range(40))
        model = round(published_speedup(holders), 2)
        print(
            f"LLaMA-13B, {layers} of 40 layers {times} times: published {gain:.2f}, by its model {model:.2f}"
        )
        found.append({"layers": layers, "times": times, "published": gain, "model": model})
    return found


def copies(counts: list[int]) -> list[dict[str, float]]:
    """Print and return the seconds in which layers are copied, the median of some."""
    import torch

    print(f"{torch.cuda.get_device_name(0)}, {torch.cuda.device_count()} devices, torch {torch.__version__}")
    here, there = torch.device("cuda:0"), torch.device("cuda:1")
    host = torch.empty(LAYER_BYTES, dtype=torch.uint8, pin_memory=True)
    source = torch.ones(LAYER_BYTES, dtype=torch.uint8, device=here)
    found = []
    for count in counts:
        one: dict[str, float] = {"layers": count, "published_s": PUBLISHED_COPY_S.get(count, float("nan"))}
        for name, what, to in (
            ("device", source, here),
            ("pinned", host, here),
            *([("neighbour", source, there)] if torch.cuda.device_count() > 1 else []),
        ):
            targets = [torch.empty(LAYER_BYTES, dtype=torch.uint8, device=to) for _ in range(count)]

            def copy(what: torch.Tensor = what, targets: list[torch.Tensor] = targets) -> None:
                for target in targets:
                    target.copy_(what, non_blocking=True)

            one[f"{name}_s"] = timed(copy, {here, to})
            if not all(
                bool((target[:: 1 << 20].cpu() == what[:: 1 << 20].cpu()).all()) for target in targets
            ):
                raise RuntimeError(f"{name}: a copy differs")
            del targets
        print("  ".join(f"{key} {value:.4g}" for key, value in one.items()), flush=True)
        found.append(one)
    return found


def timed(copy: Callable[[], None], devices: set[Any]) -> float:
    """Return the seconds of a copy once all devices have ended it, the median of some after a first one."""
    import time

    import torch

    def synchronize() -> None:
        for each in devices:
            torch.cuda.synchronize(each)

    taken = []
    for _ in range(REPEATS + 1):
        synchronize()
        began_s = time.perf_counter()
        copy()
        synchronize()
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken[1:])


if __name__ == "__main__":
    raise SystemExit(main())
