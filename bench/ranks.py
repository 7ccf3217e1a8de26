"""Measure a site with several GPUs: two replicas against one, and models that are split over two.

    python -m bench.ranks --devices cuda:0,cuda:1 --shape bench/models/llama-3.1-8b
        --large bench/models/llama-3.1-70b --do replicas,steps,margins,large

Engine processes as a site starts them, with random weights. `replicas`: tokens a second of answers of one
length, all at once, by one engine and by one for each device. `steps`: milliseconds between the tokens of 8
and of 256 requests, of one device and of all of them as one. `margins`: greedy answers of one device, token
by token, by the split model: where it takes another token, the log probabilities of both have to be closer
than twice the 99.9th percentile of what rounding changes. `large`: steps of the model at `--large` on all
devices as one. `peer`: those of `generate` by transformers, with the layers of that model on one device after
the other. `vllm` and `vllm-large`, which have to be named: those of vLLM with tensor parallelism over all
devices, by the seconds of answers of 16 tokens and of `--steps` more, in a process that draws its own
weights. `--miniature` takes tiny models, for a CPU: `--devices cpu,cpu`. Exit status 1 if an answer is
wrong. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.support import beside_vllm, device_map_peer
from bench.support.random_folder import random_folder
from site_engine.config import SiteConfig
from site_engine.core.request import Output, Request, Sampling
from site_engine.engine.process_client import EngineProcess
from site_engine.engine.process_spawn import spawn
from site_engine.engine_client import Facts, Listener, LoadSeen
from site_engine.errors import NotServed
from site_engine.native import launch_core
from site_engine.pool.pool import EnginePool
from tests.support.engine_models import tokenizer

WITHIN_S = 600.0
LARGE = ("large", "peer", "vllm-large")
VLLM = ("vllm", "vllm-large")
VLLM_CONTEXT = 2048
SETTLED_TOKENS = 16
"""Of every request before its steps are timed: all run then, and their graphs are captured."""
MINIATURE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
}


@dataclass
class Answers:
    """What an engine has said, and when: its tokens, their and the prompt's log probabilities, the times."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[Any]] = field(default_factory=dict)
    times: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)
    error: str = ""
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def outputs(self, outputs: Sequence[Output]) -> None:
        now = time.perf_counter()
        for each in outputs:
            tokens = self.tokens.setdefault(each.request_id, [])
            tokens += each.token_ids
            self.logprobs.setdefault(each.request_id, []).extend(each.logprobs)
            self.prompt_logprobs.setdefault(each.request_id, []).extend(each.prompt_logprobs)
            self.times.setdefault(each.request_id, []).append((now, len(tokens)))
            if each.finish is not None:
                self.open.discard(each.request_id)
                self.error = self.error or each.error
        if not self.open:
            self.done.set()

    def admitted(self, answer: NotServed | None) -> None:
        if isinstance(answer, NotServed):
            self.broken(answer.message)

    def broken(self, reason: str) -> None:
        self.error = reason
        self.done.set()


@dataclass
class Engine:
    core: EngineProcess | EnginePool
    facts: Facts
    start_s: float
    answers: Answers
    load: LoadSeen | None = None

    @property
    def pool(self) -> EnginePool:
        """Return the engines, started with several devices."""
        assert isinstance(self.core, EnginePool)
        return self.core

    async def ask(self, requests: Sequence[Request]) -> float:
        """Have requests answered, all at once, and return the seconds that it took. Raises RuntimeError."""
        answers = self.answers
        answers.open |= {each.id for each in requests}
        answers.done.clear()
        began_s = time.perf_counter()
        for each in requests:
            self.core.submit([each], answers.admitted)
        async with asyncio.timeout(WITHIN_S):
            await answers.done.wait()
        if answers.error:
            raise RuntimeError(answers.error)
        return time.perf_counter() - began_s


@asynccontextmanager
async def engine(folder: Path, devices: Sequence[str], **settings: Any) -> AsyncIterator[Engine]:
    config = SiteConfig(
        site="bench", gateways=("127.0.0.1:1",), model=str(folder), devices=tuple(devices),
        log_level="warning", sampling_defaults="openai", **settings,
    )  # fmt: skip
    began_s = time.perf_counter()
    core = await launch_core(config, spawn)
    try:
        facts = await core.ready()
        made = Engine(core, facts, time.perf_counter() - began_s, Answers())
        core.start(Listener(made.answers.outputs, partial(setattr, made, "load"), made.answers.broken))
        yield made
    finally:
        await asyncio.to_thread(core.stop)


def requests(name: str, count: int, prompt_tokens: int, tokens: int, vocab_size: int) -> list[Request]:
    draw = random.Random(name)
    rules = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return [
        Request(f"{name} {at}", tuple(draw.randrange(10, vocab_size) for _ in range(prompt_tokens)), rules)
        for at in range(count)
    ]


async def step_ms(on: Engine, rows: int, prompt_tokens: int, steps: int) -> float:
    """Return the milliseconds between two tokens of each of `rows` requests, while all of them run."""
    for repetition in ("warm", "timed"):
        asked = requests(
            f"{repetition} {rows}", rows, prompt_tokens, SETTLED_TOKENS + steps, on.facts.vocab_size
        )
        await on.ask(asked)
    times = [on.answers.times[each.id] for each in asked]
    begin_s = max(next(at_s for at_s, count in its if count >= SETTLED_TOKENS) for its in times)
    end_s = min(its[-1][0] for its in times)
    took = []
    for its in times:
        within = [(at_s, count) for at_s, count in its if begin_s <= at_s <= end_s]
        (first_s, first), (last_s, last) = within[0], within[-1]
        if last > first:
            took.append((last_s - first_s) / (last - first) * 1e3)
    return statistics.median(took)


async def replicas(folder: Path, devices: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for name, chosen in (("one", devices[:1]), ("all", devices)):
        async with engine(folder, chosen) as on:
            count = options.requests * len(chosen)
            for repetition in ("warm", "timed"):
                asked = requests(
                    f"{repetition} {name}", count, options.prompt, options.tokens, on.facts.vocab_size
                )
                took_s = await on.ask(asked)
            found[f"{name}_tokens_per_s"] = round(count * options.tokens / took_s, 1)
            print(f"replicas, {name}: {found[f'{name}_tokens_per_s']:,} tokens/s", flush=True)
    return found | {"ratio": round(found["all_tokens_per_s"] / found["one_tokens_per_s"], 3)}


async def steps(folder: Path, devices: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, chosen in (("one", devices[0]), ("split", "+".join(devices))):
        async with engine(folder, [chosen]) as on:
            found[f"{name}_start_s"], found[f"{name}_kv_tokens"] = round(on.start_s, 1), on.facts.kv_tokens
            for rows in options.rows:
                found[f"{name}_{rows}_ms"] = round(await step_ms(on, rows, options.prompt, options.steps), 3)
            print(f"steps, {name}: {found}", flush=True)
    return found


async def margins(folder: Path, devices: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Force the answers of one device on the split model: where it takes another token it goes on from the
    first one's.
    """
    rules = Sampling(max_tokens=options.forced, temperature=0.0, ignore_eos=True, logprobs=2)
    async with engine(folder, devices[:1]) as on:
        asked = requests("forced", 24, options.prompt, options.forced, on.facts.vocab_size)
        for each in asked:
            each.sampling = rules
        await on.ask(asked)
        wanted, told = on.answers.tokens, on.answers.logprobs
    noise: list[float] = []
    others: list[float] = []  # margins by which one device preferred its token to the split model's
    async with engine(folder, ["+".join(devices)]) as on:
        left = {each.id: 0 for each in asked}  # tokens compared
        for turn in range(options.forced):
            again = [
                Request(
                    f"{each.id} {turn}", each.prompt, rules, resumed=tuple(wanted[each.id][: left[each.id]])
                )
                for each in asked
                if left[each.id] < options.forced
            ]
            if not again:
                break
            await on.ask(again)
            for each in again:
                name = each.id.rpartition(" ")[0]
                for token, logprob in zip(
                    on.answers.tokens[each.id], on.answers.logprobs[each.id], strict=True
                ):
                    at, left[name] = left[name], left[name] + 1
                    if token != wanted[name][at]:
                        best, second = told[name][at].top[:2]
                        others.append(best.logprob - second.logprob)
                        break
                    noise.append(abs(logprob.logprob - told[name][at].logprob))
    tolerance = 2 * sorted(noise)[int(0.999 * len(noise))]
    wrong = sum(margin > tolerance for margin in others)
    return {"same": len(noise), "other": len(others), "tolerance": round(tolerance, 4), "wrong": wrong}


async def large(folder: Path, devices: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    async with engine(folder, ["+".join(devices)]) as on:
        took = round(await step_ms(on, 8, options.prompt, options.steps), 3)
        return {"8_ms": took, "kv_tokens": on.facts.kv_tokens, "start_s": round(on.start_s, 1)}


async def peer(folder: Path, devices: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    config = transformers.AutoConfig.from_pretrained(folder)
    dtype = torch.float32 if devices[0] == "cpu" else torch.bfloat16
    took_ms = await asyncio.to_thread(
        device_map_peer.step_ms, config, devices, dtype, (8, options.prompt), options.peer_steps
    )
    return {"8_ms": round(took_ms, 2)}


def vllm(folder: Path, devices: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Time the steps of vLLM, which takes the configuration in a folder, with all of its own memory."""
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    sizes = {"prompt_tokens": options.prompt, "steps": options.steps, "vocab_size": vocab_size}
    passes = [one for rows in options.rows for one in beside_vllm.step_passes(str(rows), rows, **sizes)]
    arguments = {
        "tensor_parallel_size": len(devices), "enable_prefix_caching": False,
        "max_num_seqs": max(options.rows), "max_model_len": VLLM_CONTEXT,
    }  # fmt: skip
    served = beside_vllm.serve(options.vllm_path, folder, arguments, passes, within_s=options.vllm_within)
    took = {f"{rows}_ms": served.step_ms(str(rows), options.steps) for rows in options.rows}
    return {name: ms and round(ms, 3) for name, ms in took.items()} | served.figures()


WORK = {"replicas": replicas, "steps": steps, "margins": margins, "large": large, "peer": peer}


async def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    devices = options.devices.split(",")
    dtype = torch.float32 if devices[0] == "cpu" else torch.bfloat16
    found: dict[str, Any] = {}
    for name in options.do.split(","):
        source = options.large if name in LARGE else options.shape
        if name in VLLM:
            found[name] = await asyncio.to_thread(vllm, Path(source), devices, options)
            print(f"{name}: {json.dumps(found[name])}", flush=True)
            continue
        config = transformers.AutoConfig.from_pretrained(source)
        for key, value in (MINIATURE if options.miniature else {}).items():
            setattr(config, key, value)
        folder = scratch / ("large" if name in LARGE else "shape")
        if not folder.exists():
            size = random_folder(folder, config, tokenizer(), dtype, layers_alike=devices[0] != "cpu")
            print(f"{folder.name}: {size / 1e9:.2f} GB of weights", flush=True)
        found[name] = await WORK[name](folder, devices, options)
        print(f"{name}: {json.dumps(found[name])}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.ranks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--devices", default="cuda:0,cuda:1")
    parser.add_argument("--shape", default="bench/models/llama-3.1-8b", help="a folder with a config.json")
    parser.add_argument(
        "--large", default="bench/models/llama-3.1-70b", help="of the model that fits no device"
    )
    parser.add_argument("--do", default=",".join(WORK))
    parser.add_argument("--miniature", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 256])
    parser.add_argument("--steps", type=int, default=128, help="that are timed")
    parser.add_argument("--prompt", type=int, default=200, help="tokens")
    parser.add_argument("--requests", type=int, default=512, help="of an engine, for the replicas")
    parser.add_argument("--tokens", type=int, default=128, help="of their answers")
    parser.add_argument("--peer-steps", type=int, default=16)
    beside_vllm.add_arguments(parser)
    parser.add_argument("--forced", type=int, default=32, help="tokens of each of 24 answers")
    options = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} CPUs, {torch.cuda.device_count()} GPUs, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )
    with tempfile.TemporaryDirectory(prefix="mico-ranks-") as scratch:
        found = asyncio.run(measure(options, Path(scratch)))
    print(json.dumps(found))
    return 1 if found.get("margins", {}).get("wrong") else 0


if __name__ == "__main__":
    raise SystemExit(main())
