"""Measure a burst of prompts in a site's process: when each is handed to the engine, and the CPU.

    python -m bench.studies.burst_site --model FOLDER

Link, site and tokenizer are real; the gateway's stream is a list of bunches, and the engine's process is left
out behind the messages to it. Of the model only the tokenizer is read. `turn` is the longest that a timer on
the event loop is late. For the code before, copy this file to a worktree of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import grpc
import transformers
import uvloop
from grpc.aio import EOF

from gateway.federation.codec import bunch
from site_engine.engine import process_messages as pm
from site_engine.engine import process_packing as packing
from site_engine.engine.process_answer import Answer
from site_engine.engine_client import Facts, Group
from site_engine.errors import LinkLost, NotServed
from site_engine.federation.connection import Connection
from site_engine.federation.link import Link, LinkTimeouts
from site_engine.federation.site import Site
from site_engine.messages import Hello, Model, Welcome
from site_engine.native import NativeEngine, prompt_tokenizer
from site_engine.process_settings import set_up_process
from site_engine.text.detokenize import NoText
from wire import federation_pb2 as pb

CONTEXT_TOKENS, SLOTS, KV_TOKENS = 4096, 256, 10**6
CURVE_POINTS = 10
TIMER_S = 0.001
WORDS = (
    "what",
    "is",
    "the",
    "weather",
    "of",
    "these",
    "northern",
    "islands",
    "like",
    "in",
    "an",
    "ordinary",
    "year",
)


class Core:
    """Packs the requests for the engine's process, as `EngineProcess` does, and admits each."""

    def __init__(self, wanted: int) -> None:
        """`complete` is set once `wanted` requests have been submitted."""
        self.submitted_s: list[float] = []
        self.complete = asyncio.Event()
        self._wanted = wanted
        self._numbers = count(1)

    def submit(self, group: Group, reply: Callable[[NotServed | None], None]) -> None:
        answers = [Answer(each, NoText(), (1,), "") for each in group]
        numbers = [next(self._numbers) for _ in answers]
        requests = [each.request for each in answers]
        pm.frame(packing.to_submit(numbers[0], numbers, requests, answers[0].token_ids, None))
        self.submitted_s.append(time.perf_counter())
        if len(self.submitted_s) == self._wanted:
            self.complete.set()
        asyncio.get_running_loop().call_soon(reply, None)

    def request_load(self) -> None:
        """Report nothing."""

    def stop(self) -> None:
        """Do nothing."""


class Stream:
    """A gateway's stream that has these messages, and then ends."""

    def __init__(self, messages: Sequence[pb.GatewayMessage]) -> None:
        self._messages = iter(messages)

    async def read(self) -> Any:
        await asyncio.sleep(0)
        return next(self._messages, EOF)

    async def code(self) -> Any:
        return grpc.StatusCode.OK

    async def details(self) -> str:
        return ""


def assign(attempt: int, words: int) -> bytes:
    """Return an Assign, serialized, whose prompt has so many words, rotated so that no two are alike."""
    prompt = " ".join([str(attempt), *(WORDS[(attempt + place) % len(WORDS)] for place in range(words))])
    message = pb.GatewayMessage()
    part = message.assign
    part.attempt_id = part.query_id = part.request_id = f"{attempt:032x}"
    part.model, part.tenant, part.text, part.deadline_s = "m", "shop", prompt, 600.0
    part.sampling.max_tokens, part.sampling.n, part.sampling.top_p = 300, 1, 1.0
    part.sampling.ignore_eos = True
    part.forecast.generated.extend(range(0, 64 * CURVE_POINTS, 64))
    part.forecast.expected_remaining.extend([300] * CURVE_POINTS)
    part.forecast.p90_remaining.extend([500] * CURVE_POINTS)
    serialized: bytes = message.SerializeToString()
    return serialized


async def longest_turn_s(ended: asyncio.Event, busy_s: float) -> float:
    """Return by how much a timer was late at most, until `ended`. After each the loop computes `busy_s`."""
    longest_s = 0.0
    while not ended.is_set():
        due_s = time.perf_counter() + TIMER_S
        await asyncio.sleep(TIMER_S)
        longest_s = max(longest_s, time.perf_counter() - due_s)
        until_s = time.thread_time() + busy_s
        while time.thread_time() < until_s:
            pass
    return longest_s


async def burst(
    link: Link, connection: Connection, core: Core, bunches: Sequence[bytes], busy_s: float
) -> dict[str, float]:
    """Read the bunches one after the other. Return milliseconds, of the first and last from the start."""
    messages = [pb.GatewayMessage.FromString(each) for each in bunches]
    core.submitted_s.clear()
    core.complete.clear()
    turns = asyncio.create_task(longest_turn_s(core.complete, busy_s))
    began_s, cpu_s = time.perf_counter(), time.process_time()
    with suppress(LinkLost):  # the stream has ended
        await link._read(Stream(messages), connection)
    await core.complete.wait()
    found = {"first": core.submitted_s[0] - began_s, "last": core.submitted_s[-1] - began_s}
    found["cpu_a_query"] = (time.process_time() - cpu_s) / len(core.submitted_s)
    found["turn"] = await turns
    return {name: 1000 * seconds for name, seconds in found.items()}


async def measure(options: argparse.Namespace) -> dict[str, float]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    end = tokenizer.eos_token_id
    facts = Facts("m", "r", CONTEXT_TOKENS, len(tokenizer), (end,), SLOTS, KV_TOKENS)
    post = asyncio.get_running_loop().call_soon_threadsafe
    core = Core(options.prompts)
    prompts = prompt_tokenizer(tokenizer, facts, post, allow_special_tokens=False)
    engine = NativeEngine(prompts, core)  # type: ignore[arg-type]
    models = (Model("m", "r", CONTEXT_TOKENS, 0, engine.features),)
    hello = Hello("s", "boot", "none", "here", models, SLOTS, KV_TOKENS, 0.0, 0.0, None, 0.0, "1")
    site = Site(hello, engine, time.monotonic, max_preparing=1024)
    link = Link(
        "",
        site=site,
        open_channel=lambda _: None,
        token="",
        add_peers=lambda _: None,
        clock=time.monotonic,
        timeouts=LinkTimeouts(),
        random=Random(0),
    )
    connection = site.welcomed(hello, Welcome("g", (), 1.0, 10.0, (), True, 5), lambda: None)
    attempts = count()
    rounds = []
    for turn in range(-2, options.rounds):
        asked = [assign(next(attempts), options.words) for _ in range(options.prompts)]
        bunches = [bunch(asked[at : at + options.bunch]) for at in range(0, len(asked), options.bunch)]
        found = await burst(link, connection, core, bunches, options.busy_ms / 1000)
        if turn >= 0:  # the first two warm up
            rounds.append(found)
        for attempt_id in connection.attempts.attempt_ids():
            connection.attempts.cancel(attempt_id)
        connection.attempts.outbox.take(time.monotonic())
    engine.stop()
    return {name: round(statistics.median(each[name] for each in rounds), 3) for name in rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a model's folder")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--words", type=int, default=80, help="of each prompt")
    parser.add_argument("--bunch", type=int, default=64, help="prompts that come in one message")
    parser.add_argument(
        "--busy-ms", type=float, default=0.0, help="other work after each millisecond of none"
    )
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    set_up_process()
    print(json.dumps({"load_average": os.getloadavg()[0], **uvloop.run(measure(options))}))


if __name__ == "__main__":
    main()
