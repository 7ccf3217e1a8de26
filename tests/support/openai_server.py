"""A server of the OpenAI kind on loopback that does what its test says: answers, hangs, fails, lies, dies.

Answers a prompt with its own letters, again and again, one letter per token, until `max_tokens`. An image
it reads as what it sees there: its size and colour. What begins with an answer of its own it goes on with: as
vLLM does if asked to, and after a text as everybody does.

`python -m tests.support.openai_server` is one in a process of its own, to be killed: it prints its URL, says
half of each answer that it begins and then waits; what another has begun it ends.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import cycle, islice
from typing import Any

from tests.support.server_abilities import IMAGE_TOKENS, embed, images_in, read_content, relevance, to_base64

THOUGHTS = 2
TURNS = 8
"""Of the event loop, more than there are between a connection's acceptance and its first look at it."""


class Mood(Enum):
    ANSWERING = auto()
    FAILING = auto()  # 500
    FULL = auto()  # 429
    GARBAGE = auto()
    HALF = auto()  # breaks off after the first token, once `go` is set
    SILENT = auto()  # takes the request and says nothing
    TOO_LONG = auto()  # 400 for the context
    INVALID = auto()


@dataclass
class OpenAIServer:
    mood: Mood = Mood.ANSWERING
    models: tuple[str, ...] = ("letters",)
    adapters: dict[str, str] = field(
        default_factory=dict
    )  # loaded now, as vLLM lists them, by name: the base
    owner: str = "somebody"
    health: int = 404  # what /health answers
    metrics: str | None = None  # the page, None for 404; {running} and {waiting} are filled in
    key: str = ""
    repeats_keys: bool = False  # in what it says when it refuses one
    counts: bool = True  # whether it sends usage
    context: int | None = 64
    refuses_excess: bool = False  # a prompt and `max_tokens` that the context has no room for, as vLLM does
    fails_at: str = ""  # a text in requests that it answers with 500
    refuses_in_stream: bool = False  # what is too long or too much, as SGLang did
    pace_s: float = 0.0  # from letter to letter
    thinks: str = ""  # where it says the first two letters of a chat's answer, instead of in its content
    counts_thoughts: bool = False
    ends: str = "length"
    cached_tokens: int = 0
    dimensions: int = 8
    knows_base64: bool = True
    about: dict[str, Any] = field(default_factory=dict)  # pages about itself, by path
    waits_halfway: bool = False  # in answers that it begins, until the client leaves
    tls: ssl.SSLContext | None = None
    port: int = 0
    running: int = 0
    waiting: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    drops: int = 0  # so many requests meet a connection that is closed
    pages: dict[str, Callable[[Any], object]] = field(default_factory=dict)  # more paths: a body to an answer
    left: int = 0  # answers whose client went away in the middle
    connections: int = 0
    listings: int = 0
    go: asyncio.Event = field(default_factory=asyncio.Event)  # cleared: answers stop after their first token

    def __post_init__(self) -> None:
        self.go.set()
        self._open: set[asyncio.StreamWriter] = set()
        self._dead = False
        self._changed = asyncio.Condition()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def start(self) -> None:
        self._dead = False
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def die(self) -> None:
        """As a killed process: every connection breaks, also one just made, and nobody listens."""
        assert self._server is not None
        self._dead = True
        for listening in self._server.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
        for writer in list(self._open):
            writer.transport.abort()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        self._server.close()
        await self._server.wait_closed()

    async def until(self, holds: Any) -> None:
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(holds)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._dead:
            writer.transport.abort()
            return
        self._open.add(writer)
        self.connections += 1
        try:
            while (head := await _head(reader)) is not None:
                _, _, headers = head
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await self._reply(head, body, reader, writer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._open.discard(writer)
            writer.close()

    async def _reply(self, head: tuple[str, str, Any], body: bytes, reader: Any, writer: Any) -> None:
        method, path, headers = head
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            shown = f": {headers.get('authorization')}" if self.repeats_keys else ""
            _whole(writer, 401, {"error": {"message": f"the key is wrong{shown}"}})
        elif method == "POST" and self.drops:
            self.drops -= 1
            writer.transport.abort()
        elif path in self.pages:
            _whole(writer, 200, self.pages[path](json.loads(body or b"null")))
        elif path == "/health":
            _whole(writer, self.health if self.models else 200, "")
        elif path == "/v1/models":
            self._list(writer)
            await self._notify()
        elif path == "/metrics" and self.metrics is not None:
            page = self.metrics.replace("{running}", str(self.running)).replace(
                "{waiting}", str(self.waiting)
            )
            _whole(writer, 200, page)
        elif method == "GET" and path in self.about:
            _whole(writer, 200, self.about[path])
        elif method == "POST" and self.adapters and not self._has(json.loads(body).get("model")):
            _whole(writer, 404, {"error": {"message": "The model does not exist.", "code": 404}})
        elif method == "POST":
            self.asked.append(json.loads(body))
            self.running += 1
            await self._notify()
            try:
                await self._answer(self.asked[-1], path, reader, writer)
            finally:
                self.running -= 1
                await self._notify()
        else:
            _whole(writer, 404, {"detail": "Not Found"})

    def _list(self, writer: Any) -> None:
        """List the models; vLLM stamps a card when it writes it, and leaves the context of adapters out."""
        if not self.models:
            _whole(writer, 500, "Internal Server Error")
            return
        self.listings += 1
        cards: list[dict[str, Any]] = [
            {"id": each, "owned_by": self.owner, "max_model_len": self.context} for each in self.models
        ]
        for name, base in self.adapters.items():
            cards.append({"id": name, "root": f"/lora/{name}", "parent": base, "created": self.listings})
        _whole(writer, 200, {"data": cards})

    def _has(self, model: object) -> bool:
        return model in self.models or model in self.adapters

    async def _answer(self, asked: dict[str, Any], path: str, reader: Any, writer: Any) -> None:
        match self.mood:
            case _ if self.mood is Mood.FAILING or (self.fails_at and self.fails_at in json.dumps(asked)):
                _whole(writer, 500, {"error": {"message": "the device is lost"}})
            case Mood.FULL:
                self._refuse(writer, {"message": "slow down", "code": 429}, 429, "retry-after: 20\r\n")
            case Mood.TOO_LONG:
                message = "This model's maximum context length is 64 tokens."
                self._refuse(writer, {"message": message, "code": 400, "param": "messages"})
            case Mood.INVALID:
                _whole(
                    writer, 400, {"object": "error", "message": "top_p must be in (0, 1]", "param": "top_p"}
                )
            case Mood.GARBAGE:
                _begin(writer)
                _chunk(writer, b"data: {nonsense\n\n")
                _chunk(writer, b"")
            case Mood.SILENT:
                await self._until_left(reader)
            case _ if path.endswith(("/embeddings", "/rerank")):
                if self.go.is_set() or await self._may_go_on(reader):
                    _whole(writer, 200, self._pooled(asked, path))
            case _ if self.refuses_excess and "max_tokens" in asked and self._has_no_room(asked):
                message = "'max_tokens' is too large. This model's maximum context length is 64 tokens."
                self._refuse(writer, {"message": message, "code": 400, "param": "max_tokens"})
            case _:
                await self._stream(asked, path, reader, writer)

    def _refuse(self, writer: Any, error: dict[str, Any], status: int = 400, more: str = "") -> None:
        if not self.refuses_in_stream:
            _whole(writer, status, {"error": error}, more)
            return
        _begin(writer)
        _event(writer, {"error": error})
        _chunk(writer, b"data: [DONE]\n\n")
        _chunk(writer, b"")

    def _has_no_room(self, asked: dict[str, Any]) -> bool:
        return _prompt_tokens(asked) + asked["max_tokens"] > (self.context or 0)

    async def _stream(self, asked: dict[str, Any], path: str, reader: Any, writer: Any) -> None:
        _begin(writer)
        letters = text(asked)
        half = len(letters) // 2 if self.waits_halfway and not _is_begun(asked) else None
        for number, letter in enumerate(letters, start=1):
            finish = self.ends if number == len(letters) else None
            content = self.thinks if self.thinks and number <= THOUGHTS else "content"
            for index in range(asked.get("n", 1)):
                _event(writer, _piece(path, index, {content: letter}, finish) | _counted(asked, number))
            await writer.drain()
            if self.pace_s:
                await asyncio.sleep(self.pace_s)
            if number == half:
                await self._until_left(reader)
                return
            if self.mood is Mood.HALF:
                await self.go.wait()
                writer.transport.abort()
                return
            if not self.go.is_set() and not await self._may_go_on(reader):
                return
        if self.counts and asked.get("stream_options", {}).get("include_usage"):
            used: dict[str, Any] = {
                "prompt_tokens": _prompt_tokens(asked),
                "completion_tokens": len(letters) * asked.get("n", 1),
                "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            }
            if self.counts_thoughts:
                used["completion_tokens_details"] = {"reasoning_tokens": THOUGHTS if self.thinks else 0}
            _event(writer, {"choices": [], "usage": used})
        _chunk(writer, b"data: [DONE]\n\n")
        _chunk(writer, b"")

    def _pooled(self, asked: dict[str, Any], path: str) -> Any:
        """Return embeddings or ranks, the latter as text-embeddings-inference does where it is asked so."""
        used = {"usage": {"prompt_tokens": 7, "total_tokens": 7}} if self.counts else {}
        if path.endswith("/embeddings"):
            vectors = [embed(each, asked.get("dimensions", self.dimensions)) for each in asked["input"]]
            in_base64 = asked["encoding_format"] == "base64" and self.knows_base64
            shown = map(to_base64, vectors) if in_base64 else vectors
            data = [
                {"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(shown)
            ]
            return {"object": "list", "data": data[::-1], "model": asked["model"], **used}
        documents = asked["texts"] if "texts" in asked else asked["documents"]
        scores = [relevance(asked["query"], each) for each in documents]
        name = "score" if "texts" in asked else "relevance_score"
        results = [{"index": index, name: score} for index, score in enumerate(scores)]
        return results if "texts" in asked else {"id": "r", "results": results, **used}

    async def _may_go_on(self, reader: asyncio.StreamReader) -> bool:
        going = asyncio.create_task(self.go.wait())
        leaving = asyncio.create_task(self._until_left(reader))
        done, _ = await asyncio.wait((going, leaving), return_when=asyncio.FIRST_COMPLETED)
        for task in (going, leaving):
            task.cancel()
        await asyncio.gather(going, leaving, return_exceptions=True)  # until then `leaving` reads
        return going in done

    async def _until_left(self, reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):
            await reader.read(1)
        self.left += 1
        await self._notify()


def text(asked: dict[str, Any]) -> str:
    """Return the text of the answer to a request."""
    read = "".join(map(read_content, _read(asked["messages"]))) if "messages" in asked else asked["prompt"]
    period = next(n for n in range(1, len(read) + 1) if read.startswith(read[n:]))
    letters = cycle(read[:period])
    return "".join(islice(letters, len(read) % period, len(read) % period + asked.get("max_tokens", 4)))


def _read(messages: list[dict[str, Any]]) -> list[Any]:
    """The last question, and what there is of an answer to it."""
    asked = next(n for n in range(len(messages) - 1, -1, -1) if messages[n]["role"] == "user")
    return [each["content"] for each in messages[asked:]]


def _is_begun(asked: dict[str, Any]) -> bool:
    """Return whether the answer has begun."""
    return "messages" in asked and len(_read(asked["messages"])) > 1


@asynccontextmanager
async def openai_server(**settings: Any) -> AsyncIterator[OpenAIServer]:
    server = OpenAIServer(**settings)
    await server.start()
    try:
        yield server
    finally:
        await server.die()


async def _head(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str]] | None:
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = raw.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines if ": " in line)
    headers |= {line.split(": ", 1)[0].lower(): line.split(": ", 1)[1] for line in lines if ": " in line}
    method, path, _ = first.split(" ")
    return method, path, headers


def _whole(writer: asyncio.StreamWriter, status: int, body: Any, more: str = "") -> None:
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    writer.write(f"HTTP/1.1 {status} Told\r\ncontent-length: {len(data)}\r\n{more}\r\n".encode() + data)


def _begin(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    _chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


def _piece(path: str, index: int, delta: dict[str, str], finish: str | None) -> dict[str, Any]:
    said = {"delta": delta} if path.endswith("chat/completions") else {"text": delta["content"]}
    return {"choices": [{"index": index, "finish_reason": finish, **said}]}


def _counted(asked: dict[str, Any], tokens: int) -> dict[str, Any]:
    if not asked.get("stream_options", {}).get("continuous_usage_stats"):
        return {}
    return {
        "usage": {"prompt_tokens": _prompt_tokens(asked), "completion_tokens": tokens * asked.get("n", 1)}
    }


def _prompt_tokens(asked: dict[str, Any]) -> int:
    return 7 + IMAGE_TOKENS * images_in(asked.get("messages", []))


async def _alone() -> None:
    async with openai_server(owner="vllm", context=1000, pace_s=0.02, waits_halfway=True) as server:
        print(server.url, flush=True)  # noqa: T201
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_alone())
