"""The HTTP edge over a scripted `answer`, in process or on a loopback port, with the OpenAI SDK as client."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import httpx2
import openai
import uvicorn
from litestar.types import ASGIApp, Receive, Scope, Send
from openai.types.shared import ErrorObject

from gateway.domain import (
    Answer,
    AnswerEvent,
    Caller,
    Delta,
    Finish,
    Model,
    Opening,
    Query,
    TokenLogprob,
    Usage,
)
from gateway.http.app import create_http
from gateway.http.backend import Backend, Readiness

SCENE_S = 300.0
"""How long an edge serves; reached only by a test that waits in vain."""
END_WITHIN_S = 60
"""For what a test has left open; reached only when it fails."""
KEY = "mico-secret"
MODEL = "demo"
NESTED = "org/family/demo-7b"
OPENING = Opening(
    "alpha", "aws", "us-east-1", attempts=1, queue_s=0.012, prompt_tokens=7, fingerprint="rev-1"
)
CALLERS = {
    KEY: Caller("key-1", "tenant-1"),
    "narrow": Caller("key-2", "tenant-2", models=frozenset({MODEL})),
}
READY = Readiness(True, "one site")
MODELS = (
    Model(MODEL, "rev-1", 1024, 1_700_000_000, "mico", frozenset({"chat", "guided", "logprobs", "tools"})),
    Model(NESTED, "rev-2", 2048, 1_700_000_001, "mico"),
)


def scripted(*texts: str, opening: Opening = OPENING, finish: Finish = Finish.STOP) -> Answer:
    """Every choice says the same texts, one token each; the choices take turns."""

    async def answer(query: Query) -> AsyncGenerator[AnswerEvent, None]:
        choices = range(query.sampling.n)
        yield opening
        for number, text in enumerate(texts, 1):
            last = finish if number == len(texts) else None
            for index in choices:
                yield Delta(index, text, number, finish=last, logprobs=_drawn(query, text))
        yield Usage(opening.prompt_tokens, len(texts) * len(choices))

    return answer


def fail(error: Exception, after: Sequence[AnswerEvent] = ()) -> Answer:
    async def answer(query: Query) -> AsyncGenerator[AnswerEvent, None]:
        for piece in after:
            yield piece
        raise error

    return answer


def play(*pieces: AnswerEvent) -> Answer:
    async def answer(query: Query) -> AsyncGenerator[AnswerEvent, None]:
        for piece in pieces:
            yield piece

    return answer


def _drawn(query: Query, text: str) -> tuple[TokenLogprob, ...]:
    if query.sampling.logprobs is None:
        return ()
    top = tuple(TokenLogprob(t, t.encode(), -p) for t, p in (("a", 0.5), ("b", 1.5)))
    return (TokenLogprob(text, text.encode(), -0.25, top[: query.sampling.logprobs]),)


@dataclass
class Script:
    """Stands for the rest of the gateway: plays one answer, remembers what it was asked and what ended."""

    answer: Answer = field(default_factory=lambda: scripted("Hello", " world"))
    models: Sequence[Model] = MODELS
    readiness: Readiness = READY
    settings: dict[str, Any] = field(default_factory=dict)
    queries: list[Query] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    async def _play(self, query: Query) -> AsyncGenerator[AnswerEvent, None]:
        self.queries.append(query)
        inner = self.answer(query)
        try:
            async for piece in inner:
                yield piece
        finally:
            await inner.aclose()
            self.ended.append(query.id)

    @property
    def query(self) -> Query:
        assert len(self.queries) == 1
        return self.queries[0]

    def backend(self) -> Backend:
        backend = Backend(
            answer=self._play,
            models=lambda: self.models,
            authenticate=CALLERS.get,
            ready=lambda: self.readiness,
            version="9.8.7",
            unix_time=lambda: 1_750_000_000.9,
        )
        backend = replace(backend, **self.settings)
        return replace(backend, known_models=backend.models)


@dataclass
class Edge:
    script: Script
    http: httpx2.AsyncClient
    sdk: openai.AsyncOpenAI

    async def post(self, path: str, body: Any, **headers: str) -> httpx2.Response:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.http.post(
            path, content=content, headers={"content-type": "application/json"} | names
        )

    async def chat(self, **fields: Any) -> httpx2.Response:
        return await self.post("/v1/chat/completions", chat_body(**fields))

    async def text(self, **fields: Any) -> httpx2.Response:
        return await self.post("/v1/completions", {"model": MODEL, "prompt": "Once"} | fields)


NO_DETAILS = {
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0},
}
"""Of the usage of an answer without reasoning, to a prompt of which nothing was cached."""


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]} | fields


def error_of(response: httpx2.Response, status: int) -> dict[str, Any]:
    """The error object, in exactly OpenAI's shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert ErrorObject.model_validate(error, strict=True).message
    return error


def events_of(raw: bytes) -> list[Any]:
    """The data of every event, strictly framed; the last one must be [DONE], which is left out."""
    assert raw.endswith(b"\n\n")
    blocks = [block for block in raw.decode().split("\n\n")[:-1] if not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks), blocks
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


class RequestBackend:
    """The backend of the script that is asked: scripts share an application, which takes 20 ms to build."""

    def __init__(self) -> None:
        self.current: ContextVar[Backend] = ContextVar("backend")
        self.current.set(Script().backend())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.current.get(), name)

    # What the application takes as it is built:

    def clock(self) -> float:
        return self.current.get().clock()

    def new_id(self) -> str:
        return self.current.get().new_id()

    def quota_status(self, *asked: Any) -> Any:
        return self.current.get().quota_status(*asked)


@cache
def shared_application() -> tuple[RequestBackend, ASGIApp]:
    backend: Any = RequestBackend()
    return backend, create_http(backend)


def application(script: Script) -> ASGIApp:
    backend = script.backend()
    shared, app = shared_application()

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        shared.current.set(backend)
        await app(scope, receive, send)

    return serve


@asynccontextmanager
async def in_process(script: Script, handlers: Sequence[Any] = ()) -> AsyncIterator[Edge]:
    own = handlers or "body_limit_bytes" in script.settings
    app = create_http(script.backend(), handlers) if own else application(script)
    transport = httpx2.ASGITransport(app)
    async with _clients(script, transport, "http://edge") as edge:
        yield edge


@asynccontextmanager
async def _clients(script: Script, transport: Any, url: str) -> AsyncIterator[Edge]:
    headers = {"authorization": f"Bearer {KEY}"}
    async with (  # without `verify` each client would load certificates for 45 ms
        httpx2.AsyncClient(transport=transport, base_url=url, headers=headers, verify=False) as http,
        httpx2.AsyncClient(transport=transport, verify=False) as carrier,
    ):
        sdk = openai.AsyncOpenAI(api_key=KEY, base_url=f"{url}/v1", http_client=carrier, max_retries=0)
        async with asyncio.timeout(SCENE_S):
            yield Edge(script, http, sdk)


class _Server(uvicorn.Server):
    def capture_signals(self) -> Any:
        return nullcontext()


@asynccontextmanager
async def on_loopback(script: Script, backend: Backend | None = None) -> AsyncIterator[tuple[Edge, int]]:
    """A real server, for what only a socket shows: clients that leave, bytes that arrive one by one."""
    app = create_http(backend or script.backend())
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    config = uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=END_WITHIN_S)
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with _clients(script, None, f"http://127.0.0.1:{port}") as edge:
            yield edge, port
    finally:
        server.should_exit = True
        await serving
        listener.close()


def run(
    scenario: Callable[[Edge], Awaitable[None]],
    answer: Answer | None = None,
    handlers: Sequence[Any] = (),
    **settings: Any,
) -> Script:
    """Plays a scenario in process. Whatever was asked must also have been closed."""
    script = Script(settings=settings)
    if answer is not None:
        script.answer = answer

    async def main() -> None:
        async with in_process(script, handlers) as edge:
            await scenario(edge)

    asyncio.run(main())
    assert sorted(script.ended) == sorted(query.id for query in script.queries)
    return script


def post(
    path: str, body: Any, answer: Answer | None = None, **settings: Any
) -> tuple[httpx2.Response, Script]:
    """One request, its response, and what the edge made of it."""
    responses: list[httpx2.Response] = []

    async def scenario(edge: Edge) -> None:
        responses.append(await edge.post(path, body))

    script = run(scenario, answer, **settings)
    return responses[0], script


def chat(answer: Answer | None = None, **fields: Any) -> tuple[httpx2.Response, Script]:
    return post("/v1/chat/completions", chat_body(**fields), answer)


def text(answer: Answer | None = None, **fields: Any) -> tuple[httpx2.Response, Script]:
    return post("/v1/completions", {"model": MODEL, "prompt": "Once"} | fields, answer)


def get(path: str, method: str = "GET", **headers: str) -> httpx2.Response:
    """Without a key unless one is given."""
    responses: list[httpx2.Response] = []

    async def scenario(edge: Edge) -> None:
        del edge.http.headers["authorization"]
        responses.append(await edge.http.request(method, path, headers=headers))

    run(scenario)
    return responses[0]


def refused(param: str | None, **fields: Any) -> dict[str, Any]:
    """The 400 that a chat with these fields gets; no query was asked."""
    response, script = chat(**fields)
    error = error_of(response, 400)
    assert error["param"] == param, error
    assert not script.queries
    return error
