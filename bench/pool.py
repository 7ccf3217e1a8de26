"""Move requests between the GPUs of a site, and lose one of them under load.

    python -m bench.pool --devices cuda:0,cuda:1 --shape bench/models/llama-3.1-8b --do moves,loss

Engine processes as a site starts them, one for each device, with random weights. `moves`: greedy answers to
prompts of `--prompt` tokens, of which one after another moves to the other device until there were
`--moves`; how long a stream pauses, in steps of its own, with the five longest pauses and which moves these
were. `loss`: the process of one device is killed while `--streams` answers run; the longest silence of
those that it had. Each answer must have all of its tokens, and each token must be the best or nearly so
where the engine is given all before it: the largest gap to the best logit is compared with that of answers
that nobody disturbed. `--miniature` takes tiny models, for a CPU: `--devices cpu,cpu`. Exit status 1 if an
answer is wrong. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import statistics
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from bench.ranks import MINIATURE, Engine, engine, requests
from bench.support.random_folder import random_folder
from site_engine.core.request import Moved, Request, Sampling
from site_engine.engine.process_answer import Answer
from site_engine.engine.process_client import AdmissionReply
from site_engine.pool.pool import EnginePool
from tests.support.engine_models import tokenizer

SETTLED_TOKENS = 16
"""Of every request before anything happens to it."""
GAP = 2.0
"""Times the largest gap of undisturbed answers that one of the others may have."""
SMALLEST_GAP = 1e-3


async def begun(on: Engine, asked: Sequence[Request]) -> asyncio.Task[float]:
    """Ask, and return once all requests run."""
    asking = asyncio.create_task(on.ask(asked))
    while any(len(on.answers.tokens.get(each.id, ())) < SETTLED_TOKENS for each in asked):
        if asking.done():
            asking.result()
        await asyncio.sleep(0.001)
    return asking


def whole(on: Engine, asked: Sequence[Request]) -> bool:
    return all(len(on.answers.tokens[each.id]) == each.sampling.max_tokens for each in asked)


async def gaps(on: Engine, asked: Sequence[Request]) -> list[float]:
    """Give the engine answers as prompts; return by how much a better token than each was preferred."""
    rules = Sampling(max_tokens=1, temperature=0.0, logprobs=1, prompt_logprobs=True, ignore_eos=True)
    found = []
    for each in asked:
        tokens = on.answers.tokens[each.id]
        forced = Request(f"forced {each.id}", (*each.prompt, *tokens), rules, tenant=f"forced {each.id}")
        await on.ask([forced])
        told = on.answers.prompt_logprobs[forced.id][-len(tokens) :]
        found += [max(one.logprob for one in (*of.top, of)) - of.logprob for of in told]
    return found


def note_computed(pool: EnginePool) -> list[int]:
    """Return the list to which the tokens are added that come over with each request that moves."""
    found: list[int] = []

    def noting(place: Callable[..., None]) -> Callable[..., None]:
        def noted(answers: Sequence[Answer], reply: AdmissionReply, moved: Moved | None = None) -> None:
            if moved is not None:
                found.append(moved.computed)
            place(answers, reply, moved)

        return noted

    for each in pool._replicas:
        process: Any = each.process
        process.place = noting(process.place)
    return found


class Move(NamedTuple):
    """Which move it was, and when it was asked for and had come over."""

    request_id: str
    number: int
    asked_s: float
    came_s: float


async def move_while(
    asking: asyncio.Task[float],
    pool: EnginePool,
    names: Sequence[str],
    options: argparse.Namespace,
    before: int,
) -> list[Move]:
    """Move one request after another until all have ended or there were enough; `before`: moves."""
    draw, found = random.Random(before), list[Move]()
    while not asking.done():
        running = [name for name in names if pool.requests.where(name) is not None]
        if running and before + len(found) < options.moves:
            name = draw.choice(running)
            source = pool.requests.where(name)
            target = draw.choice([place for place in pool.pids if place != source])
            asked_s = time.perf_counter()
            if pool.requests.move(name, target):
                while pool.requests.is_moving(name):  # noqa: ASYNC110 - nothing reports it
                    await asyncio.sleep(0.0005)
                if pool.requests.where(name) == target:
                    found.append(Move(name, before + len(found) + 1, asked_s, time.perf_counter()))
        await asyncio.sleep(options.every_s)
    return found


def pause_steps(move: Move, times: Sequence[float], usual_s: float) -> float:
    """Return by how many usual times without a token the longest during a move is longer than a usual one."""
    first, last = bisect_right(times, move.asked_s), bisect_right(times, move.came_s)
    longest_s = max(later - sooner for sooner, later in pairwise(times[first - 1 : last + 1]))
    return (longest_s - usual_s) / usual_s


async def moves(on: Engine, options: argparse.Namespace) -> dict[str, Any]:
    pool, vocabulary = on.pool, on.facts.vocab_size
    alone = requests("alone", options.rows, options.prompt, options.tokens, vocabulary)
    await on.ask(alone)
    pauses: list[tuple[float, int]] = []  # in steps, and which move it was
    computed = note_computed(pool)
    rounds, others = 0, list[Request]()
    while len(pauses) < options.moves:
        others = requests(f"moved {rounds}", options.rows, options.prompt, options.tokens, vocabulary)
        rounds += 1
        asking = await begun(on, others)
        moved = await move_while(asking, pool, [each.id for each in others], options, len(pauses))
        await asking
        for each in moved:
            times = [at_s for at_s, _ in on.answers.times[each.request_id]]
            usual_s = statistics.median(later - sooner for sooner, later in pairwise(times))
            pauses.append((pause_steps(each, times, usual_s), each.number))
        print(f"{len(pauses)} moves, {computed.count(0)} without keys and values", flush=True)
    if not whole(on, others):
        raise RuntimeError("an answer has too few or too many tokens")
    undisturbed, disturbed = await gaps(on, alone), await gaps(on, others)
    pauses.sort()
    return {
        "moves": len(pauses),
        "came_over": len(computed),
        "computed_again": computed.count(0),
        "step_ms": round(1e3 * usual_s, 3),
        "pause_steps_p50": round(statistics.median(each for each, _ in pauses), 2),
        "pause_steps_p90": round(pauses[int(0.9 * len(pauses))][0], 2),
        "pause_steps_most": [(round(each, 2), number) for each, number in pauses[:-6:-1]],
        "gap_undisturbed": round(max(undisturbed), 4),
        "gap_moved": round(max(disturbed), 4),
        "wrong": max(disturbed) > max(GAP * max(undisturbed), SMALLEST_GAP),
    }


async def loss(on: Engine, options: argparse.Namespace) -> dict[str, Any]:
    """Kill the process of the last device while streams run."""
    pool = on.pool
    for name in ("warm", "lost"):
        asked = requests(name, options.streams, options.short_prompt, options.tokens, on.facts.vocab_size)
        asking = await begun(on, asked)
        if name == "warm":
            await asking
    place, pid = max(pool.pids.items())
    orphans = [each for each in asked if pool.requests.where(each.id) == place]
    killed_s = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    await asking
    silences = []
    for each in orphans:
        times = [at_s for at_s, _ in on.answers.times[each.id]]
        silences += [later - sooner for sooner, later in pairwise(times) if later > killed_s]
    kept = [each for each in asked if each not in orphans]
    undisturbed = await gaps(on, kept[: options.forced])
    disturbed = await gaps(on, orphans[: options.forced])
    return {
        "streams": len(asked),
        "of_the_killed": len(orphans),
        "longest_silence_s": round(max(silences), 3),
        "whole": whole(on, asked),
        "gap_undisturbed": round(max(undisturbed), 4),
        "gap_gone_on": round(max(disturbed), 4),
        "wrong": not whole(on, asked) or max(disturbed) > max(GAP * max(undisturbed), SMALLEST_GAP),
    }


WORK = {"moves": moves, "loss": loss}


async def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    devices = options.devices.split(",")
    config = transformers.AutoConfig.from_pretrained(options.shape)
    for key, value in (MINIATURE if options.miniature else {}).items():
        setattr(config, key, value)
    dtype = torch.float32 if devices[0] == "cpu" else torch.bfloat16
    size = random_folder(scratch, config, tokenizer(), dtype, layers_alike=devices[0] != "cpu")
    print(f"{size / 1e9:.2f} GB of weights", flush=True)
    found: dict[str, Any] = {}
    async with engine(scratch, devices) as on:
        print(f"ready after {on.start_s:.1f} s", flush=True)
        for name in options.do.split(","):
            found[name] = await WORK[name](on, options)
            print(f"{name}: {json.dumps(found[name])}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.pool",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--devices", default="cuda:0,cuda:1")
    parser.add_argument("--shape", default="bench/models/llama-3.1-8b", help="a folder with a config.json")
    parser.add_argument("--do", default=",".join(WORK))
    parser.add_argument("--miniature", action="store_true")
    parser.add_argument("--moves", type=int, default=200)
    parser.add_argument("--every-s", type=float, default=0.05, help="between two moves")
    parser.add_argument("--rows", type=int, default=8, help="requests that move")
    parser.add_argument("--prompt", type=int, default=1800, help="tokens of theirs")
    parser.add_argument("--tokens", type=int, default=400, help="of each answer")
    parser.add_argument("--streams", type=int, default=256, help="while a process is killed")
    parser.add_argument("--short-prompt", type=int, default=200, help="tokens of theirs")
    parser.add_argument("--forced", type=int, default=16, help="answers whose tokens are compared")
    options = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} CPUs, {torch.cuda.device_count()} GPUs, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )
    with tempfile.TemporaryDirectory(prefix="mico-pool-") as scratch:
        found = asyncio.run(measure(options, Path(scratch)))
    print(json.dumps(found))
    return 1 if any(each["wrong"] for each in found.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
