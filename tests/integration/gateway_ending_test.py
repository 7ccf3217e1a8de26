"""The beginning and the end of a gateway as clients see them: no 404 too early, no answer cut in silence."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import grpc
import httpx
import openai
import pytest

import migrations
from gateway.app import serve
from gateway.config import GatewayConfig
from gateway.federation.server import Federation
from gateway.federation.site_auth import Refusal
from gateway.outcome import Status
from gateway.store.store import open_store
from tests.support.announced import CLIENTS, OPERATORS, SITES, port_of
from tests.support.answers import backend_of
from tests.support.fakes.edge import Edge, Script, chat_body, error_of, on_loopback
from tests.support.fakes.federation import DEADLINE_S, TOKEN, Scene, ScriptedSite, scene, until
from wire import federation_pb2 as pb


def play(scenario: Callable[[Scene, Edge], Awaitable[None]]) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            scene() as here,
            on_loopback(Script(), backend_of(here)) as (edge, _),
        ):
            await scenario(here, edge)
            await here.gateway.wait_settled()
            await until(here.nothing_is_left, "all counters at zero")

    asyncio.run(main())


def test_a_stream_that_outlasts_the_drain_ends_with_an_error_event() -> None:
    async def scenario(here: Scene, edge: Edge) -> None:
        site = await here.site("alpha")
        events: list[str] = []

        async def read() -> None:
            async with edge.http.stream(
                "POST", "/v1/chat/completions", json=chat_body(model="m", stream=True)
            ) as r:
                assert r.status_code == 200
                async for line in r.aiter_lines():
                    if line.startswith("data: "):
                        events.append(line.removeprefix("data: "))

        reading = asyncio.create_task(read())
        assign = await site.assigned()
        await site.step(assign, "Hel", 1)
        await until(lambda: len(events) >= 2, "the first piece")
        here.gateway.shut_down()
        cancel = await site.next()
        assert cancel.cancel.attempt_id == assign.attempt_id
        await site.step(assign, "", 1, finish=pb.Delta.CANCELLED)
        await reading
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["code"] == "shutting_down"
        await until(lambda: here.outcomes, "the outcome")
        (outcome,) = here.outcomes
        assert (outcome.status, outcome.completion_tokens) == (Status.FAILED, 1)

    play(scenario)


def test_whoever_waits_for_a_first_token_is_told_to_come_back() -> None:
    async def scenario(here: Scene, edge: Edge) -> None:
        site = await here.site("alpha")
        asking = asyncio.create_task(edge.chat(model="m"))
        assign = await site.assigned()
        here.gateway.shut_down()
        assert (await site.next()).cancel.attempt_id == assign.attempt_id
        await site.step(assign, "", 0, finish=pb.Delta.CANCELLED)
        refused = await asking
        assert error_of(refused, 503)["code"] == "shutting_down"
        assert refused.headers["retry-after"] == "1"

    play(scenario)


def test_a_model_whose_sites_have_not_rejoined_yet_is_no_404() -> None:
    async def scenario(here: Scene, edge: Edge) -> None:
        await here.site("alpha")
        here.gateway.fleet_complete_s = here.gateway.clock() + 60
        early = await edge.chat(model="other")
        assert error_of(early, 503)["code"] == "no_site"
        assert early.headers["retry-after"] == "1"
        here.gateway.fleet_complete_s = here.gateway.clock()
        with pytest.raises(openai.NotFoundError):
            await edge.sdk.chat.completions.create(**chat_body(model="other"))

    play(scenario)


def test_a_second_process_with_the_name_of_a_linked_site_is_turned_away() -> None:
    async def scenario() -> None:
        async with scene() as here:
            first = await here.site("alpha")
            link = here.gateway.federation.links["alpha"]
            for _ in range(3):
                second = ScriptedSite("alpha", here.address, boot_id="another boot")
                with pytest.raises((AssertionError, grpc.RpcError, AttributeError)):
                    await second.join()
                assert await second._call.code() is grpc.StatusCode.ALREADY_EXISTS
                assert "another process is linked as site alpha" in await second._call.details()
                await second.close()
            assert here.gateway.federation.links["alpha"] is link
            await first.close()
            await until(lambda: "alpha" not in here.gateway.federation.links, "the first is gone")
            second = await here.site("alpha", boot_id="another boot")
            assert here.gateway.federation.links["alpha"].identity.boot_id == "another boot"

    asyncio.run(scenario())


class Halfway:
    """The stream of a process that has said who it is; what it is told waits for the test."""

    def __init__(self) -> None:
        self.told, self.go_on = asyncio.Event(), asyncio.Event()

    async def read(self) -> pb.SiteMessage:
        model = pb.Model(id="m", context_tokens=64)
        names = {"site": "alpha", "boot_id": "another boot", "cloud": "c", "region": "r"}
        hello = pb.Hello(protocol=1, **names, models=[model], slots=1, kv_capacity_tokens=64)
        return pb.SiteMessage(hello=hello)

    async def write(self, _: pb.GatewayMessage) -> None:
        self.told.set()
        await self.go_on.wait()


def test_of_two_processes_that_join_at_once_under_one_name_one_is_turned_away() -> None:
    async def scenario() -> None:
        async with scene() as here:
            federation, halfway = here.gateway.federation, Halfway()
            second = asyncio.create_task(federation._welcome(halfway, None))
            await asyncio.wait_for(halfway.told.wait(), DEADLINE_S)
            await here.site("alpha")
            link = federation.links["alpha"]
            halfway.go_on.set()
            with pytest.raises(Refusal, match="another process is linked as site alpha"):
                await second
            assert federation.links["alpha"] is link

    asyncio.run(scenario())


def test_the_same_process_replaces_its_own_link() -> None:
    async def scenario() -> None:
        async with scene() as here:
            await here.site("alpha")
            link = here.gateway.federation.links["alpha"]
            await here.site("alpha")
            assert link.closing == "the site joined again"
            federation: Federation = here.gateway.federation
            assert federation.links["alpha"] is not link

    asyncio.run(scenario())


def test_a_process_that_is_told_to_end_lets_no_stream_end_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with whole_gateway(tmp_path, caplog) as (client, site):
            begun = asyncio.create_task(begin(site))
            asked = chat_body(model="m", stream=True)
            async with client.stream("POST", "/v1/chat/completions", json=asked) as answer:
                lines = answer.aiter_lines()
                assert "data: " in await anext(lines)
                os.kill(os.getpid(), signal.SIGTERM)
                rest = [line async for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
            await begun

    asyncio.run(scenario())


def test_a_gateway_says_that_its_database_is_away_though_nobody_asks_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.app.SILENT_S", 1.0)

    async def scenario() -> None:
        async with whole_gateway(tmp_path, caplog), httpx.AsyncClient(timeout=DEADLINE_S) as told:
            told.base_url = f"http://127.0.0.1:{port_of(OPERATORS, caplog.text)}"
            assert "mico_queries_live 0.0" in (await told.get("/metrics")).text

            async def until_told(degraded: bool) -> None:
                async with asyncio.timeout(DEADLINE_S):
                    while ("degraded: the database is away" in await ready(told)) is not degraded:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)

            await until_told(False)
            other = sqlite3.connect(
                tmp_path / "mico.db", DEADLINE_S, isolation_level=None, check_same_thread=False
            )
            with closing(other):  # it may wait for a transaction that only this loop can end
                await asyncio.to_thread(other.execute, "BEGIN EXCLUSIVE")
                await until_told(True)
                assert (await ready(told)).endswith("the database is away")  # and not where it is, nor why
                other.execute("ROLLBACK")
            await until_told(False)
            os.kill(os.getpid(), signal.SIGTERM)

    asyncio.run(scenario())


async def ready(client: httpx.AsyncClient) -> str:
    answer = await client.get("/ready")
    assert answer.status_code == 200
    reason: str = answer.json()["reason"]
    assert reason.startswith("alpha")
    return reason


@asynccontextmanager
async def whole_gateway(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[tuple[httpx.AsyncClient, ScriptedSite]]:
    """As a process runs it, with a site, and a client that has a key; it ends when SIGTERM says so."""
    caplog.set_level(logging.INFO)
    url = f"sqlite:///{folder / 'mico.db'}"
    await asyncio.to_thread(migrations.upgrade, url)
    async with open_store(url, folder, serving=False) as store:
        _, key = await store.keys.create_key("test")
    config = GatewayConfig(
        http_port=0,
        grpc_port=0,
        mtls_port=0,
        database_url=url,
        folder=folder,
        site_tokens=(TOKEN,),
        drain_s=0.3,
    )
    with pytest.MonkeyPatch.context() as patient:
        patient.setattr("gateway.routing.filters.STALE_AFTER_S", DEADLINE_S)  # the site reports but once
        patient.setattr("gateway.app.FAREWELL_S", DEADLINE_S)  # nobody is cut off for being slow
        serving = asyncio.create_task(serve(config))
        await until(lambda: serving.done() or port_of(CLIENTS, caplog.text), "the gateway listens")
        http, grpc_port = (port_of(who, caplog.text) for who in (CLIENTS, SITES))
        site = ScriptedSite("alpha", f"127.0.0.1:{grpc_port}")
        await site.join()
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{http}", headers=headers, timeout=DEADLINE_S
        ) as client:
            while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110 - its first report is on its way
                await asyncio.sleep(0.01)
            yield client, site
        assert await serving == 0
        await site.close()


async def begin(site: ScriptedSite) -> None:
    """Say a little of one answer, then nothing until it is cancelled."""
    assign = await site.assigned()
    await site.step(assign, "Hel", 1)
    assert (await site.next()).cancel.attempt_id == assign.attempt_id
    await site.step(assign, "", 1, finish=pb.Delta.CANCELLED)
