"""The contract of `EngineClient`: the native engine, one in a process of its own, one behind a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from site_engine import messages as m
from site_engine.core.remaining_curve import RemainingCurve
from site_engine.core.request import Finish, Lane, Output, Request, Sampling
from site_engine.engine.engine_thread import EngineThread
from site_engine.engine.process_client import EngineProcess
from site_engine.engine_client import EngineClient, Listener, LoadSeen, Prepared
from site_engine.errors import NotServed, Reason
from site_engine.native import NativeEngine
from site_engine.remote.dialects import UNKNOWN
from site_engine.remote.engine import RemoteEngine, ServerProfile
from site_engine.remote.server import Server
from site_engine.text.tokenize import PromptTokenizer
from tests.support.fake_engine_process import LETTERS, fake_settings, spawn_fake
from tests.support.openai_server import openai_server
from tests.support.site_fakes import CONTEXT_TOKENS, VOCABULARY, FakeEngine, FakeTokenizer

WAIT_S = 60.0
PENDING, SLOTS = 2, 1


@dataclass
class Client:
    """An engine, and everything that it reports."""

    engine: EngineClient
    outputs: list[Output] = field(default_factory=list)
    loads: list[LoadSeen] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def listener(self) -> Listener:
        return Listener(
            lambda outputs: (self.outputs.extend(outputs), self.changed.set()),
            lambda load: (self.loads.append(load), self.changed.set()),
            pytest.fail,
        )

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not holds():
                self.changed.clear()
                await self.changed.wait()

    async def prepare(self, assign: m.Assign) -> Prepared | NotServed:
        answer: asyncio.Future[Prepared | NotServed] = asyncio.get_running_loop().create_future()
        self.engine.prepare(assign, answer.set_result)
        return await asyncio.wait_for(answer, WAIT_S)

    async def submit(self, assign: m.Assign) -> NotServed | None:
        """Prepare and submit an attempt, whose requests are named `id/choice`; let time pass in between."""
        prepared = await self.prepare(assign)
        assert isinstance(prepared, Prepared)
        await asyncio.sleep(0)
        answer: asyncio.Future[NotServed | None] = asyncio.get_running_loop().create_future()
        group = [
            Request(f"{assign.attempt_id}/{at}", prepared.token_ids, assign.sampling, choice=at)
            for at in range(assign.choices)
        ]
        self.engine.submit(prepared, group, lambda said: answer.done() or answer.set_result(said))
        return await asyncio.wait_for(answer, WAIT_S)

    async def release(self, *groups: tuple[str, ...]) -> list[bool]:
        answer: asyncio.Future[list[bool]] = asyncio.get_running_loop().create_future()
        self.engine.release(groups, answer.set_result)
        return await asyncio.wait_for(answer, WAIT_S)

    def finishes(self, request_id: str) -> list[Finish]:
        return [each.finish for each in self.outputs if each.request_id == request_id and each.finish]

    async def finished(self, request_id: str) -> Finish:
        await self.until(lambda: self.finishes(request_id))
        (finish,) = self.finishes(request_id)
        return finish

    def text(self, request_id: str) -> str:
        return "".join(each.text for each in self.outputs if each.request_id == request_id)


@asynccontextmanager
async def native() -> AsyncIterator[Client]:
    loop = asyncio.get_running_loop()
    tokenizer = PromptTokenizer(FakeTokenizer(), VOCABULARY, loop.call_soon_threadsafe)
    engine = FakeEngine(slots=SLOTS, max_pending=PENDING)
    thread = EngineThread(engine, loop.call_soon_threadsafe, time.monotonic, floor_s=0.1)
    client = Client(NativeEngine(tokenizer, thread))
    thread.start(client.listener())
    try:
        yield client
    finally:
        tokenizer.close()
        await asyncio.to_thread(thread.stop)


@asynccontextmanager
async def separate() -> AsyncIterator[Client]:
    loop = asyncio.get_running_loop()
    settings = fake_settings(slots=SLOTS, max_pending=PENDING, iteration_floor_s=0.1)
    process = await EngineProcess.launch(settings, time.monotonic, spawn_fake)
    assert (await process.ready()).context_tokens == CONTEXT_TOKENS
    process.vocabulary = LETTERS
    tokenizer = PromptTokenizer(FakeTokenizer(), VOCABULARY, loop.call_soon_threadsafe)
    client = Client(NativeEngine(tokenizer, process))
    client.engine.start(client.listener())
    try:
        yield client
    finally:
        await asyncio.to_thread(client.engine.stop)


@asynccontextmanager
async def remote() -> AsyncIterator[Client]:
    async with openai_server(pace_s=0.1) as upstream:
        server = Server(upstream.url.removesuffix("/v1"), "", silence_s=WAIT_S, connections=4)
        models = {"letters": "letters"}
        profile = ServerProfile(models, UNKNOWN, CONTEXT_TOKENS, SLOTS * CONTEXT_TOKENS, SLOTS, PENDING)
        engine = RemoteEngine(server, profile, time.monotonic)
        client = Client(engine)
        engine.listener = client.listener()
        try:
            yield client
        finally:
            engine.fail_all("the test is over")
            await server.close()
            await asyncio.sleep(0.05)  # the server sees the connections close


@pytest.fixture(params=[native, separate, remote])
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[Client], Awaitable[None]]], None]:
    def runner(scenario: Callable[[Client], Awaitable[None]]) -> None:
        async def whole() -> None:
            async with request.param() as client:
                await scenario(client)

        asyncio.run(whole())

    return runner


def attempt(attempt_id: str, text: str = "abc", *, max_tokens: int = 4, choices: int = 1) -> m.Assign:
    return m.Assign(
        attempt_id,
        "q",
        "letters",
        m.TextPrompt(text),
        Sampling(max_tokens=max_tokens),
        choices,
        False,
        RemainingCurve(),
        Lane.CHAT,
        0,
        None,
        "",
    )


def test_an_attempt_is_prepared_admitted_answered_and_finished_once_per_choice(run) -> None:
    async def scenario(client: Client) -> None:
        assert await client.submit(attempt("a", choices=2)) is None
        assert [await client.finished(f"a/{at}") for at in range(2)] == [Finish.LENGTH] * 2
        assert [client.text(f"a/{at}") for at in range(2)] == ["abca"] * 2
        assert client.engine.waiting == client.engine.waiting_of("") == 0

    run(scenario)


def test_the_payload_is_the_engines_own_whatever_the_requests_are_called(run) -> None:
    async def scenario(client: Client) -> None:
        first, second = await client.prepare(attempt("a", "abc")), await client.prepare(attempt("b", "xyz"))
        assert isinstance(first, Prepared)
        assert isinstance(second, Prepared)
        for name, prepared in (("no/such/form", second), ("1", first)):
            request = Request(name, prepared.token_ids, Sampling(max_tokens=4))
            client.engine.submit(prepared, [request], lambda answer: None)
        assert await client.finished("no/such/form") == await client.finished("1") == Finish.LENGTH
        assert (client.text("no/such/form"), client.text("1")) == ("xyzx", "abca")

    run(scenario)


def test_a_refusal_names_its_reason_and_the_field(run) -> None:
    async def scenario(client: Client) -> None:
        refused = await client.prepare(replace(attempt("a"), prompt=m.TokenPrompt((7,)), echo=True))
        if isinstance(refused, NotServed):  # a server does not tell the text of tokens
            assert (refused.reason, refused.param) == (Reason.UNSUPPORTED, "echo")
        for at in range(SLOTS):
            await client.submit(attempt(f"running {at}", max_tokens=40))
            await client.until(lambda at=at: client.text(f"running {at}/0"))

    run(scenario)


def test_what_has_not_started_can_be_released_and_what_has_can_be_cancelled(run) -> None:
    async def scenario(client: Client) -> None:
        await client.submit(attempt("runs", max_tokens=40))
        await client.until(lambda: client.text("runs/0"))
        for at in range(8):  # a server may take some at once: the last waits in any case
            answer = await client.submit(attempt(f"w{at}", max_tokens=40))
            if answer is not None:
                break
        waiting = f"w{at if answer is None else at - 1}/0"
        assert await client.release(("runs/0",), (waiting,), ("nobody",)) == [False, True, False]
        client.engine.cancel(["runs/0", "nobody"])
        assert await client.finished("runs/0") is Finish.CANCELLED
        assert client.finishes(waiting) == []

    run(scenario)


def test_a_full_queue_refuses(run) -> None:
    async def scenario(client: Client) -> None:
        answers = [await client.submit(attempt(f"a{at}", max_tokens=40)) for at in range(12)]
        refusals = [each for each in answers if isinstance(each, NotServed)]
        assert refusals
        assert {each.reason for each in refusals} == {Reason.FULL}

    run(scenario)


def test_the_load_is_reported_on_request(run) -> None:
    async def scenario(client: Client) -> None:
        before = len(client.loads)
        client.engine.request_load()
        await client.until(lambda: len(client.loads) > before)
        assert (client.loads[-1].figures.running, client.loads[-1].figures.pending) == (0, 0)

    run(scenario)
