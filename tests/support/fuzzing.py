"""Requests that no good client sends, each drawn from a seed, and the checks of a gateway's answers.

Every case is a coroutine over a fresh connection; it returns what came back, empty where the client left.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import string
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tests.support.good_bodies import GOOD_MESSAGE, GOOD_RESPONSE
from tests.support.scripted_upstream import prompt

ANSWERED_WITHIN_S = 60.0
HUGE_BYTES = 10**9
PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/models",
    "/v1/models/m",
    "/v1/files",
    "/v1/batches",
    "/v1/embeddings",
    "/admin/api/sites",
    "/admin/api/keys",
    "/admin/api/routes",
    "/admin/api/models",
    "/health",
    "/nowhere",
    "/%00/..//",
)
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "BREW")
TYPES = (
    "application/json",
    "text/plain",
    "multipart/form-data; boundary=b",
    "multipart/form-data",
    "",
    "\xff",
)
FIELDS = (
    *("model", "messages", "prompt", "max_tokens", "n", "temperature", "top_p", "stop", "seed", "stream"),
    *("stream_options", "tools", "tool_choice", "response_format", "logprobs", "top_logprobs", "logit_bias"),
    *("user", "metadata", "echo", "suffix", "priority", "min_tokens", "stop_token_ids", "frequency_penalty"),
    *("input", "instructions", "text", "reasoning", "include", "store", "max_output_tokens", "truncation"),
    *("system", "thinking", "output_config", "stop_sequences", "reasoning_effort", "chat_template_kwargs"),
)


@dataclass(slots=True)
class RandomRequest:
    """Random values of one request."""

    random: random.Random
    key: str
    model: str
    path: str = ""  # of the latest request

    def text(self, most: int = 40) -> str:
        letters = string.printable + "äß€😀\u0000\u202e\ufffd"
        return "".join(self.random.choices(letters, k=self.random.randrange(most)))

    def value(self, depth: int = 0) -> Any:
        plain: list[Any] = [None, True, 0, -1, 1, 1.5, 10**30, -(10**30), 1e308, "", "m", self.text(), [], {}]
        if depth > 3 or self.random.random() < 0.7:
            return self.random.choice(plain)
        if self.random.random() < 0.5:
            return [self.value(depth + 1) for _ in range(self.random.randrange(4))]
        return {self.text(8): self.value(depth + 1) for _ in range(self.random.randrange(4))}

    def body(self) -> bytes:
        """Return a chat with some fields replaced by anything; now and then cut, or not JSON at all."""
        body: dict[str, Any] = {"model": self.model, "messages": self.messages(), "max_tokens": 8}
        for _ in range(self.random.randrange(4)):
            body[self.random.choice(FIELDS)] = self.value()
        raw = json.dumps(body).encode()
        spoilt = self.random.random()
        if spoilt < 0.1:
            return raw[: self.random.randrange(len(raw))]
        if spoilt < 0.2:
            return self.random.randbytes(self.random.randrange(200))
        return b"[" * 50_000 if spoilt < 0.22 else raw

    def altered(self, whole: dict[str, Any]) -> bytes:
        """Return a good body with up to four values anywhere in it replaced by anything, or left out."""
        body = json.loads(json.dumps(whole)) | {"model": self.model}
        for _ in range(self.random.randrange(5)):
            places = [(body, key) for key in body if key != "model"]
            for holder, key in places:
                inner = holder[key]
                places += [(inner, each) for each in (inner if isinstance(inner, dict) else ())]
                places += [(inner, at) for at in range(len(inner) if isinstance(inner, list) else 0)]
            if not places:
                break
            holder, key = self.random.choice(places)
            if self.random.random() < 0.2:
                del holder[key]
            else:
                holder[key] = self.value()
        return json.dumps(body).encode()

    def messages(self) -> Any:
        if self.random.random() < 0.1:
            return self.value()
        roles = ("user", "system", "assistant", "tool", "developer", "", None)
        content = (
            self.text(200),
            prompt(3, 1, paced=False),
            None,
            [{"type": "text", "text": "x"}],
            self.value(),
        )
        return [
            {"role": self.random.choice(roles), "content": self.random.choice(content)}
            for _ in range(self.random.randrange(1, 4))
        ]

    def headers(self) -> list[str]:
        scheme, secret = self.random.choice(("Bearer", "Basic", "")), self.random.choice(("", "x", "é"))
        some = [
            f"x-request-id: {self.text(200)}".replace("\r", "").replace("\n", ""),
            f"authorization: {scheme} {secret}",
            f"content-type: {self.random.choice(TYPES)}",
            f"traceparent: 00-{'0' * 32}-zz-01",
            "content-length: -5",
            "transfer-encoding: gzip, chunked",
            "expect: 100-continue",
            "upgrade: websocket\r\nconnection: upgrade",
            "origin: null",
            "host: a b",
            "x-long: " + "y" * self.random.choice((10, 10_000, 90_000)),
            "x-forwarded-for: 127.0.0.1\r\nx-forwarded-proto: https",
        ]
        return self.random.sample(some, self.random.randrange(4))

    def good(self, tokens: int, *, stream: bool) -> bytes:
        """Return a chat that is answered slowly, for clients that behave badly later."""
        messages = [{"role": "user", "content": prompt(tokens, 1, paced=True)}]
        body = {"model": self.model, "messages": messages, "max_tokens": 4 * tokens, "stream": stream}
        return self.request("POST", PATHS[0], json.dumps(body).encode())

    def request(self, method: str, path: str, body: bytes, length: int | None = None) -> bytes:
        self.path = path
        length = len(body) if length is None else length
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self.key}\r\n"
        tail = f"content-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n"
        return (head + tail).encode() + body


class RawConnection:
    """One connection; `max_received` keeps the kernel's buffer small for readers that do not read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    @classmethod
    async def open(cls, port: int, max_received: int = 0) -> RawConnection:
        plug = socket.socket()
        plug.setblocking(False)
        if max_received:
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, max_received)
        await asyncio.get_running_loop().sock_connect(plug, ("127.0.0.1", port))
        return cls(*await asyncio.open_connection(sock=plug, limit=4096 if max_received else 2**20))

    async def send(self, raw: bytes) -> None:
        self._writer.write(raw)
        with suppress(ConnectionError):
            await self._writer.drain()

    async def rest(self) -> bytes:
        came = b""
        with suppress(ConnectionError):
            while part := await self.reader.read(65536):
                came += part
        return came

    async def some(self, count: int) -> bytes:
        with suppress(ConnectionError):
            return await self.reader.read(count)
        return b""

    def leave(self) -> None:
        self._writer.transport.abort()


Case = Callable[[RawConnection, RandomRequest], Awaitable[bytes]]


async def odd_body(wire: RawConnection, draw: RandomRequest) -> bytes:
    await wire.send(draw.request("POST", draw.random.choice(PATHS[:2]), draw.body()))
    return await wire.rest()


async def odd_response(wire: RawConnection, draw: RandomRequest) -> bytes:
    await wire.send(draw.request("POST", RESPONSES, draw.altered(GOOD_RESPONSE)))
    return await wire.rest()


async def odd_message(wire: RawConnection, draw: RandomRequest) -> bytes:
    path = draw.random.choice((MESSAGES, MESSAGES, MESSAGES + "/count_tokens"))
    await wire.send(draw.request("POST", path, draw.altered(GOOD_MESSAGE)))
    return await wire.rest()


async def odd_place(wire: RawConnection, draw: RandomRequest) -> bytes:
    method, path = draw.random.choice(METHODS), draw.random.choice(PATHS)
    await wire.send(draw.request(method, path, draw.body() if draw.random.random() < 0.5 else b""))
    return await wire.rest()


async def odd_headers(wire: RawConnection, draw: RandomRequest) -> bytes:
    body = draw.body()
    own = [
        f"authorization: Bearer {draw.key}",
        "content-type: application/json",
        f"content-length: {len(body)}",
    ]
    lines = [f"POST {PATHS[0]} HTTP/1.1", "host: x", "connection: close", *draw.headers(), *own]
    await wire.send("\r\n".join(lines).encode("utf-8") + b"\r\n\r\n" + body)
    return await wire.rest()


async def noise(wire: RawConnection, draw: RandomRequest) -> bytes:
    await wire.send(draw.random.randbytes(draw.random.randrange(1, 400)) + b"\r\n\r\n")
    return await wire.rest()


async def vanishing_stream(wire: RawConnection, draw: RandomRequest) -> bytes:
    await wire.send(draw.good(500, stream=True))
    await wire.some(draw.random.randrange(1, 2000))
    return b""


async def vanishing_unary(wire: RawConnection, draw: RandomRequest) -> bytes:
    await wire.send(draw.good(500, stream=False))
    await asyncio.sleep(draw.random.random() * 0.3)
    return b""


async def slow_reader(wire: RawConnection, draw: RandomRequest) -> bytes:
    """Read a little, rest, then read all or leave."""
    await wire.send(draw.good(30, stream=True))
    came = b""
    for _ in range(5):
        came += await wire.some(64)
        await asyncio.sleep(0.05)
    return came + await wire.rest() if draw.random.random() < 0.7 else b""


async def slow_body(wire: RawConnection, draw: RandomRequest) -> bytes:
    """Send byte by byte; every second client leaves before the end."""
    raw = draw.good(2, stream=False)
    end = len(raw) if draw.random.random() < 0.5 else draw.random.randrange(len(raw))
    await wire.send(raw[: max(0, end - 20)])
    for at in range(max(0, end - 20), end):
        await wire.send(raw[at : at + 1])
        await asyncio.sleep(0.005)
    return await wire.rest() if end == len(raw) else b""


async def huge_announced(wire: RawConnection, draw: RandomRequest) -> bytes:
    """Announce a gigabyte, which is refused at once: hardly any of it is ever sent."""
    await wire.send(draw.request("POST", draw.random.choice(PATHS[:2]), b" " * 1000, HUGE_BYTES))
    return await wire.rest()


async def huge_in_chunks(wire: RawConnection, draw: RandomRequest) -> bytes:
    """Send a gigabyte of unknown length: it is refused once over the limit, and cut if it goes on."""
    head = f"POST {PATHS[0]} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {draw.key}\r\nconnection: close\r\n"
    await wire.send(f"{head}content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n".encode())
    coming = asyncio.create_task(wire.rest())
    chunk = b"%x\r\n%s\r\n" % (2**20, b" " * 2**20)
    for _ in range(HUGE_BYTES // 2**20):
        if coming.done():
            break
        await wire.send(chunk)
        await asyncio.sleep(0)
    return await coming


CASES: dict[Case, int] = {
    odd_body: 40,
    odd_response: 10,
    odd_message: 10,
    odd_place: 20,
    odd_headers: 16,
    noise: 5,
    vanishing_stream: 7,
    vanishing_unary: 5,
    slow_reader: 3,
    slow_body: 3,
    huge_announced: 1,
}
"""With the weight of each; chunked gigabytes are sent beside them, a few in all."""


@dataclass(slots=True)
class Findings:
    """The outcome of a campaign. Any of `wrong` breaks a promise."""

    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


async def campaign(
    port: int,
    key: str,
    model: str,
    *,
    count: int,
    seed: int,
    cases: Mapping[Case, int] = CASES,
) -> Findings:
    found, numbers = Findings(), iter(range(count))

    async def client() -> None:
        for number in numbers:
            draw = RandomRequest(random.Random(f"{seed}-{number}"), key, model)
            (case,) = draw.random.choices(list(cases), list(cases.values()))
            await run_case(found, port, case, draw, f"{case.__name__} {number}")

    await asyncio.gather(*(client() for _ in range(24)))
    return found


async def run_case(found: Findings, port: int, case: Case, draw: RandomRequest, name: str) -> None:
    wire = await RawConnection.open(port, 4096 if case is slow_reader else 0)
    try:
        came = await asyncio.wait_for(case(wire, draw), ANSWERED_WITHIN_S)
    except TimeoutError:
        found.wrong.append(f"{name}: no end within {ANSWERED_WITHIN_S:.0f} s")
        return
    finally:
        wire.leave()
    came = came.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    status = came[9:12].decode("latin-1") if came.startswith(b"HTTP/1.1 ") else "none"
    found.statuses[status] += 1
    if why := problem(came, status, draw.path):
        found.wrong.append(f"{name}: {why}: {came[:300]!r}")


def problem(came: bytes, status: str, path: str = "") -> str:
    """Return how the answer is improper, empty if it is not. Input that is not HTTP is refused by the server
    without an id.
    """
    head, _, body = came.partition(b"\r\n\r\n")
    if status == "none" or b"Invalid HTTP request received" in body:
        return "" if status in {"none", "400"} else "refused as no HTTP with another status"
    if b"\r\nx-request-id: " not in head.lower():
        return "no request id"
    if status >= "400" and body and not (_is_error(body) or _is_anthropics_error(body, path)):
        return "no error body"
    if status == "500":
        return "an unexpected failure"
    return ""


def _is_anthropics_error(body: bytes, path: str) -> bool:
    if not path.startswith(MESSAGES):
        return False
    try:
        whole = json.loads(body)
        return set(whole) == {"type", "error", "request_id"} and set(whole["error"]) == {"type", "message"}
    except (ValueError, KeyError, TypeError):
        return False


def _is_error(body: bytes) -> bool:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return False
    return isinstance(error, dict) and set(error) == {"message", "type", "param", "code"}
