"""Runs a gateway replica with batches in process: real HTTP application, scripted sites over real gRPC."""

from __future__ import annotations

import asyncio
import json
import time
from base64 import b64decode
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx2
import openai
from sqlalchemy.exc import OperationalError

from gateway.admin.access import Access
from gateway.admin.batches import batch_reads
from gateway.admin.tuning import tuning_reads
from gateway.batches.lifecycle import Batches, open_batches
from gateway.batches.values import BatchLimits
from gateway.domain import Caller
from gateway.http.app import create_http
from gateway.http.backend import Backend, Readiness
from gateway.http.batches import batch_routes
from gateway.http.files import file_routes
from gateway.http.fine_tuning import tuning_routes
from gateway.http.message_batches import message_batch_routes
from gateway.job_host import JobHost
from gateway.query.answer import answer
from gateway.query.targets import NamedModels
from gateway.routing.model_routes import ModelRoute
from gateway.side_work import SideWork
from gateway.tuning.lifecycle import Tuning, open_tuning
from gateway.tuning.values import TuningLimits
from tests.support.fakes.federation import Scene, ScriptedSite, scene, until
from tests.support.server_abilities import embed, to_base64
from wire import federation_pb2 as pb

CALLERS = {
    "one": Caller("key-1", "tenant-1"),
    "two": Caller("key-2", "tenant-2"),
    "boss": Caller("key-3", "ops", admin=True),
    "one-base": Caller("key-4", "tenant-1", models=frozenset({"m"})),
    "one-other": Caller("key-5", "tenant-1", models=frozenset({"other"})),
    "two-base": Caller("key-6", "tenant-2", models=frozenset({"m"})),
}
CALLERS_BY_ID = {caller.key_id: caller for caller in CALLERS.values()}
LEASE_S = 0.6
POLL_S = 0.05
"""How often a replica looks for jobs of the kind that a test is about, and a test whether they are done."""
IDLE_POLL_S = LEASE_S / 2


@dataclass
class Replica:
    """`asked`: the prompts that reached a site, in order; `assigned`: the messages that they came in. While
    `open` is not set, sites answer nothing; `held` counts the prompts that wait there. A prompt for which
    `fails` is true fails at its site.
    """

    scene: Scene
    batches: Batches
    tuning: Tuning
    http: httpx2.AsyncClient
    passed_s: list[float]
    asked: list[str] = field(default_factory=list)
    assigned: list[pb.Assign] = field(default_factory=list)
    open: asyncio.Event = field(default_factory=asyncio.Event)
    held: int = 0
    fails: Callable[[str], bool] = lambda prompt: False
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    orders: asyncio.Queue[tuple[ScriptedSite, pb.GatewayMessage]] = field(default_factory=asyncio.Queue)

    def pass_time(self, seconds: float) -> None:
        self.passed_s[0] += seconds

    def sdk(self, key: str = "one") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            api_key=key, base_url="http://edge/v1", http_client=self.http, max_retries=0
        )

    async def raw(self, method: str, path: str, key: str = "one", **more: Any) -> httpx2.Response:
        headers = {"authorization": f"Bearer {key}", **more.pop("headers", {})}
        return await self.http.request(method, f"http://edge{path}", headers=headers, **more)

    async def upload(self, content: bytes, key: str = "one") -> str:
        file = await self.sdk(key).files.create(file=("in.jsonl", content), purpose="batch")
        return file.id

    async def submit(
        self, content: bytes, key: str = "one", endpoint: str = "/v1/chat/completions", **asked: Any
    ) -> str:
        file_id = await self.upload(content, key)
        endpoint_: Any = endpoint
        batch = await self.sdk(key).batches.create(
            input_file_id=file_id, endpoint=endpoint_, completion_window="24h", **asked
        )
        return batch.id

    async def ended(self, batch_id: str, key: str = "one") -> Any:
        return await self.reached(batch_id, "completed", "failed", "expired", "cancelled", key=key)

    async def reached(self, batch_id: str, *statuses: str, key: str = "one") -> Any:
        async with asyncio.timeout(60):
            while True:
                batch = await self.sdk(key).batches.retrieve(batch_id)
                if batch.status in statuses:
                    return batch
                await asyncio.sleep(POLL_S)

    async def lines(self, file_id: str | None, key: str = "one") -> list[dict[str, Any]]:
        if file_id is None:
            return []
        content = await self.sdk(key).files.content(file_id)
        return [json.loads(line) for line in content.text.splitlines()]

    async def die(self) -> None:
        """Die as by `kill -9`, as far as the database can tell: no outcome, no release, no more polls."""
        runner: Any = self.batches.runner
        ledger = runner._context.ledger

        async def gone(*_: object, **__: object) -> None:
            raise OperationalError("", {}, OSError("this process is dead"))

        for name in ("write", "release", "change", "lease"):
            setattr(ledger, name, gone)
        for _, task in runner._jobs.values():
            task.cancel()
        await asyncio.gather(*(task for _, task in runner._jobs.values()), return_exceptions=True)

    async def serve(self, site: ScriptedSite) -> None:
        """Answer every assigned query, and report often enough to stay fresh."""
        while True:
            try:
                async with asyncio.timeout(0.2):
                    message = await site.inbox.get()
            except TimeoutError:
                await site.report()
                continue
            if message.WhichOneof("body") == "assign":
                await self._answer(site, message.assign)
            else:
                self.orders.put_nowait((site, message))

    async def _answer(self, site: ScriptedSite, assign: pb.Assign) -> None:
        prompt = assign.chat.messages[-1].content if assign.HasField("chat") else assign.text
        inputs = json.loads(assign.pooling.body_json or '{"input": []}')["input"]
        self.asked.append(prompt)
        self.assigned.append(assign)
        await site.send(accepted=pb.Accepted(attempt_id=assign.attempt_id, prompt_tokens=7))
        self.held += 1
        await self.open.wait()
        self.held -= 1
        if self.fails(prompt):
            await site.step(assign, "", 0, finish=pb.Delta.FAILED, error="the engine broke")
        elif inputs:
            pooled = [pb.Pooled(index=index, vector=to_vector(each)) for index, each in enumerate(inputs)]
            await site.step(assign, "", 0, finish=pb.Delta.STOP, pooled=pooled)
        else:
            took = {
                "timings": pb.Timings(cached_prompt_tokens=self.cached_tokens),
                "reasoning_tokens": self.reasoning_tokens,
            }
            await site.step(assign, f"re: {prompt}", 3, finish=pb.Delta.STOP, **took)
        await site.report()


def to_vector(text: str) -> bytes:
    return b64decode(to_base64(embed(text, 8)))


async def no_refresh() -> None:
    """Read no keys: all of them are known."""


@asynccontextmanager
async def replica(
    url: str,
    *,
    sites: Sequence[str] = ("a", "b"),
    slots: int = 4,
    name: str = "r1",
    features: Sequence[str] = ("chat", "logprobs", "resume"),
    caller: Callable[[str], Caller | None] = CALLERS_BY_ID.get,
    refresh_keys: Callable[[], Awaitable[None]] = no_refresh,
    trains: pb.Trains | None = None,
    regions: Mapping[str, str] = {},
    routes: Callable[[], Mapping[str, ModelRoute]] = dict,
    tuning_limits: TuningLimits | None = None,
    lease_s: float = LEASE_S,
    **limits: Any,
) -> AsyncIterator[Replica]:
    trained = trains is not None or tuning_limits is not None
    batch_poll_s, tuning_poll_s = (IDLE_POLL_S, POLL_S) if trained else (POLL_S, IDLE_POLL_S)
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(scene(routes=routes))
        passed_s, side_work = [0.0], SideWork()
        backend = Backend(
            answer=partial(answer, here.gateway),
            models=NamedModels(here.gateway),
            routes=routes,
            authenticate=CALLERS.get,
            ready=lambda: Readiness(True, "yes"),
            version="test",
            unix_time=lambda: time.time() + passed_s[0],
        )
        host = JobHost(url, name, here.gateway, caller, refresh_keys, backend.unix_time, side_work)
        batches = await stack.enter_async_context(
            open_batches(host, BatchLimits(**limits), lease_s=lease_s, poll_s=batch_poll_s)
        )
        tuning = await stack.enter_async_context(
            open_tuning(
                host,
                tuning_limits or TuningLimits(),
                lease_s=lease_s,
                poll_s=tuning_poll_s,
                tick_s=tuning_poll_s,
            )
        )
        access = Access(backend, CALLERS_BY_ID.get, b"session key")
        handlers = [
            *file_routes(backend, batches.files, batches.limits),
            *batch_routes(backend, batches.ledger, batches.limits, batches.runner.wake),
            *message_batch_routes(
                backend, batches.files, batches.ledger, batches.limits, batches.runner.wake
            ),
            *batch_reads(access, batches.ledger),
            *tuning_routes(backend, tuning.service),
            *tuning_reads(access, backend, tuning.service),
        ]
        transport = httpx2.ASGITransport(create_http(backend, handlers))
        http = await stack.enter_async_context(httpx2.AsyncClient(transport=transport))
        this = Replica(here, batches, tuning, http, passed_s)
        this.open.set()
        about: dict[str, Any] = {"features": features, "slots": slots, "trains": trains}
        serving = [
            asyncio.create_task(this.serve(await here.site(site, region=regions.get(site, "here"), **about)))
            for site in sites
        ]
        try:
            yield this
        finally:
            await batches.runner.close(5.0)  # what runs may finish while there are sites
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)


def chat_line(number: int, **more: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": f"prompt {number}"}], "max_tokens": 8}
    return {
        "custom_id": f"c-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body | more,
    }


def jsonl(*lines: Any) -> bytes:
    return b"".join(
        (each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in lines
    )


async def asked_at_least(here: Replica, count: int) -> None:
    await until(lambda: len(here.asked) >= count, f"{count} lines reached a site")


def answers_by_id(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines), "a line was answered twice"
    return found


async def until_two_are_held(here: Replica, batch_id: str) -> int:
    """Wait until only the lines that the two sites hold back run. Return the number of outcomes."""
    async with asyncio.timeout(60):
        while True:
            counts = (await here.sdk().batches.retrieve(batch_id)).request_counts
            assert counts is not None
            if here.held == 2 and counts.completed == len(here.asked) - 2:
                return counts.completed
            await asyncio.sleep(POLL_S)
