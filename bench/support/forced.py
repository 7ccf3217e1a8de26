"""Teacher forcing: compare the logits of a device's engine with those of the model in transformers."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch

from site_engine.core.request import Request, Sampling
from site_engine.core.schedule_plan import ScheduledChunk, SchedulePlan
from site_engine.cuda.runner import DeviceRunner
from site_engine.engine.engine import SiteEngine

GREEDY = Sampling(temperature=0.0)
CHECKED_ROWS = 24
CHECKED_STEPS = 6


class Forced(NamedTuple):
    """Sequences, and the plain model's logits [places, vocabulary] at the end of each."""

    sequences: list[list[int]]
    logits: list[torch.Tensor]


def force_plain(model: Any, vocab_size: int) -> Forced:
    rnd = random.Random(5)
    sequences = [
        [
            rnd.randrange(10, vocab_size - 300)
            for _ in range(rnd.choice((3, 40, 161, 300, 700)) + CHECKED_STEPS)
        ]
        for _ in range(CHECKED_ROWS)
    ]
    with torch.no_grad():
        logits = [
            model(input_ids=torch.tensor([ids], device="cuda"), use_cache=False).logits[
                0, -CHECKED_STEPS - 1 : -1
            ]
            for ids in sequences
        ]
    return Forced(sequences, logits)


def device_runner(engine: SiteEngine) -> DeviceRunner:
    """Return the runner of an engine on a GPU."""
    assert isinstance(engine.runner, DeviceRunner)
    return engine.runner


def check(engine: SiteEngine, forced: Forced) -> str:
    """Run prompts packed and the rest token by token through graphs, and compare with the plain model's
    logits.
    """
    requests = []
    for row, ids in enumerate(forced.sequences):
        request = Request(f"check {row}", ids, GREEDY)
        request.row, request.pages = row, engine._pool.take(engine._pool.pages_for(len(ids))) or []
        requests.append(request)
    runner = device_runner(engine)
    found: list[list[torch.Tensor]] = [[] for _ in requests]
    prompts = [len(ids) - CHECKED_STEPS for ids in forced.sequences]
    half = CHECKED_ROWS // 2
    later = range(half, CHECKED_ROWS)
    whole = [ScheduledChunk(requests[i], 0, prompts[i], True) for i in range(half)]
    first = [ScheduledChunk(requests[i], 0, prompts[i] // 2, False) for i in later]
    second = [ScheduledChunk(requests[i], prompts[i] // 2, -(-prompts[i] // 2), True) for i in later]
    plans = [SchedulePlan([], chunks) for chunks in (whole, first, second)]
    plans += [
        SchedulePlan(
            [ScheduledChunk(request, prompts[i] + step, 1, True) for i, request in enumerate(requests)]
        )
        for step in range(CHECKED_STEPS - 1)
    ]
    for plan in plans:
        logits = runner.run(plan)
        for at, request in enumerate(logits.sampled):
            found[request.row].append(logits.rows[at].clone())
    for request in requests:
        engine._pool.drop(request.pages)
    return _agreement(torch.cat([torch.stack(one) for one in found]), torch.cat(forced.logits))


def _agreement(found: torch.Tensor, wanted: torch.Tensor) -> str:
    found, wanted = found.float(), wanted.float()
    off = (found - wanted).norm() / wanted.norm()
    tolerance = 2 * float(
        (found - wanted).abs().quantile(0.999)
        if found.numel() < 1e7
        else (found - wanted).abs()[:, ::97].flatten().quantile(0.999)
    )
    best = wanted.topk(2, dim=-1).values
    clear = (best[:, 0] - best[:, 1]) > tolerance
    same = found.argmax(-1) == wanted.argmax(-1)
    verdict = "right" if bool(same[clear].all()) and bool(torch.isfinite(found).all()) else "WRONG"
    return (
        f"CHECK {verdict}: {int(same[clear].sum())} of {int(clear.sum())} with a margin over {tolerance:.3f} "
        f"agree, {int(same.sum())} of {len(same)} in all; relative error {float(off):.2e}"
    )
