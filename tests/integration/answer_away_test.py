"""A query whose only able site is away can be sent again later: it is no mistake of the client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from gateway.domain import Lane
from gateway.query.refusals import MAX_AWAY_S
from gateway.routing.model_routes import ModelRoute, Target
from tests.support.answers import run_over_http
from tests.support.fakes.edge import Edge, chat_body, error_of
from tests.support.fakes.federation import Scene, ScriptedSite, until
from wire import federation_pb2 as pb

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
ROUTES = {"name": ModelRoute("name", (Target("m"),))}


def play(scenario: Callable[[Scene, Edge], Awaitable[None]]) -> None:
    run_over_http(scenario, routes=lambda: ROUTES)


async def gone(here: Scene, site: ScriptedSite) -> None:
    await site.close()
    await until(lambda: site.name not in here.gateway.federation.links, f"{site.name} to be gone")


@pytest.mark.parametrize("model", ["m", "name"])
@pytest.mark.parametrize("asked", [{"tools": TOOLS}, {"logprobs": True}])
def test_an_ability_whose_only_site_is_away_is_asked_for_again(model: str, asked: dict[str, Any]) -> None:
    """A restart of that site made a 400 of each such request, and failed such lines of batches for good."""

    async def scenario(here: Scene, edge: Edge) -> None:
        able = await here.site("able", features=("chat", "tools", "logprobs"))
        await here.site("plain", features=("chat",))
        await gone(here, able)
        refused = await edge.chat(model=model, **asked)
        assert "able: down" in error_of(refused, 503)["message"]
        assert refused.headers["retry-after"]

    play(scenario)


@pytest.mark.parametrize("model", ["m", "name"])
def test_a_count_whose_only_site_is_away_is_asked_for_again(model: str) -> None:
    async def scenario(here: Scene, edge: Edge) -> None:
        able = await here.site("able", features=("chat", "count"))
        await here.site("plain", features=("chat",))
        await gone(here, able)
        refused = await edge.post("/v1/messages/count_tokens", chat_body(model=model))
        assert refused.status_code == 529, refused.text  # Anthropic's word for 503

    play(scenario)


@pytest.mark.parametrize("model", ["m", "name"])
def test_an_ability_of_a_site_that_has_not_joined_yet_is_asked_for_again(model: str) -> None:
    async def scenario(here: Scene, edge: Edge) -> None:
        await here.site("plain", features=("chat",))
        here.gateway.fleet_complete_s = inf
        refused = error_of(await edge.chat(model=model, tools=TOOLS), 503)
        assert "join" in refused["message"]
        here.gateway.fleet_complete_s = -inf
        error_of(await edge.chat(model=model, tools=TOOLS), 400)

    play(scenario)


@pytest.mark.parametrize("model", ["m", "name"])
def test_a_limit_over_the_contexts_that_have_joined_yet_is_asked_for_again(model: str) -> None:
    """A site would clip it; one with a longer context may be on its way back."""

    async def scenario(here: Scene, edge: Edge) -> None:
        short = await here.site("short", context_tokens=1024)
        here.gateway.fleet_complete_s = inf
        refused = await edge.chat(model=model, max_completion_tokens=1025)
        assert "1025" in (message := error_of(refused, 503)["message"]) and "may still join" in message
        assert refused.headers["retry-after"]
        messages = edge.post("/v1/messages", chat_body(model=model, max_tokens=1025))  # as many as fit
        asked = asyncio.create_task(messages)
        await short.finish(await short.assigned(), "x", 1)
        assert (await asked).status_code == 200
        here.gateway.fleet_complete_s = -inf
        error_of(await edge.chat(model=model, max_completion_tokens=1025), 400)

    play(scenario)


def test_a_prompt_too_long_for_the_sites_that_are_there_is_sent_again_to_one_that_is_away() -> None:
    async def scenario(here: Scene, edge: Edge) -> None:
        long, short = await here.site("long", context_tokens=4096), await here.site("short")
        await gone(here, long)
        for back, status in ((False, 503), (True, 400)):
            if back:
                long.context_tokens = 1024
                await long.join()
                await until(lambda: here.gateway.directory.models["m"].context_tokens == 1024, "its models")
                await gone(here, long)
            asked = asyncio.create_task(edge.post("/v1/chat/completions", chat_body(model="m")))
            assign = await short.assigned()
            too_long = pb.Rejected(attempt_id=assign.attempt_id, reason=pb.Rejected.CONTEXT_LENGTH)
            await short.send(rejected=too_long)
            error_of(await asked, status)

    play(scenario)


def test_what_one_site_does_not_support_is_sent_again_to_one_that_is_away() -> None:
    """Servers differ in fields that no feature names, such as logit_bias."""

    async def scenario(here: Scene, edge: Edge) -> None:
        able, other = await here.site("able"), await here.site("other")
        await gone(here, able)
        asked = asyncio.create_task(edge.chat(model="m"))
        await reject(other, pb.Rejected.UNSUPPORTED)
        assert "other: other said no" in error_of(await asked, 503)["message"]

    play(scenario)


async def gone_for_long(here: Scene, site: ScriptedSite) -> None:
    await gone(here, site)
    listed = here.gateway.directory._sites[site.name]
    heard_s = here.gateway.clock() - 2 * MAX_AWAY_S[Lane.INTERACTIVE]
    here.gateway.directory._put(replace(listed, load=replace(listed.load, received_s=heard_s)))


@pytest.mark.parametrize("model", ["m", "name"])
@pytest.mark.parametrize("asked", [{"tools": TOOLS}, {"logprobs": True}])
def test_a_site_that_is_gone_for_long_lends_no_ability(model: str, asked: dict[str, Any]) -> None:
    async def scenario(here: Scene, edge: Edge) -> None:
        able = await here.site("able", features=("chat", "tools", "logprobs"))
        await here.site("plain", features=("chat",))
        await gone_for_long(here, able)
        error_of(await edge.chat(model=model, **asked), 400)

    play(scenario)


@pytest.mark.parametrize(("leave", "status"), [(gone, 529), (gone_for_long, 400)])
def test_a_site_that_is_gone_for_long_counts_no_tokens(
    leave: Callable[[Scene, ScriptedSite], Awaitable[None]], status: int
) -> None:
    async def scenario(here: Scene, edge: Edge) -> None:
        able = await here.site("able", features=("chat", "count"))
        await here.site("plain", features=("chat",))
        await leave(here, able)
        response = await edge.post("/v1/messages/count_tokens", chat_body(model="m"))
        assert response.status_code == status, response.text

    play(scenario)


def test_a_site_that_is_gone_for_long_makes_no_prompt_fit() -> None:
    """It stays listed. Clients that shorten their prompts at a 400 would send them again and again."""

    async def scenario(here: Scene, edge: Edge) -> None:
        long, short = await here.site("long", context_tokens=4096), await here.site("short")
        await gone_for_long(here, long)
        asked = asyncio.create_task(edge.chat(model="m"))
        await reject(short, pb.Rejected.CONTEXT_LENGTH)
        assert error_of(await asked, 400)["code"] == "context_length_exceeded"

    play(scenario)


@pytest.mark.parametrize("reason", [pb.Rejected.UNSUPPORTED, pb.Rejected.CONTEXT_LENGTH])
@pytest.mark.parametrize(("first", "status"), [(pb.Rejected.FULL, 503), (pb.Rejected.INTERNAL, 502)])
def test_the_fault_of_a_site_that_could_have_answered_is_no_mistake_of_the_client(
    first: pb.Rejected.Reason, status: int, reason: pb.Rejected.Reason
) -> None:
    async def scenario(here: Scene, edge: Edge) -> None:
        able = await here.site("able", context_tokens=4096)
        asked = asyncio.create_task(edge.chat(model="m"))
        await until(lambda: not able.inbox.empty(), "the assignment")
        other = await here.site("other")
        await reject(able, first)
        await reject(other, reason)
        assert "able said no" in error_of(await asked, status)["message"]

    play(scenario)


def test_the_last_try_reports_the_fault_of_a_site_that_could_have_answered() -> None:
    async def scenario(here: Scene, edge: Edge) -> None:
        here.gateway.max_tries = 2
        able = await here.site("able")
        asked = asyncio.create_task(edge.chat(model="m"))
        await until(lambda: not able.inbox.empty(), "the assignment")
        other = await here.site("other")
        await reject(able, pb.Rejected.FULL)
        await reject(other, pb.Rejected.UNSUPPORTED)
        assert "able said no" in error_of(await asked, 503)["message"]

    play(scenario)


def test_a_prompt_too_long_for_every_site_is_a_mistake_of_the_client_though_one_was_full() -> None:
    async def scenario(here: Scene, edge: Edge) -> None:
        full = await here.site("full")
        asked = asyncio.create_task(edge.chat(model="m"))
        await until(lambda: not full.inbox.empty(), "the assignment")
        other = await here.site("other")
        await reject(full, pb.Rejected.FULL)
        await reject(other, pb.Rejected.CONTEXT_LENGTH)
        assert error_of(await asked, 400)["code"] == "context_length_exceeded"

    play(scenario)


async def reject(site: ScriptedSite, reason: pb.Rejected.Reason) -> None:
    attempt_id = (await site.next()).assign.attempt_id
    message = f"{site.name} said no"
    await site.send(rejected=pb.Rejected(attempt_id=attempt_id, reason=reason, message=message))
