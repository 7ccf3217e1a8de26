"""Measure the extra hop: a server of the OpenAI kind asked directly, and through a site in front of it.

Three processes on this machine: a server that sends tokens at an even pace, the site, and this one, which is
the client of the one and the gateway of the other. Run: python -m bench.remote
With `same --url URL --model NAME`: compares greedy answers of a real server with those through a site.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx

from wire import federation_pb2 as pb
from wire import federation_pb2_grpc

PROMPT = "Why is the sky blue? " * 20
TOPICS = ("the sky", "bread", "rivers", "clocks", "winter", "glass", "maps", "salt")
FORMS = ("Why is there {}?", "Write a line about {}.", "Explain {} to a child.")
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Took:
    first_s: float
    whole_s: float


# ---- the server


async def serve(tokens: int, pace_s: float) -> None:
    """Answer every POST with `tokens` chunks, one each `pace_s`; print the port."""
    server = await asyncio.start_server(lambda r, w: converse(r, w, tokens, pace_s), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def converse(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tokens: int, pace_s: float
) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = head.partition("content-length: ")[2].partition("\r\n")[0]
            await reader.readexactly(int(length or 0))
            if head.startswith("post"):
                await stream(writer, tokens, pace_s)
            else:
                listed = head.startswith("get /v1/models ")
                whole(writer, {"data": [{"id": "m", "max_model_len": 4096}]} if listed else None)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def whole(writer: asyncio.StreamWriter, body: Any) -> None:
    data = json.dumps(body).encode()
    status = "404 Not Found" if body is None else "200 OK"
    writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)


async def stream(writer: asyncio.StreamWriter, tokens: int, pace_s: float) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    for number in range(tokens):
        await asyncio.sleep(pace_s)
        finish = "length" if number == tokens - 1 else None
        choice = {"index": 0, "delta": {"content": " token"}, "finish_reason": finish}
        event(writer, {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [choice]})
    event(writer, {"choices": [], "usage": {"prompt_tokens": 100, "completion_tokens": tokens}})
    chunk(writer, b"data: [DONE]\n\n")
    chunk(writer, b"")


def event(writer: asyncio.StreamWriter, body: Any) -> None:
    chunk(writer, b"data: " + json.dumps(body).encode() + b"\n\n")


def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


# ---- asked directly


async def direct(client: httpx.AsyncClient) -> Took:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": PROMPT}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first = time.perf_counter(), 0.0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for data in response.aiter_bytes():
            first = first or (time.perf_counter() if data else 0.0)
    return Took(first - began, time.perf_counter() - began)


# ---- asked through a site


@dataclass
class Gateway(federation_pb2_grpc.FederationServicer):
    """One stream of a site; notes when the first and the last word of each attempt arrive."""

    joined: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: dict[str, asyncio.Future[Took]] = field(default_factory=dict)
    began: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    context: Any = None
    number: int = 0
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)  # a stream takes one write at a time

    async def Join(self, requests: Any, context: Any) -> None:  # noqa: N802
        self.context = context
        await context.read()
        await context.write(pb.GatewayMessage(welcome=pb.Welcome(gateway="bench")))
        self.joined.set()
        while (message := await context.read()) is not grpc.aio.EOF:
            now = time.perf_counter()
            for delta in message.step.deltas:
                self.first.setdefault(delta.attempt_id, now)
                self.texts[delta.attempt_id] = self.texts.get(delta.attempt_id, "") + delta.text
                if delta.finish:
                    began = self.began[delta.attempt_id]
                    took = Took(self.first[delta.attempt_id] - began, now - began)
                    self.waiting[delta.attempt_id].set_result(took)

    async def ask(self, model: str = "m", prompt: str = PROMPT, most: int | None = None) -> Took:
        """Ask greedily; the text of the n-th question is texts[str(n)]."""
        self.number += 1
        name = str(self.number)
        self.waiting[name] = asyncio.get_running_loop().create_future()
        body = pb.Assign(attempt_id=name, model=model, sampling=pb.Sampling(n=1, top_p=1, max_tokens=most))
        body.chat.messages.append(pb.ChatMessage(role="user", content=prompt))
        self.began[name] = time.perf_counter()
        async with self.writing:
            await self.context.write(pb.GatewayMessage(assign=body))
        return await self.waiting[name]


# ---- the measurement


async def measure(ask: Callable[[], Awaitable[Took]], answers: int, at_once: int) -> list[Took]:
    """Ask for `answers` in all, `at_once` at a time; as many before that are not counted."""

    async def one_after_another(count: int) -> list[Took]:
        return [await ask() for _ in range(count)]

    await asyncio.gather(*(one_after_another(2) for _ in range(at_once)))
    each = await asyncio.gather(*(one_after_another(answers // at_once) for _ in range(at_once)))
    return [took for some in each for took in some]


async def compare(options: argparse.Namespace) -> dict[str, Any]:
    server = start("bench.remote", "serve", f"--tokens={options.tokens}", f"--pace-ms={options.pace_ms}")
    assert server.stdout is not None
    url = f"http://127.0.0.1:{int(server.stdout.readline())}"
    try:
        async with (
            site_before(url, max(options.at_once)) as (gateway, site),
            httpx.AsyncClient(base_url=url, timeout=60) as client,
        ):
            return {"rows": [await row(client, gateway, site, options, each) for each in options.at_once]}
    finally:
        server.terminate()
        server.wait()


@asynccontextmanager
async def site_before(url: str, slots: int, *more: str) -> AsyncIterator[tuple[Gateway, int]]:
    """Yield a gateway that the site in front of `url` has joined, and the site's process id."""
    gateway, grpc_server = Gateway(), grpc.aio.server()
    federation_pb2_grpc.add_FederationServicer_to_server(gateway, grpc_server)  # type: ignore[no-untyped-call]
    address = f"127.0.0.1:{grpc_server.add_insecure_port('127.0.0.1:0')}"
    await grpc_server.start()
    settings = ("site=bench", f"gateways={address}", f"slots={slots}", "log_level=warning", *more)
    flags = [flag for each in settings for flag in ("--set", each)]
    site = start("mico", "site", "--engine", "openai", "--url", url, *flags)
    try:
        await asyncio.wait_for(gateway.joined.wait(), 30)
        yield gateway, site.pid
    finally:
        site.terminate()
        site.wait()
        await grpc_server.stop(None)


async def same(options: argparse.Namespace) -> dict[str, Any]:
    """Compare greedy texts of a running server, asked directly and through a site, four at a time."""
    prompts = [form.format(topic) for form in FORMS for topic in TOPICS]
    async with (
        site_before(options.url, 4, f"model={options.model}", "served_model=m") as (gateway, _),
        httpx.AsyncClient(base_url=options.url, timeout=120) as client,
    ):
        expected = [await text_of(client, options.model, each, options.tokens) for each in prompts]
        await asyncio.gather(*(gateway.ask("m", each, options.tokens) for each in prompts))
    got = [gateway.texts[str(number)] for number in range(1, len(prompts) + 1)]
    different = [each for each, a, b in zip(prompts, expected, got, strict=True) if a != b]
    return {"prompts": len(prompts), "characters": sum(map(len, expected)), "different": different}


async def text_of(client: httpx.AsyncClient, model: str, prompt: str, most: int) -> str:
    messages = [{"role": "user", "content": prompt}]
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": most}
    answer = await client.post("/v1/chat/completions", json=body)
    return str(answer.raise_for_status().json()["choices"][0]["message"]["content"] or "")


async def row(
    client: httpx.AsyncClient, gateway: Gateway, site: int, options: argparse.Namespace, at_once: int
) -> dict[str, float]:
    answers = options.answers * at_once
    without = await measure(lambda: direct(client), answers, at_once)
    cpu_s = cpu_seconds(site)
    through = await measure(gateway.ask, answers, at_once)
    cpu_s = cpu_seconds(site) - cpu_s
    found: dict[str, float] = {"at_once": at_once, "answers": answers}
    for name in ("first_s", "whole_s"):
        for share in (50, 99):
            before, after = (quantile(each, name, share) for each in (without, through))
            found[f"{name[:-2]}_p{share}_direct_ms"] = round(before * 1e3, 2)
            found[f"{name[:-2]}_p{share}_added_ms"] = round((after - before) * 1e3, 2)
    asked = answers + 2 * at_once
    found["site_cpu_ms_per_answer"] = round(cpu_s / asked * 1e3, 2)
    found["site_cpu_us_per_token"] = round(cpu_s / asked / options.tokens * 1e6, 1)
    return found


def quantile(took: list[Took], name: str, share: int) -> float:
    values: list[float] = [getattr(each, name) for each in took]
    return statistics.quantiles(values, n=100)[share - 1]


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123 - not a file that lies on a disk
        parts = stat.read().rpartition(")")[2].split()
    return (int(parts[11]) + int(parts[12])) / CLOCK_TICKS


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", *arguments], stdout=subprocess.PIPE, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=("compare", "serve", "same"), default="compare")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--pace-ms", type=float, default=10.0, help="between tokens")
    parser.add_argument("--answers", type=int, default=50, help="measured, by each of those at once")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--url", help="of the server to compare with, for `same`")
    parser.add_argument("--model", help="as that server calls it")
    options = parser.parse_args()
    if options.what == "same":
        print(json.dumps(asyncio.run(same(options))))
        return
    if options.what == "serve":
        asyncio.run(serve(options.tokens, options.pace_ms / 1e3))
        return
    conditions = {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 1),
        "tokens": options.tokens,
        "pace_ms": options.pace_ms,
    }
    found = asyncio.run(compare(options))
    for each in found["rows"]:
        print(", ".join(f"{name} {value}" for name, value in each.items()))
    print(json.dumps({**conditions, **found}))


if __name__ == "__main__":
    main()
