"""Tokens of prompts are counted by sites that can, over real gRPC, whatever becomes of the first asked."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx2
import msgspec
import pytest

from gateway.domain import Caller
from gateway.errors import (
    BadRequest,
    ContextTooLong,
    Forbidden,
    ModelNotFound,
    NoSite,
    Overloaded,
    ShuttingDown,
    UpstreamFailed,
)
from gateway.http.app import create_http
from gateway.prompt import Chat, Message
from gateway.query import counting
from gateway.query.counting import MAX_COUNTS, TokenCounter
from tests.support.answers import backend_of, run
from tests.support.fakes.edge import KEY
from tests.support.fakes.federation import CALLER, Scene, ScriptedSite, until
from wire import federation_pb2 as pb

CAN = ("chat", "count", "tools")


async def asked(site: ScriptedSite) -> pb.Assign:
    message = await site.next()
    assert message.WhichOneof("body") == "count", message
    return message.count.assign


async def answer_count(site: ScriptedSite, assign: pb.Assign, tokens: int) -> None:
    await site.send(counted=pb.Counted(attempt_id=assign.attempt_id, prompt_tokens=tokens))


async def refuse(site: ScriptedSite, assign: pb.Assign, reason: int, message: str = "no") -> None:
    await site.send(rejected=pb.Rejected(attempt_id=assign.attempt_id, reason=reason, message=message))


async def first_asked(*sites: ScriptedSite) -> tuple[ScriptedSite, pb.Assign]:
    await until(lambda: any(not site.inbox.empty() for site in sites), "a count")
    site = next(site for site in sites if not site.inbox.empty())
    return site, await asked(site)


def test_a_site_that_can_count_is_asked_and_nothing_is_spent() -> None:
    async def scenario(here: Scene) -> None:
        old = await here.site("old", features=("chat", "tools"))
        site = await here.site("new", features=CAN)
        prompt = Chat((Message("system", "Be brief."), Message("user", "Hi")), tools_json='[{"a":1}]')
        query = msgspec.structs.replace(here.query(), prompt=prompt)
        task = asyncio.create_task(TokenCounter(here.gateway).count(query))
        assign = await asked(site)
        assert (assign.model, assign.tenant, assign.chat.tools_json) == ("m", "tenant-1", prompt.tools_json)
        assert [each.content for each in assign.chat.messages] == ["Be brief.", "Hi"]
        await answer_count(site, assign, 31)
        assert await task == 31
        assert old.inbox.empty()
        assert not here.outcomes
        assert not here.gateway.live

    run(scenario)


@pytest.mark.parametrize("reason", [pb.Rejected.FULL, pb.Rejected.DRAINING, pb.Rejected.INTERNAL])
def test_a_site_that_refuses_is_replaced_by_another(reason: int) -> None:
    async def scenario(here: Scene) -> None:
        sites = [await here.site(name, features=CAN) for name in "ab"]
        task = asyncio.create_task(TokenCounter(here.gateway).count(here.query()))
        busy, assign = await first_asked(*sites)
        await refuse(busy, assign, reason)
        other = next(site for site in sites if site is not busy)
        await answer_count(other, await asked(other), 5)
        assert await task == 5

    run(scenario)


def test_a_site_lost_while_it_counts_is_replaced_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "SITE_WITHIN_S", 1000.0)  # only its end tells

    async def scenario(here: Scene) -> None:
        sites = [await here.site(name, features=CAN) for name in "ab"]
        task = asyncio.create_task(TokenCounter(here.gateway).count(here.query()))
        dying, _ = await first_asked(*sites)
        await dying.close()
        other = next(site for site in sites if site is not dying)
        await answer_count(other, await asked(other), 5)
        assert await task == 5

    run(scenario)


def test_a_site_that_says_nothing_is_told_to_stop_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "SITE_WITHIN_S", 0.05)

    async def scenario(here: Scene) -> None:
        sites = [await here.site(name, features=CAN) for name in "ab"]
        task = asyncio.create_task(TokenCounter(here.gateway).count(here.query()))
        silent, assign = await first_asked(*sites)
        assert (await silent.next()).cancel.attempt_id == assign.attempt_id
        with pytest.raises(UpstreamFailed, match="did not count the prompt"):
            await task
        await answer_count(silent, assign, 9)  # too late, and nobody minds
        await silent.report()

    run(scenario, max_tries=1)


def test_the_reason_of_a_refusal_reaches_the_client() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a", features=CAN)
        for reason, error in (
            (pb.Rejected.INVALID, BadRequest),
            (pb.Rejected.CONTEXT_LENGTH, ContextTooLong),
            (pb.Rejected.UNSUPPORTED, BadRequest),
            (pb.Rejected.FULL, Overloaded),
        ):
            task = asyncio.create_task(TokenCounter(here.gateway).count(here.query()))
            await refuse(site, await asked(site), reason, "the prompt is odd")
            with pytest.raises(error, match="the prompt is odd"):
                await task

    run(scenario)


def test_who_may_not_ask_for_a_model_may_not_count_for_it() -> None:
    async def scenario(here: Scene) -> None:
        count = TokenCounter(here.gateway).count
        with pytest.raises(NoSite):
            await count(here.query())
        await here.site("a", features=("chat",))
        with pytest.raises(BadRequest, match="count"):
            await count(here.query())
        with pytest.raises(ModelNotFound):
            await count(here.query(model="other"))
        with pytest.raises(Forbidden):
            await count(here.query(caller=replace(CALLER, models=frozenset({"other"}))))
        await here.site("b", features=CAN)
        with pytest.raises(Forbidden, match="regions of m"):
            await count(here.query(caller=replace(CALLER, regions=frozenset({"mars"}))))
        here.gateway.shutting_down = True
        with pytest.raises(ShuttingDown):
            await count(here.query())

    run(scenario)


def test_no_tenant_takes_all_places() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a", features=CAN)
        counter = TokenCounter(here.gateway)
        tasks = []
        for _ in range(MAX_COUNTS):
            tasks.append(asyncio.create_task(counter.count(here.query())))
            await asyncio.sleep(0)
        refused = [task for task in tasks if task.done()]
        assert 0 < len(refused) < MAX_COUNTS
        assert all(isinstance(task.exception(), Overloaded) for task in refused)
        other = asyncio.create_task(counter.count(here.query(caller=Caller("key-2", "tenant-2"))))
        while (assign := await asked(site)).tenant != "tenant-2":
            assert assign.tenant == "tenant-1"
        await answer_count(site, assign, 3)
        assert await other == 3
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(scenario)


def test_a_client_that_leaves_ends_its_count_at_the_site() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a", features=CAN)
        task = asyncio.create_task(TokenCounter(here.gateway).count(here.query()))
        assign = await asked(site)
        task.cancel()
        assert (await site.next()).cancel.attempt_id == assign.attempt_id
        await asyncio.gather(task, return_exceptions=True)

    run(scenario)


def test_the_endpoint_counts_as_anthropics_does() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a", features=CAN)
        headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01"}
        transport = httpx2.ASGITransport(create_http(backend_of(here)))
        async with httpx2.AsyncClient(transport=transport, base_url="http://edge", headers=headers) as http:
            body = {"model": "m", "system": "Be brief.", "messages": [{"role": "user", "content": "Hi"}]}
            asking = asyncio.create_task(http.post("/v1/messages/count_tokens", json=body))
            assign = await asked(site)
            assert [each.role for each in assign.chat.messages] == ["system", "user"]
            await answer_count(site, assign, 12)
            answer = await asking
            assert (answer.status_code, answer.json()) == (200, {"input_tokens": 12})
            assert answer.headers["x-request-id"]

    run(scenario)
