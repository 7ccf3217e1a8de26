"""Measure bases that sleep with their weights in memory: wake to first token, and bursts in turn.

    python -m bench.wake --devices cuda:0 --shape bench/models/llama-3.1-8b --bases 4 --awake 2

Engine processes as a site starts them, one for each base, on the devices in turn, with random weights.
`wake`: one base sleeps and wakes `--turns` times; from the order to wake until the first token of a query,
the memory of the device that sleep frees, and whether greedy answers are the same tokens as before. `bursts`:
queries for one base after another, all of a burst at once; with all bases resident, then with `--awake` of
them, where the base that was used longest ago sleeps before the next wakes, which counts as waiting. `kept`:
`--awake` of the bases answer `--many` queries each, more than their own keys and values have room for, while
the others sleep, and once more while one of these wakes. `lent`: the same with `share_sleeping_memory`.
`disk`: the wake of `wake` with `sleep = "disk"`. `--miniature` takes tiny models, for a CPU. Exit status 1
if an answer is wrong or short. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.ranks import MINIATURE, WITHIN_S, Engine, engine, requests
from bench.support.random_folder import random_folder
from site_engine.core.request import Request
from site_engine.pool.lending import LOOK_EVERY_S
from tests.support.engine_models import tokenizer

TOKENS = 32
"""Of each answer."""


async def turned(turn: Callable[[Callable[[str], None]], None]) -> float:
    """Sleep or wake, and return the seconds that it took. Raises RuntimeError with the reason why not."""
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    began_s = time.perf_counter()
    turn(answer.set_result)
    if refusal := await answer:
        raise RuntimeError(refusal)
    return time.perf_counter() - began_s


def free_bytes(devices: str) -> int:
    """Return the free memory of the first device."""
    device = devices.split(",", maxsplit=1)[0]
    if device == "cpu":
        return 0
    torch.cuda.synchronize(device)
    return int(torch.cuda.mem_get_info(device)[0])


def first_s(on: Engine, asked: Sequence[Request], since_s: float) -> list[float]:
    return [on.answers.times[each.id][0][0] - since_s for each in asked]


def p95(values: Sequence[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))]


async def greedy_answers(on: Engine, name: str, options: argparse.Namespace) -> list[list[int]]:
    """Ask the same queries, one after the other so that steps have the same rows, as a tenant of that name,
    which finds no prefix of another's; return the tokens of the answers.
    """
    asked = [
        Request(f"{each.id} {name}", each.prompt, each.sampling, tenant=name)
        for each in requests("same", 8, options.prompt, TOKENS, on.facts.vocab_size)
    ]
    for each in asked:
        await on.ask([each])
    return [on.answers.tokens[each.id] for each in asked]


def differ(some: list[list[int]], others: list[list[int]]) -> int:
    return sum(one != other for one, other in zip(some, others, strict=True))


async def wake(on: Engine, options: argparse.Namespace) -> dict[str, Any]:
    """Let one base sleep and wake, and ask it the same each time."""
    wanted = await greedy_answers(on, "before", options)
    found: dict[str, Any] = {"sleep_s": [], "wake_s": [], "first_token_s": [], "freed_gb": []}
    found |= {"wrong_without_sleep": differ(wanted, await greedy_answers(on, "control", options)), "wrong": 0}
    for turn in range(options.turns):
        before = free_bytes(options.devices)
        found["sleep_s"].append(round(await turned(on.pool.sleeping.sleep), 3))
        found["freed_gb"].append(round((free_bytes(options.devices) - before) / 1e9, 2))
        began_s = time.perf_counter()
        found["wake_s"].append(round(await turned(on.pool.sleeping.wake), 3))
        asked = requests(f"first {turn}", 1, options.prompt, TOKENS, on.facts.vocab_size)
        await on.ask(asked)
        found["first_token_s"].append(round(first_s(on, asked, began_s)[0], 3))
        found["wrong"] += differ(wanted, await greedy_answers(on, f"after {turn}", options))
    return found


async def bursts(
    bases: Sequence[Engine], options: argparse.Namespace, name: str, ready: Callable[[int], Awaitable[None]]
) -> dict[str, float]:
    """Ask one base after another; `ready` sees to it that one is awake. Return seconds to first tokens."""
    waits: list[float] = []
    began_s = time.perf_counter()
    for burst in range(options.bursts):
        at = burst % len(bases)
        asked = requests(
            f"{name} {burst}", options.requests, options.prompt, TOKENS, bases[at].facts.vocab_size
        )
        arrived_s = time.perf_counter()
        await ready(at)
        await bases[at].ask(asked)
        waits += first_s(bases[at], asked, arrived_s)
    return {
        "p50_s": round(statistics.median(waits), 3),
        "p95_s": round(p95(waits), 3),
        "most_s": round(max(waits), 3),
        "took_s": round(time.perf_counter() - began_s, 1),
    }


async def alternate(bases: Sequence[Engine], options: argparse.Namespace) -> dict[str, Any]:
    """Play bursts with all bases resident, then with some of them asleep."""

    async def nothing(at: int) -> None:
        pass

    awake = list(range(len(bases)))  # the one used longest ago first
    asleep_s: list[float] = []

    async def make_room(at: int) -> None:
        if at in awake:
            awake.remove(at)
        else:
            if len(awake) >= options.awake:
                await turned(bases[awake.pop(0)].pool.sleeping.sleep)
            asleep_s.append(await turned(bases[at].pool.sleeping.wake))
        awake.append(at)

    found: dict[str, Any] = {}
    await bursts(bases, options, "warm", nothing)
    found["resident"] = await bursts(bases, options, "resident", nothing)
    found["first_sleep_s"] = []
    for each in awake[options.awake :]:
        found["first_sleep_s"].append(round(await turned(bases[each].pool.sleeping.sleep), 3))
    del awake[options.awake :]
    for at in list(awake):  # whose first sleep makes the copy
        found["first_sleep_s"].append(round(await turned(bases[at].pool.sleeping.sleep), 3))
        await turned(bases[at].pool.sleeping.wake)
    found["asleep"] = await bursts(bases, options, "asleep", make_room)
    found["wakes"] = len(asleep_s)
    found["wake_p50_s"] = round(statistics.median(asleep_s), 3)
    return found


async def extra_tokens(on: Engine) -> int:
    """Return the tokens for which an engine has memory of others."""
    on.core.request_load()
    await asyncio.sleep(1.0)
    return on.load.figures.kv_extra_tokens if on.load else 0


async def crowded(bases: Sequence[Engine], options: argparse.Namespace, which: str) -> dict[str, Any]:
    """Let some of the bases sleep while the others are asked for more than their own memory holds."""
    awake, asleep = bases[: options.awake], bases[options.awake :]
    for each in asleep:
        await turned(each.pool.sleeping.sleep)
    if which == "lent":
        await asyncio.sleep(3 * LOOK_EVERY_S)
    found: dict[str, Any] = {"extra_tokens": [await extra_tokens(each) for each in awake]}
    print(f"{which}: {len(asleep)} asleep, {json.dumps(found)}", flush=True)
    waking: asyncio.Task[float] | None = None
    rounds: list[list[list[int]]] = []
    for name in ("warm", "all asleep", "one wakes"):
        asked = [requests(f"{name} {at}", options.many, options.prompt, options.answer, each.facts.vocab_size)
                 for at, each in enumerate(awake)]  # fmt: skip
        began_s = time.perf_counter()
        running = asyncio.gather(*(on.ask(its) for on, its in zip(awake, asked, strict=True)))
        if name == "one wakes":
            await first_tokens(awake, asked)
            waking = asyncio.create_task(turned(asleep[0].pool.sleeping.wake))
        await running
        took_s = time.perf_counter() - began_s
        waits = [each for on, its in zip(awake, asked, strict=True) for each in first_s(on, its, began_s)]
        rounds.append(
            [on.answers.tokens[each.id] for on, its in zip(awake, asked, strict=True) for each in its]
        )
        found[name] = {
            "tokens_per_s": round(len(waits) * options.answer / took_s, 1),
            "first_token_p50_s": round(statistics.median(waits), 3),
            "first_token_p95_s": round(p95(waits), 3),
        }
        print(f"{which}, {name}, {took_s:.1f} s: {json.dumps(found[name])}", flush=True)
    assert waking is not None
    found["wake_s"] = round(await waking, 3)
    found["short"] = sum(len(each) != options.answer for its in rounds for each in its)
    return found


async def first_tokens(bases: Sequence[Engine], asked: Sequence[Sequence[Request]]) -> None:
    """Wait until each base has begun an answer."""
    async with asyncio.timeout(WITHIN_S):
        for on, its in zip(bases, asked, strict=True):
            while not any(each.id in on.answers.times for each in its):  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.001)


async def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    config = transformers.AutoConfig.from_pretrained(options.shape)
    for key, value in (MINIATURE if options.miniature else {}).items():
        setattr(config, key, value)
    on_cpu = options.devices.startswith("cpu")
    dtype = torch.float32 if on_cpu else torch.bfloat16
    size = random_folder(scratch, config, tokenizer(), dtype, layers_alike=not on_cpu)
    print(f"{size / 1e9:.2f} GB of weights", flush=True)
    found: dict[str, Any] = {"weights_gb": round(size / 1e9, 2)}
    settings = {"slots": options.slots, "kv_tokens": options.kv_tokens}
    asked = options.do.split(",")
    if "disk" in asked:
        async with engine(scratch, [options.devices.split(",")[0]], **settings) as on:
            short = argparse.Namespace(**{**vars(options), "turns": 1})
            found["disk"] = await wake(on, short)
            print(f"disk: {json.dumps(found['disk'])}", flush=True)
    devices = options.devices.split(",")

    def base(number: int, *, shares: bool = False) -> AbstractAsyncContextManager[Engine]:
        own, other = (devices[at % len(devices)] for at in (number, number + 1))
        sleep = other if options.sleep == "neighbour" else options.sleep
        return engine(scratch, [own], sleep=sleep, share_sleeping_memory=shares, **settings)

    for name in [name for name in ("kept", "lent") if name in asked]:
        async with AsyncExitStack() as stack:
            starts = [
                stack.enter_async_context(base(at, shares=name == "lent")) for at in range(options.bases)
            ]
            bases = await asyncio.gather(*starts)
            print(f"{name}: ready after {[round(each.start_s, 1) for each in bases]} s", flush=True)
            found[name] = await crowded(bases, options, name)
            print(f"{name}: {json.dumps(found[name])}", flush=True)
    if not {"wake", "bursts"} & set(asked):
        return found
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(base(0))
        found["start_s"] = round(first.start_s, 1)
        if "wake" in asked:
            found["wake"] = await wake(first, options)
            print(f"wake: {json.dumps(found['wake'])}", flush=True)
        if "bursts" in asked:
            more = [stack.enter_async_context(base(number)) for number in range(1, options.bases)]
            bases = [first, *await asyncio.gather(*more)]
            found["bursts"] = await alternate(bases, options)
            print(f"bursts: {json.dumps(found['bursts'])}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.wake",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--devices", default="cuda:0")
    parser.add_argument("--shape", default="bench/models/llama-3.1-8b", help="a folder with a config.json")
    parser.add_argument("--do", default="disk,wake,bursts")
    parser.add_argument(
        "--sleep", default="host", help="or neighbour: the next of the devices keeps the weights"
    )
    parser.add_argument("--miniature", action="store_true")
    parser.add_argument("--turns", type=int, default=5, help="of the one base that sleeps and wakes")
    parser.add_argument("--bases", type=int, default=4)
    parser.add_argument("--awake", type=int, default=2, help="of the bases, at most, in the second half")
    parser.add_argument("--bursts", type=int, default=24)
    parser.add_argument("--requests", type=int, default=16, help="of a burst")
    parser.add_argument("--prompt", type=int, default=200, help="tokens")
    parser.add_argument("--many", type=int, default=64, help="queries to each base that is awake, for lent")
    parser.add_argument("--answer", type=int, default=1000, help="tokens of these answers")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--kv-tokens", type=int, default=60_000, help="of each base")
    options = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} CPUs, {torch.cuda.device_count()} GPUs, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )
    with tempfile.TemporaryDirectory(prefix="mico-wake-") as scratch:
        found = asyncio.run(measure(options, Path(scratch)))
    print(json.dumps(found))
    faults = [
        found.get("wake", {}).get("wrong"),
        *(found.get(each, {}).get("short") for each in ("kept", "lent")),
    ]
    return 1 if any(faults) else 0


if __name__ == "__main__":
    raise SystemExit(main())
