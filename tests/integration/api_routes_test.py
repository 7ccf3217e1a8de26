"""A route through every format: the answer has the asked name, the header and the record the real model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gateway.domain import Caller
from gateway.routing.model_routes import ModelRoute, Target, When
from tests.support.answers import run_over_http
from tests.support.fakes.edge import CALLERS, Edge, error_of, events_of
from tests.support.fakes.federation import Scene
from wire import federation_pb2 as pb

ROUTES = {
    "name": ModelRoute("name", (Target("a"), Target("m", when=When.UNAVAILABLE))),
    "m": ModelRoute("m", (Target("m"), Target("a", when=When.UNAVAILABLE))),
    "gone": ModelRoute("gone", (Target("nowhere"),)),
    "taken": ModelRoute("taken", (Target("nowhere"),)),
}
TURNS = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": TURNS, "max_tokens": 9},
}


def play(scenario: Callable[[Scene, Edge], Awaitable[None]]) -> None:
    async def with_sites(here: Scene, edge: Edge) -> None:
        await here.site("one", model="a", context_tokens=64)
        await here.site("two", model="m")
        await scenario(here, edge)

    run_over_http(with_sites, routes=lambda: ROUTES)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_the_body_has_the_asked_name_and_the_header_the_model(path: str, stream: bool) -> None:
    async def scenario(here: Scene, edge: Edge) -> None:
        asked = asyncio.create_task(edge.post(path, {"model": "name", "stream": stream, **BODIES[path]}))
        site = here.sites[0]
        await site.finish(await site.assigned(), "Hello", 2)
        response = await asked
        assert response.status_code == 200, response.text
        assert response.headers["x-mico-model"] == "a"
        assert response.headers["x-mico-site"] == "one"
        assert '"model":"name"' in response.text.replace('": "', '":"')
        assert '"model":"a"' not in response.text.replace('": "', '":"')
        assert here.outcomes[0].asked_model == "name"

    play(scenario)


def test_embeddings_take_the_route_too() -> None:
    async def scenario(here: Scene, edge: Edge) -> None:
        for site in here.sites:
            await site.close()
        site = await here.site("three", model="a", features=("embed",))
        asked = asyncio.create_task(edge.post("/v1/embeddings", {"model": "name", "input": "Hi"}))
        assign = await site.assigned()
        pooled = [pb.Pooled(index=0, vector=b"\0" * 16)]
        await site.step(assign, "", 0, finish=pb.Delta.STOP, pooled=pooled)
        response = await asked
        assert (response.json()["model"], response.headers["x-mico-model"]) == ("name", "a")

    play(scenario)


def test_a_stream_is_the_asked_names_from_its_first_chunk_on() -> None:
    async def scenario(here: Scene, edge: Edge) -> None:
        asked = asyncio.create_task(edge.chat(model="name", stream=True))
        site = here.sites[0]
        await site.finish(await site.assigned(), "Hello", 2)
        assert {event["model"] for event in events_of((await asked).content)} == {"name"}

    play(scenario)


def test_an_answer_without_a_route_names_its_model_too() -> None:
    async def scenario(here: Scene, edge: Edge) -> None:
        asked = asyncio.create_task(edge.chat(model="a"))
        site = here.sites[0]
        await site.finish(await site.assigned(), "Hello", 2)
        assert (await asked).headers["x-mico-model"] == "a"

    play(scenario)


def test_the_list_of_models_has_each_name_once_and_shows_routes() -> None:
    async def scenario(here: Scene, edge: Edge) -> None:
        cards = (await edge.http.get("/v1/models")).json()["data"]
        assert sorted(card["id"] for card in cards) == ["a", "m", "name"], "nothing serves the third route"
        by_id = {card["id"]: card for card in cards}
        assert by_id["name"]["owned_by"] == by_id["m"]["owned_by"] == "route"
        assert by_id["name"]["max_model_len"] == 1024, "the longest of its targets"
        assert (await edge.http.get("/v1/models/name")).json() == by_id["name"]

    play(scenario)


def test_a_model_is_not_listed_where_its_name_is_a_route_that_nothing_serves() -> None:
    async def scenario(here: Scene, edge: Edge) -> None:
        await here.site("three", model="taken")
        cards = (await edge.http.get("/v1/models")).json()["data"]
        assert "taken" not in {card["id"] for card in cards}
        for name in ("taken", "gone"):
            refused = await edge.post("/v1/completions", {"model": name, "prompt": "x"})
            assert "no site serves a model of" in error_of(refused, 503)["message"]

    play(scenario)


def test_a_key_sees_a_route_if_it_may_use_a_target() -> None:
    async def scenario(here: Scene, edge: Edge) -> None:
        async def listed(secret: str) -> set[str]:
            headers = {"authorization": f"Bearer {secret}"}
            cards = (await edge.http.get("/v1/models", headers=headers)).json()["data"]
            return {card["id"] for card in cards}

        assert await listed("only-a") == {"a", "name", "m"}
        assert await listed("only-the-name") == set()
        headers = {"authorization": "Bearer only-the-name"}
        refused = await edge.post("/v1/completions", {"model": "name", "prompt": "x"}, **headers)
        assert error_of(refused, 403)["param"] == "model"

    narrow = {
        "only-a": Caller("k1", "t", models=frozenset({"a"})),
        "only-the-name": Caller("k2", "t", models=frozenset({"name"})),
    }
    with pytest.MonkeyPatch.context() as patched:
        for secret, caller in narrow.items():
            patched.setitem(CALLERS, secret, caller)
        play(scenario)


def test_what_no_target_can_do_is_refused_before_any_site_is_asked() -> None:
    async def scenario(here: Scene, edge: Edge) -> None:
        too_many = await edge.chat(model="name", max_tokens=2000)
        assert error_of(too_many, 400)["param"] == "max_tokens"
        tools = [{"type": "function", "function": {"name": "f"}}]
        assert error_of(await edge.chat(model="name", tools=tools), 400)["param"] == "tools"
        fits_one = asyncio.create_task(edge.chat(model="name", max_tokens=500))
        longer = here.sites[1]
        await longer.finish(await longer.assigned(), "room", 2)
        assert (await fits_one).headers["x-mico-model"] == "m", "the first has 64 tokens of context"

    play(scenario)


def test_a_route_that_nothing_serves_is_a_503_and_no_404() -> None:
    async def scenario(here: Scene, edge: Edge) -> None:
        response = await edge.chat(model="gone")
        assert error_of(response, 503)["code"] == "no_site"
        assert int(response.headers["retry-after"]) >= 1

    play(scenario)
