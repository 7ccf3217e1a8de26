"""A gateway that does what its test says, over real gRPC, and a site whose engine the test steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc

from site_engine.engine.engine_thread import EngineThread
from site_engine.engine_client import Listener
from site_engine.federation.link import Link, Links, LinkTimeouts, open_channel
from site_engine.federation.site import Site
from site_engine.native import NativeEngine
from site_engine.text.tokenize import PromptTokenizer
from tests.support.site_fakes import HELLO, VOCABULARY, FakeClock, FakeEngine, FakeTokenizer
from wire import federation_pb2 as pb
from wire import federation_pb2_grpc

TOKEN = "let-me-in"
PATIENCE_S = 60.0
"""How long a test waits for what must come; reached only when it fails."""
SCENE_S = 300.0
"""How long a gateway serves; reached only by a test that waits in vain."""
FIXED_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536))
"""A stream takes in that many bytes unread, however fast the machine finds its loopback."""


class Session:
    """One stream of a site. What the site said is kept by kind in `heard`, in order in `log`."""

    def __init__(self, context: Any, metadata: dict[str, str], *, reads: bool) -> None:
        self._context = context
        self.metadata = metadata
        self.log: list[pb.SiteMessage] = []
        self.over = asyncio.Event()
        self.reads = asyncio.Event()
        if reads:
            self.reads.set()
        self._news = asyncio.Condition()
        self._hang_up = asyncio.Event()

    async def run(self) -> None:
        reading = asyncio.create_task(self._read())
        hanging_up = asyncio.create_task(self._hang_up.wait())
        try:
            await asyncio.wait((reading, hanging_up), return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
            hanging_up.cancel()
            self.over.set()

    async def _read(self) -> None:
        while True:
            if self.log:
                await self.reads.wait()
            message = await self._context.read()
            if message is grpc.aio.EOF:
                return
            async with self._news:
                self.log.append(message)
                self._news.notify_all()

    async def send(self, **body: Any) -> None:
        await self._context.write(pb.GatewayMessage(**body))

    async def welcome(self, name: str = "east", **more: Any) -> pb.Hello:
        hello = (await self.wait_for("hello"))[0]
        await self.send(welcome=pb.Welcome(gateway=name, heartbeat_s=PATIENCE_S, **more))
        return hello

    def hang_up(self) -> None:
        self._hang_up.set()

    async def ended(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.over.wait()

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S), self._news:
            await self._news.wait_for(holds)

    def received(self, kind: str) -> list[Any]:
        return [getattr(each, kind) for each in self.log if each.WhichOneof("body") == kind]

    async def wait_for(self, kind: str, count: int = 1) -> list[Any]:
        await self.until(lambda: len(self.received(kind)) >= count)
        return self.received(kind)

    async def served_models(self, *names: str) -> list[pb.Model]:
        """Return the models of the site once the latest that it has said are those of these names."""

        def latest() -> list[pb.Model]:
            said = self.received("models") or self.received("hello")
            return list(said[-1].models) if said else []

        await self.until(lambda: [each.id for each in latest()] == list(names))
        return latest()

    def deltas(self, attempt_id: str, index: int = 0) -> list[pb.Delta]:
        every = (delta for step in self.received("step") for delta in step.deltas)
        return [each for each in every if each.attempt_id == attempt_id and each.index == index]

    def text(self, attempt_id: str, index: int = 0) -> str:
        return "".join(each.text for each in self.deltas(attempt_id, index))

    def finish(self, attempt_id: str, index: int = 0) -> int:
        """Return the finish of the choice, 0 before its end; fail when it ended twice."""
        finishes = [each.finish for each in self.deltas(attempt_id, index) if each.finish]
        assert len(finishes) <= 1, "finished twice"
        return finishes[0] if finishes else 0

    async def finished(self, attempt_id: str, index: int = 0) -> int:
        await self.until(lambda: self.finish(attempt_id, index))
        return self.finish(attempt_id, index)


@dataclass
class Gateway(federation_pb2_grpc.FederationServicer):
    port: int = 0
    alias_port: int = 0  # of the same server
    token: str | None = TOKEN
    reads: bool = True
    refusals: int = 0
    sessions: asyncio.Queue[Session] = field(default_factory=asyncio.Queue)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def Join(self, requests: Any, context: Any) -> None:
        metadata = dict(context.invocation_metadata())
        if self.token is not None and metadata.get("authorization") != f"Bearer {self.token}":
            self.refusals += 1
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not known here")
        session = Session(context, metadata, reads=self.reads)
        await self.sessions.put(session)
        await session.run()

    async def joined(self) -> Session:
        async with asyncio.timeout(PATIENCE_S):
            return await self.sessions.get()

    async def linked(self, name: str = "east", **welcome: Any) -> Session:
        session = await self.joined()
        await session.welcome(name, **welcome)
        return session


@asynccontextmanager
async def serving(gateway: Gateway) -> AsyncIterator[Gateway]:
    server = grpc.aio.server(options=FIXED_WINDOW)
    federation_pb2_grpc.add_FederationServicer_to_server(gateway, server)
    gateway.port = server.add_insecure_port(gateway.address)
    gateway.alias_port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with asyncio.timeout(SCENE_S):
            yield gateway
    finally:
        await server.stop(grace=None)


@dataclass
class Scene:
    """A site whose engine makes an iteration when told to (`step`), unless it runs free.

    Its clock moves a second with each step; `paced` by it too, every step's deltas are due.
    """

    engine: Any
    site: Site
    engine_thread: EngineThread
    links: Links
    clock: FakeClock
    timeouts: LinkTimeouts

    async def step(self, count: int = 1) -> None:
        """Iterations, and the loop has heard of each."""
        for _ in range(count):
            self.clock.now += 1.0
            heard = asyncio.Event()
            self.engine_thread.request_load()
            self.engine_thread.release((), lambda _, heard=heard: heard.set())
            self.engine_thread.request_load()
            async with asyncio.timeout(PATIENCE_S):
                await heard.wait()


@asynccontextmanager
async def site_before(
    *gateways: Gateway,
    engine: Any = None,
    tokenizer: Any = None,
    grammars: Any = None,
    stepped: bool = True,
    paced: bool = False,
    timeouts: LinkTimeouts | None = None,
) -> AsyncIterator[Scene]:
    loop = asyncio.get_running_loop()
    engine = FakeEngine() if engine is None else engine
    clock = FakeClock(-1.0)
    engine_thread = EngineThread(
        engine,
        loop.call_soon_threadsafe,
        clock if stepped else time.monotonic,
        1.0 if stepped else 0.0,
    )
    prompts = PromptTokenizer(tokenizer or FakeTokenizer(), VOCABULARY, loop.call_soon_threadsafe, grammars)
    site = Site(HELLO, NativeEngine(prompts, engine_thread), clock, max_preparing=8)
    timeouts = timeouts or LinkTimeouts(backoff_first_s=0.01, backoff_longest_s=0.02)

    def make(address: str, add_peers: Any) -> Link:
        return Link(
            address,
            site=site,
            open_channel=open_channel,
            token=TOKEN,
            add_peers=add_peers,
            clock=clock if paced else time.monotonic,
            timeouts=timeouts,
            random=Random(0),
        )

    links = Links(make, timeouts)
    engine_thread.start(Listener(site.outputs, site.load, lambda reason: None))
    links.add(each.address for each in gateways)
    try:
        yield Scene(engine, site, engine_thread, links, clock, timeouts)
    finally:
        await links.close("the test is over")
        prompts.close()
        await asyncio.to_thread(engine_thread.stop)


def assign(attempt_id: str, text: str = "abc", **sampling: Any) -> dict[str, pb.Assign]:
    return {
        "assign": pb.Assign(
            attempt_id=attempt_id,
            model="letters",
            text=text,
            sampling=pb.Sampling(**{"n": 1, "top_p": 1.0, "max_tokens": 4, **sampling}),
        )
    }
