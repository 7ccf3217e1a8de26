"""Measure whether prompts on some of a GPU's processors, beside decode graphs, end sooner than in turn.

`python -m bench.studies.overlap_gate --model bench/models/llama-3.1-8b` runs decode graphs (256 rows of 400
tokens, 96 of 8,000) without a pause while prompts of 2,048 tokens run on a stream of a green context with 20
to 60% of the processors, and on a low-priority stream that has all. Printed for each: the speed of both, in
parts of their speed alone, and `saved`, the part of the time in turn that is saved where both always have
work. The gate: `saved` of at least 0.12. Weights are random. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from bench.engine_gpu import plain_model
from bench.support.forced import GREEDY, device_runner
from bench.support.gpu_costs import seconds
from site_engine.core.request import Request
from site_engine.core.schedule_plan import ScheduledChunk, SchedulePlan
from site_engine.cuda.cuda_graph import Step
from site_engine.cuda.forward import fast_forward
from site_engine.engine.build import overlapped_engine
from site_engine.engine.engine import SiteEngine
from site_engine.engine.settings import EngineSettings
from site_engine.model.loader import from_model

PROMPT_TOKENS = 2048
SHAPES = ((256, 400), (96, 8000))  # rows, tokens of context
PARTS = (0.2, 0.3, 0.4, 0.5, 0.6)
GATE = 0.12
AHEAD = 2  # runs that a stream is given before the first has ended


class Prepared(NamedTuple):
    """A step that can run any number of times, and what it holds."""

    step: Step
    requests: list[Request]


def prepared(engine: SiteEngine, rows: list[int], lengths: list[int], *, prompts: bool) -> Prepared:
    """Load a step of one decode or one whole prompt a row."""
    requests = []
    for row, tokens in zip(rows, lengths, strict=True):
        request = Request(f"gate {row}", [11 + at % 30_000 for at in range(tokens)], GREEDY)
        request.row, request.pages = row, engine._pool.take(engine._pool.pages_for(tokens)) or []
        assert request.pages
        requests.append(request)
    if prompts:
        chunks = [ScheduledChunk(each, 0, len(each.tokens), True) for each in requests]
        plan = SchedulePlan([], chunks)
    else:
        plan = SchedulePlan([ScheduledChunk(each, len(each.tokens) - 1, 1, True) for each in requests])
    step, _, _ = device_runner(engine)._start(plan)
    torch.cuda.synchronize()
    return Prepared(step, requests)


def checked(answer: tuple[Any, ...]) -> Any:
    error, *values = answer
    if int(error):
        raise RuntimeError(str(error))
    return values[0] if len(values) == 1 else values


def capped_stream(processors: int) -> tuple[torch.cuda.Stream, int]:
    """Return a stream whose kernels run on so many processors, or a few more, and their number."""
    driver = importlib.import_module("cuda.bindings.driver")  # where PyTorch has CUDA
    device = checked(driver.cuDeviceGet(torch.cuda.current_device()))
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = checked(driver.cuDeviceGetDevResource(device, kind))
    groups, _, _ = checked(driver.cuDevSmResourceSplitByCount(1, whole, 0, processors))
    description = checked(driver.cuDevResourceGenerateDesc([groups[0]], 1))
    flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    context = checked(driver.cuGreenCtxCreate(description, device, flags))
    handle = checked(driver.cuGreenCtxStreamCreate(context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0))
    return torch.cuda.ExternalStream(int(handle)), int(groups[0].sm.smCount)


def rate(step: Step, stream: torch.cuda.Stream, ends: Callable[[int], bool]) -> tuple[int, float]:
    """Run a step again and again; return how many runs ended, and in how many seconds."""
    waiting: list[torch.cuda.Event] = []
    began, ended = seconds(), 0
    with torch.cuda.stream(stream), torch.no_grad():
        while not ends(ended):
            step.run()
            waiting.append(torch.cuda.Event())
            waiting[-1].record(stream)
            if len(waiting) > AHEAD:
                waiting.pop(0).synchronize()
                ended += 1
        took_s = seconds() - began
        stream.synchronize()
    return ended, took_s


def alone(step: Step, stream: torch.cuda.Stream, for_s: float) -> float:
    """Return the runs of a step a second with nothing beside it."""
    until = seconds() + for_s
    count, took_s = rate(step, stream, lambda _: seconds() >= until)
    return count / took_s


def together(
    decode: Step, prompt: Step, streams: tuple[torch.cuda.Stream, torch.cuda.Stream], for_s: float
) -> tuple[float, float]:
    """Return the runs of both a second while both run all the time."""
    found: list[tuple[int, float]] = []
    until = seconds() + for_s
    beside = threading.Thread(
        target=lambda: found.append(rate(prompt, streams[1], lambda _: seconds() >= until))
    )
    beside.start()
    count, took_s = rate(decode, streams[0], lambda _: seconds() >= until)
    beside.join()
    return count / took_s, found[0][0] / found[0][1]


def measure(engine: SiteEngine, for_s: float) -> list[dict[str, Any]]:
    ours, found = torch.cuda.Stream(priority=-1), list[dict[str, Any]]()
    processors = torch.cuda.get_device_properties().multi_processor_count
    streams = {f"{part:.0%} of processors": capped_stream(round(part * processors)) for part in PARTS}
    streams["all, low priority"] = (torch.cuda.Stream(priority=0), processors)
    for rows, context in SHAPES:
        decode = prepared(engine, list(range(rows)), [context] * rows, prompts=False)
        prompt = prepared(engine, [rows], [PROMPT_TOKENS], prompts=True)
        for step in (decode.step, prompt.step):
            alone(step, ours, 0.3)
        decodes_s, prompts_s = alone(decode.step, ours, for_s), alone(prompt.step, ours, for_s)
        for name, (stream, count) in streams.items():
            capped_s = alone(prompt.step, stream, for_s / 2)
            both = together(decode.step, prompt.step, (ours, stream), for_s)
            speeds = both[0] / decodes_s, both[1] / prompts_s
            found.append(
                {
                    "rows": rows, "context": context, "prompts": name, "processors": count,
                    "decode_ms": round(1e3 / decodes_s, 3), "prompt_ms": round(1e3 / prompts_s, 3),
                    "prompt_capped_ms": round(1e3 / capped_s, 3),
                    "decode_speed": round(speeds[0], 3), "prompt_speed": round(speeds[1], 3),
                    "saved": round(1 - 1 / sum(speeds), 3),
                }
            )  # fmt: skip
            print(found[-1], flush=True)
        for request in (*decode.requests, *prompt.requests):
            engine._pool.drop(request.pages)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.overlap_gate", description=__doc__)
    parser.add_argument("--model", required=True, help="folder with a configuration; weights are random")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each measurement")
    asked, began = parser.parse_args(), seconds()
    most = max(rows * (context + 16) for rows, context in SHAPES) + 2 * PROMPT_TOKENS
    model = from_model(plain_model(asked.model), eos_token_ids=())
    settings = EngineSettings(slots=257, kv_tokens=most)
    engine = overlapped_engine(model, settings, seconds, fast_forward(model))
    print(f"{torch.cuda.get_device_name()}, ready after {seconds() - began:.0f} s", flush=True)
    found = measure(engine, asked.seconds)
    best = {f"{rows} x {context}": max(each["saved"] for each in found if each["rows"] == rows)
            for rows, context in SHAPES}  # fmt: skip
    held = all(saved >= GATE for saved in best.values())
    print(json.dumps({"gate": GATE, "held": held, "most_saved": best, "runs": found}))


if __name__ == "__main__":
    with torch.no_grad():
        main()
