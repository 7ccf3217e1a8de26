"""A gateway's core on a loopback port, and sites that a test scripts message by message, over real gRPC."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest

from gateway.domain import Caller, Query, Sampling
from gateway.federation.directory import Directory
from gateway.federation.progress import CHECK_EVERY_S, AwakeClock
from gateway.federation.server import MISSED_HEARTBEATS, Federation, FederationSettings, listen
from gateway.outcome import Outcome
from gateway.prompt import Chat, Message
from gateway.query.context import QueryContext
from gateway.query.forecasting import ForecastService
from predictor.forecast import Forecast
from predictor.onnx_forecaster import Features
from wire import federation_pb2 as pb
from wire import federation_pb2_grpc as rpc

TOKEN = "a-site-token"
DEADLINE_S = 60.0
SCENE_S = 300.0
"""How long a scene may last; reached only by a test that waits in vain."""
CALLER = Caller("key-1", "tenant-1")


class FlatForecaster:
    """Every answer is 1 to 100 tokens long."""

    name = "flat"

    def forecast(self, queries: Sequence[Features]) -> list[Forecast]:
        return [Forecast((0, 100), (1.0,), self.name) for _ in queries]


async def until(condition: Callable[[], Any], what: str = "condition") -> Any:
    """Wait for a condition with a deadline, never for a time."""
    end = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {DEADLINE_S} s: {what}"
        await asyncio.sleep(0.002)
    return value


class ScriptedSite:
    """A site under the test's hand. `inbox` holds what the gateway sent; pings it answers itself."""

    def __init__(
        self,
        name: str,
        address: str,
        *,
        slots: int = 4,
        token: str = TOKEN,
        seconds_per_token: float = 0.01,
        context_tokens: int = 1024,
        boot_id: str = "boot",
        revision: str = "rev-1",
        engine: str = "native",
        answers_pings: bool = True,
        region: str = "here",
        output_usd_per_mtok: float = 0.0,
        usd_per_hour: float = 0.0,
        model: str = "m",
        takes_orders: bool = False,
        highest_protocol: int = 0,
        paces_reports: bool = False,
        trains: pb.Trains | None = None,
    ):
        self.trains = trains
        self.paces_reports = paces_reports
        self.highest_protocol = highest_protocol
        self.model = model
        self.takes_orders = takes_orders
        self.boot_id = boot_id
        self.name, self.address, self.slots, self.token = name, address, slots, token
        self.seconds_per_token = seconds_per_token
        self.inbox: asyncio.Queue[pb.GatewayMessage] = asyncio.Queue()
        self.answers_pings = answers_pings
        self.features: tuple[str, ...] = ("chat", "logprobs", "resume")
        self.names_tokens = True
        self.context_tokens = context_tokens
        self.revision, self.engine = revision, engine
        self.region, self.output_usd_per_mtok = region, output_usd_per_mtok
        self.usd_per_hour = usd_per_hour
        self.reports = self.pings = 0
        self.heartbeat_s = 0.0  # as the gateway has said
        self._writing = asyncio.Lock()  # a stream takes one write at a time
        self._channel: Any = None
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def served_model(self) -> pb.Model:
        return pb.Model(
            id=self.model,
            revision=self.revision,
            context_tokens=self.context_tokens,
            features=self.features,
        )

    @property
    def bulk(self) -> Any:
        """The calls for what is large, beside the link."""
        return rpc.FederationStub(self._channel)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.token}"),)

    async def join(self, attempts: Sequence[str] = ()) -> pb.Welcome:
        self._channel = grpc.aio.insecure_channel(self.address)
        self._call = rpc.FederationStub(self._channel).Join(
            metadata=(("authorization", f"Bearer {self.token}"),)
        )
        model = self.served_model
        hello = pb.Hello(
            protocol=1,
            highest_protocol=self.highest_protocol,
            paces_reports=self.paces_reports,
            site=self.name,
            boot_id=self.boot_id,
            cloud=f"cloud-{self.name}",
            region=self.region,
            output_usd_per_mtok=self.output_usd_per_mtok,
            usd_per_hour=self.usd_per_hour,
            models=[model],
            slots=self.slots,
            kv_capacity_tokens=100_000,
            engine=self.engine,
            takes_orders=self.takes_orders,
            attempts=attempts,
            trains=self.trains,
        )
        await self._call.write(pb.SiteMessage(hello=hello))
        welcome = await asyncio.wait_for(self._call.read(), DEADLINE_S)
        assert welcome.WhichOneof("body") == "welcome"
        self.heartbeat_s = welcome.welcome.heartbeat_s
        self._reader = asyncio.create_task(self._read())
        await self.report()
        return welcome.welcome

    async def report(self, **figures: Any) -> None:
        self.reports += 1
        cost = pb.IterationCost(base_s=self.seconds_per_token)
        load = pb.Load(seq=self.reports, **{"iteration": cost, "kv_free_tokens": 100_000, **figures})
        await self.send(load=load)

    async def send(self, **body: Any) -> None:
        async with self._writing:
            await self._call.write(pb.SiteMessage(**body))

    async def assigned(self) -> pb.Assign:
        """The next message, which must be an Assign; it is accepted."""
        message = await self.next()
        assert message.WhichOneof("body") == "assign", message
        await self.send(accepted=pb.Accepted(attempt_id=message.assign.attempt_id, prompt_tokens=7))
        return message.assign

    async def next(self) -> pb.GatewayMessage:
        return await asyncio.wait_for(self.inbox.get(), DEADLINE_S)

    async def step(self, assign: pb.Assign, text: str, tokens: int, *, index: int = 0, **more: Any) -> None:
        """Send text whose token ids are the code points of its characters."""
        ids = [ord(letter) for letter in text] if self.names_tokens else []
        delta = pb.Delta(
            attempt_id=assign.attempt_id,
            index=index,
            text=text,
            token_ids=ids,
            completion_tokens=tokens,
            **more,
        )
        await self.send(step=pb.Step(deltas=[delta]))

    async def finish(self, assign: pb.Assign, text: str, tokens: int, *, index: int = 0) -> None:
        await self.step(assign, text, tokens, index=index, finish=pb.Delta.STOP)

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        if self._channel is not None:
            await self._channel.close()

    async def _read(self) -> None:
        with suppress(grpc.RpcError, asyncio.CancelledError):
            while (message := await self._call.read()) is not grpc.aio.EOF:
                if message.WhichOneof("body") == "ping":
                    self.pings += 1
                    if self.answers_pings:
                        await self.send(pong=pb.Pong(nonce=message.ping.nonce))
                else:
                    self.inbox.put_nowait(message)


class Heart:
    """A heartbeat is over when a test says so, however slow the machine is."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[None]] = []

    async def sleep(self, _: float) -> None:
        self.waiting.append(asyncio.get_running_loop().create_future())
        await self.waiting[-1]

    def beat(self) -> None:
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            if not each.done():  # its link has ended
                each.set_result(None)


class SilenceClock:
    """The clock by which silence is measured. It stands still unless a test moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Scene:
    """A gateway's core, its outcomes, and the sites that joined it."""

    def __init__(
        self, gateway: QueryContext, address: str, outcomes: list[Outcome], heart: Heart, clock: SilenceClock
    ) -> None:
        self.gateway, self.address, self.outcomes, self._heart = gateway, address, outcomes, heart
        self._clock = clock
        self.sites: list[ScriptedSite] = []
        self._number = 0

    async def site(
        self, name: str, *, features: Sequence[str] = ("chat", "logprobs", "resume"), **settings: Any
    ) -> ScriptedSite:
        site = ScriptedSite(name, self.address, **settings)
        site.features = tuple(features)
        self.sites.append(site)
        await site.join()
        await until(
            lambda: any(s.name == name and s.state == "ready" for s in self.gateway.directory.sites), name
        )
        return site

    async def heartbeats_until_gone(self, name: str) -> None:
        """Send heartbeats until a site that answers no pings is gone; the other sites have time to answer."""
        links: Any = self.gateway.federation.links
        answering = [site.name for site in self.sites if site.answers_pings]
        for _ in range(2 * MISSED_HEARTBEATS):
            await until(
                lambda: not any(links[it].pings.unanswered for it in answering if it in links), "pongs"
            )
            self._heart.beat()
            await until(lambda: len(self._heart.waiting) >= len(links), "the next pings")
        await until(lambda: name not in links, f"{name} to be gone")

    async def heartbeat(self) -> None:
        """Let a heartbeat pass in which every site reports."""
        links: Any = self.gateway.federation.links
        before = {name: link.silent_since_s for name, link in links.items()}
        for site in self.sites:
            await site.report()
        await until(lambda: all(links[name].silent_since_s > s for name, s in before.items()), "reports")
        self._heart.beat()
        await until(lambda: len(self._heart.waiting) >= len(links), "the next heartbeat")

    async def silent_heartbeats(self, count: int) -> None:
        """Let heartbeats pass in which no site says anything."""
        links: Any = self.gateway.federation.links
        for _ in range(count):
            self._heart.beat()
            await until(lambda: len(self._heart.waiting) >= len(links), "the next heartbeat")

    def let_pass(self, seconds: float) -> None:
        """Let the links wait: whatever sites have sent by now was read, and nothing comes meanwhile."""
        for _ in range(math.ceil(seconds / CHECK_EVERY_S)):
            self._clock.now_s += CHECK_EVERY_S
            self.gateway.federation.check_progress()

    def suspend(self, seconds: float) -> None:
        """Let time pass in which this process did not run."""
        self._clock.now_s += seconds
        self.gateway.federation.check_progress()

    def query(
        self,
        *,
        within_s: float = DEADLINE_S,
        model: str = "m",
        caller: Caller = CALLER,
        **sampling: Any,
    ) -> Query:
        self._number += 1
        now = self.gateway.clock()
        return Query(
            id=f"q{self._number}",
            model=model,
            prompt=Chat((Message("user", "Say something."),)),
            sampling=Sampling(**sampling),
            caller=caller,
            received_s=now,
            deadline_s=now + within_s,
        )

    def nothing_is_left(self) -> bool:
        """Invariant 3: every count is back to zero."""
        links = self.gateway.federation.links.values()
        credits_left = [site.credit.requests for site in self.gateway.directory.sites]
        held = self.gateway.live or self.gateway.prompt_bytes
        return not held and not any(link.live for link in links) and not any(credits_left)


@asynccontextmanager
async def scene(**settings: Any) -> AsyncIterator[Scene]:
    """Its sites report when their test says so, however slow the machine is, and are not stale before, nor
    less liked for the age of their report; nor do heartbeats pass.
    """
    with pytest.MonkeyPatch.context() as patient:
        patient.setattr("gateway.routing.filters.STALE_AFTER_S", DEADLINE_S)
        patient.setattr("gateway.routing.policies.REPORTS_EVERY_S", DEADLINE_S)
        patient.setattr("gateway.routing.decide.REPORTS_EVERY_S", DEADLINE_S)
        outcomes: list[Outcome] = []
        directory = Directory()
        linked = FederationSettings(replica="g1", site_tokens=(TOKEN,), heartbeat_s=DEADLINE_S)
        heart, clock = Heart(), SilenceClock()
        federation = Federation(linked, directory, time.monotonic, sleep=heart.sleep)
        federation._awake = AwakeClock(clock)
        forecasts = ForecastService(FlatForecaster(), FlatForecaster())
        server, port, _ = await listen(federation, "127.0.0.1:0")
        gateway = QueryContext(directory, federation, forecasts, outcomes.append, **settings)
        here = Scene(gateway, f"127.0.0.1:{port}", outcomes, heart, clock)
        try:
            async with asyncio.timeout(SCENE_S):
                yield here
        finally:
            for site in here.sites:
                await site.close()
            await gateway.wait_settled()
            await forecasts.close()
            await server.stop(None)
