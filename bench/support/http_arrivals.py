"""Streams over HTTP from several processes, in an open loop (Poisson arrivals) or a closed one.

The clients are raw connections: a client of convenience takes more CPU than the servers under test.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import httptools
import numpy as np
import uvloop

PROCESSES = 8
LARGEST_GAPS = 20
BEGIN_AFTER_S = 0.2
"""From the moment when every process is ready to the first arrival."""


class Question(NamedTuple):
    """A prompt and the tokens of its answer, which the server must make exactly."""

    prompt: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Target:
    port: int
    key: str
    model: str


@dataclass(frozen=True, slots=True)
class Load:
    """`per_s` arrivals a second, or `clients` that each ask again when answered; of every `every` requests
    one has the fields of `extra`.
    """

    per_s: float = 0.0
    clients: int = 0
    chat: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    every: int = 20
    within_s: float = 90.0
    """After the first arrival; what still runs then is an error."""


@dataclass(slots=True)
class Stream:
    """The client's view of one answer. Seconds on the client's monotonic clock; empty `error` if whole."""

    sent_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    ended_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str = "no end"

    def event(self, data: bytes, now_s: float) -> None:
        if data == b"[DONE]":
            self.error, self.ended_s = "" if self.error == "no end" else self.error, now_s
            return
        body = json.loads(data)
        if "error" in body:
            self.error = f"in the stream: {str(body['error'])[:120]}"
        if usage := body.get("usage"):
            self.tokens = usage["completion_tokens"]
        if any(each.get("text") or each.get("delta", {}).get("content") for each in body.get("choices", ())):
            if self.first_s:
                self.gaps_s.append(now_s - self.last_s)
            else:
                self.first_s = now_s
            self.last_s = now_s


class Client(asyncio.Protocol):
    """A kept-open connection with one stream at a time."""

    def __init__(self) -> None:
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(exc or ConnectionResetError("the server closed the connection"))

    async def ask(self, raw: bytes, stream: Stream) -> None:
        """Send a request; return when its answer has ended. Raises OSError."""
        self._stream, self._rest = stream, b""
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        stream.sent_s = time.perf_counter()
        self._transport.write(raw)
        await self._done

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        now_s = time.perf_counter()
        status = self._parser.get_status_code()
        if status != 200:
            self._stream.error = f"{status}: {body[:160].decode(errors='replace')}"
            return
        *events, self._rest = (self._rest + body).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                self._stream.event(event[6:], now_s)

    def on_message_complete(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def close(self) -> None:
        self._done = None
        self._transport.abort()


def request(target: Target, question: Question, load: Load, number: int) -> bytes:
    """Return a streamed request with a fixed number of greedy tokens."""
    body: dict[str, Any] = {"model": target.model, "temperature": 0.0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if load.chat:
        body["messages"] = [{"role": "user", "content": question.prompt}]
        body["max_completion_tokens"] = question.tokens
    else:
        body |= {"prompt": question.prompt, "max_tokens": question.tokens}
    if number % load.every == 0:
        body |= load.extra
    path, raw = "chat/completions" if load.chat else "completions", json.dumps(body).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}authorization: Bearer {target.key}\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw


class Arrival(NamedTuple):
    number: int
    at_s: float
    raw: bytes
    tokens: int


async def _one(idle: list[Client], target: Target, arrival: Arrival, stream: Stream) -> None:
    try:
        if not idle:
            loop = asyncio.get_running_loop()
            idle.append((await loop.create_connection(Client, "127.0.0.1", target.port))[1])
        connection = idle.pop()
        await connection.ask(arrival.raw, stream)
        idle.append(connection)
    except OSError as error:
        stream.error = f"{type(error).__name__}: {error}"
    if not stream.error and stream.tokens > arrival.tokens:
        stream.error = f"{stream.tokens} tokens of {arrival.tokens}"


async def _run(
    target: Target, load: Load, clients: int, arrivals: Sequence[Arrival], begin_s: float
) -> list[Stream]:
    streams = [Stream() for _ in arrivals]
    idle: list[Client] = []
    pairs = iter(list(zip(arrivals, streams, strict=True)))

    async def client() -> None:
        for arrival, stream in pairs:
            await _one(idle, target, arrival, stream)

    async def arrive(arrival: Arrival, stream: Stream) -> None:
        await asyncio.sleep(max(0.0, begin_s + arrival.at_s - time.perf_counter()))
        await _one(idle, target, arrival, stream)

    if load.per_s:
        tasks = [asyncio.create_task(arrive(*pair)) for pair in pairs]
    else:
        await asyncio.sleep(max(0.0, begin_s - time.perf_counter()))
        tasks = [asyncio.create_task(client()) for _ in range(clients)]
    _, late = await asyncio.wait(tasks, timeout=begin_s + load.within_s - time.perf_counter())
    for task in late:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for connection in idle:
        connection.close()
    return streams


def _child(parent: Connection, target: Target, load: Load, clients: int, arrivals: list[Arrival]) -> None:
    parent.send("ready")
    began_s = time.process_time()
    streams = uvloop.run(_run(target, load, clients, arrivals, parent.recv()))
    parent.send((streams, time.process_time() - began_s))


def measure(target: Target, questions: Sequence[Question], load: Load, seed: int = 7) -> dict[str, Any]:
    """Ask all questions; return the latencies and rates that clients saw, with the errors by text."""
    rnd, at_s, arrivals = random.Random(seed), 0.0, []
    for number, question in enumerate(questions):
        arrivals.append(Arrival(number, at_s, request(target, question, load, number), question.tokens))
        at_s += rnd.expovariate(load.per_s) if load.per_s else 0.0
    processes, context = min(PROCESSES, load.clients or len(arrivals)), multiprocessing.get_context("spawn")
    children = []
    for child in range(processes):
        ours, theirs = context.Pipe()
        clients = len(range(child, load.clients, processes))
        process = context.Process(
            target=_child, args=(theirs, target, load, clients, arrivals[child::processes])
        )
        process.start()
        theirs.close()
        children.append((process, ours))
    for _, pipe in children:
        pipe.recv()
    begin_s = time.perf_counter() + BEGIN_AFTER_S
    for _, pipe in children:
        pipe.send(begin_s)
    streams: list[Stream] = []
    client_cpu_s = 0.0
    for process, pipe in children:
        part, cpu_s = pipe.recv()
        streams += part
        client_cpu_s += cpu_s
        process.join()
    return {**summary(streams), "client_cpu_s": round(client_cpu_s, 1)}


def summary(streams: Sequence[Stream]) -> dict[str, Any]:
    """Return milliseconds at p50 and p99, tokens a second and the errors; only whole answers count."""
    whole = [each for each in streams if not each.error and each.first_s]
    errors = Counter(each.error[:110] for each in streams if each.error)
    found: dict[str, Any] = {
        "streams": len(streams),
        "whole": len(whole),
        "errors": dict(errors.most_common(4)),
    }
    if not whole:
        return found
    took_s = max(each.ended_s for each in whole) - min(each.sent_s for each in whole)
    tokens = sum(each.tokens for each in whole)
    several = [each for each in whole if each.tokens > 1]
    figures = {
        "ttft": [each.first_s - each.sent_s for each in whole],
        "itl": list(itertools.chain.from_iterable(each.gaps_s for each in whole)),
        "tpot": [(each.ended_s - each.first_s) / (each.tokens - 1) for each in several],
        "s_per_token": [(each.ended_s - each.sent_s) / max(1, each.tokens) for each in whole],
        "longest_gap": [max(each.gaps_s, default=0.0) for each in whole],
    }
    for name, seconds in figures.items():
        ms = 1000 * np.array(seconds or [float("nan")])
        found[f"{name}_ms"] = {
            "mean": round(float(ms.mean()), 2),
            "p50": round(float(np.percentile(ms, 50)), 2),
            "p99": round(float(np.percentile(ms, 99)), 2),
        }
    chunks = sum(len(each.gaps_s) + 1 for each in whole)
    found["largest_gaps_ms"] = [
        round(1000 * each, 1) for each in heapq.nlargest(LARGEST_GAPS, figures["itl"])
    ]
    return found | {
        "tokens_per_s": round(tokens / took_s),
        "tokens_per_answer": round(tokens / len(whole), 1),
        "tokens_per_chunk": round(tokens / chunks, 3),
        "seconds": round(took_s, 1),
    }
