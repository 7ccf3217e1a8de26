"""An HTTP client that costs little beside what it measures: raw connections, answers validated after the
clock.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import httptools

from tests.support.scripted_upstream import MODEL, prompt, words

FIRST_WORD = b'"w0 '
ANSWER_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Reply:
    """`first_s` and `total_s` count from the sending of the request, to its first word and to its end."""

    status: int
    body: bytes
    first_s: float
    total_s: float


@dataclass(slots=True)
class Tally:
    """The outcome of many requests: only validated answers count."""

    replies: list[Reply] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    frames: int = 0


def request(key: str, tokens: int, number: int, *, paced: bool, stream: bool) -> bytes:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt(tokens, number, paced=paced)}],
        "max_tokens": 4 * tokens,
        "stream": stream,
    }
    raw = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}authorization: Bearer {key}\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw


def problem(reply: Reply, tokens: int, *, stream: bool) -> str:
    """Return how this differs from the upstream's answer; empty if it does not."""
    if reply.status != 200:
        return f"status {reply.status}: {reply.body[:200]!r}"
    try:
        text, finish = _streamed(reply.body) if stream else _whole(reply.body)
    except (ValueError, KeyError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    right = text == "".join(words(tokens)) and finish == "stop"
    return "" if right else f"text {text[:60]!r}, finish {finish}"


def _whole(body: bytes) -> tuple[str, str]:
    choice = json.loads(body)["choices"][0]
    return choice["message"]["content"], choice["finish_reason"]


def _streamed(body: bytes) -> tuple[str, str]:
    frames = [each.removeprefix(b"data: ") for each in body.split(b"\n\n") if each.startswith(b"data: ")]
    if frames[-1] != b"[DONE]":
        raise ValueError("no [DONE]")
    chunks = [json.loads(frame) for frame in frames[:-1]]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return text, next((choice["finish_reason"] for choice in choices if choice.get("finish_reason")), "")


class Connection(asyncio.Protocol):
    """One kept-open connection; one request at a time."""

    def __init__(self) -> None:
        self._waiting: asyncio.Future[Reply] | None = None
        self._begin()

    @classmethod
    async def open(cls, port: int) -> Self:
        _, connection = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return connection

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._first_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(exc or ConnectionResetError("the gateway closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        if not self._first_s and FIRST_WORD in body:
            self._first_s = time.perf_counter()
        self._parts.append(body)

    def on_message_complete(self) -> None:
        assert self._waiting is not None
        now = time.perf_counter()
        first_s = (self._first_s or now) - self._sent_s
        status = self._parser.get_status_code()
        if not self._waiting.done():
            self._waiting.set_result(Reply(status, b"".join(self._parts), first_s, now - self._sent_s))

    def send(self, raw: bytes) -> asyncio.Future[Reply]:
        self._begin()
        self._waiting = asyncio.get_running_loop().create_future()
        self._sent_s = time.perf_counter()
        self._transport.write(raw)
        return self._waiting

    def leave(self) -> None:
        """Disconnect as a client that is gone; a pending future never resolves."""
        self._waiting = None
        self._transport.abort()


async def closed_loop(
    port: int, key: str, *, count: int, connections: int, tokens: int, paced: bool, stream: bool
) -> Tally:
    """Send `count` requests, each connection its next when the last is answered."""
    tally, numbers = Tally(), iter(range(count))

    async def client() -> None:
        connection = await Connection.open(port)
        for number in numbers:
            await send_and_count(tally, connection, request(key, tokens, number, paced=paced, stream=stream))
        connection.leave()

    await asyncio.gather(*(client() for _ in range(connections)))
    return validated(tally, tokens, stream=stream)


async def send_and_count(tally: Tally, connection: Connection, raw: bytes) -> None:
    try:
        tally.replies.append(await asyncio.wait_for(connection.send(raw), ANSWER_WITHIN_S))
    except (OSError, TimeoutError) as error:
        tally.wrong.append(f"{type(error).__name__}: {error}")


async def open_loop(port: int, key: str, *, per_s: float, for_s: float, tokens: int) -> Tally:
    """Begin streams at an even pace, whether or not the earlier ones have ended."""
    tally, idle, tasks = Tally(), [await Connection.open(port) for _ in range(8)], []
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    async def one(number: int) -> None:
        connection = idle.pop() if idle else await Connection.open(port)
        await send_and_count(tally, connection, request(key, tokens, number, paced=True, stream=True))
        idle.append(connection)

    for number in range(round(per_s * for_s)):
        await asyncio.sleep(max(0.0, began_s + number / per_s - loop.time()))
        tasks.append(asyncio.create_task(one(number)))
    await asyncio.gather(*tasks)
    for connection in idle:
        connection.leave()
    return validated(tally, tokens, stream=True)


def validated(tally: Tally, tokens: int, *, stream: bool) -> Tally:
    """Read every answer in full, only now that no clock runs."""
    found = [(reply, problem(reply, tokens, stream=stream)) for reply in tally.replies]
    tally.replies = [reply for reply, why in found if not why]
    tally.wrong += [why for _, why in found if why]
    tally.frames = sum(reply.body.count(b'"content":') for reply in tally.replies)
    return tally


def quantile_ms(seconds: Sequence[float], q: float) -> float:
    ordered = sorted(seconds)
    return round(1000 * ordered[min(len(ordered) - 1, int(q * len(ordered)))], 3) if ordered else float("nan")


async def stats(port: int) -> dict[str, Any]:
    connection = await Connection.open(port)
    reply = await connection.send(b"GET /stats HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
    connection.leave()
    found: dict[str, Any] = json.loads(reply.body)
    return found
