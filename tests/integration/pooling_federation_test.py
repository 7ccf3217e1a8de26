"""Embeddings and ranks through a gateway and sites to servers: exact, once, and taken over where one dies."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.domain import Delta, Query, Sampling, Usage
from gateway.errors import BadRequest, NoSite
from gateway.outcome import Status
from gateway.prompt import Pooled, Pooling
from gateway.query.answer import answer
from site_engine import remote_site
from site_engine.remote.concurrency import INITIAL_LIMIT
from tests.support.fakes.federation import until
from tests.support.openai_server import Mood
from tests.support.remote_fleet import Fleet, run
from tests.support.server_abilities import embed, relevance

EMBEDS = {"features": ("embed", "rerank")}
BOTH = {"a": EMBEDS, "b": EMBEDS}


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_EVERY_S", "LIST_EVERY_S", "BACKOFF_FIRST_S"):
        monkeypatch.setattr(remote_site, name, 0.02)


def pooling(fleet: Fleet, task: str, inputs: int, **body: Any) -> Query:
    prompt = Pooling(task, json.dumps(body), inputs, tokens=3)
    return replace(fleet.here.query(), prompt=prompt, sampling=Sampling(max_tokens=0))


def embedding(fleet: Fleet, *texts: str, **more: Any) -> Query:
    return pooling(fleet, "embed", len(texts), input=texts, **more)


async def results(fleet: Fleet, query: Query) -> tuple[list[Pooled], Usage]:
    found: dict[int, Pooled] = {}
    async for piece in answer(fleet.here.gateway, query):
        if isinstance(piece, Delta):
            found.update((each.index, each) for each in piece.pooled)
        usage = piece
    assert isinstance(usage, Usage)
    return [found[index] for index in range(len(found))], usage


async def vectors(fleet: Fleet, query: Query) -> list[list[float]]:
    found, _ = await results(fleet, query)
    return [list(struct.unpack(f"<{len(each.vector) // 4}f", each.vector)) for each in found]


@pytest.mark.parametrize("knows_base64", [True, False])
def test_embeddings_are_the_servers_own(knows_base64: bool) -> None:
    async def scenario(fleet: Fleet) -> None:
        found = await vectors(fleet, embedding(fleet, "one", "two", dimensions=40))
        assert found == [embed("one", 40), embed("two", 40)]
        (outcome,) = fleet.here.outcomes
        assert outcome.status is Status.ANSWERED
        assert (outcome.prompt_tokens, outcome.completion_tokens, outcome.forecast) == (7, 0, None)
        await fleet.at_rest()

    run(scenario, "a", settings=BOTH, knows_base64=knows_base64)


@pytest.mark.parametrize("metrics", [None, "te_request_count 1\n"])
def test_ranks_are_the_servers_own(metrics: str | None) -> None:
    async def scenario(fleet: Fleet) -> None:
        documents = ["a red fox", "the sea", "a red sea"]
        query = pooling(fleet, "rerank", 3, query="red sea", documents=documents)
        found, _ = await results(fleet, query)
        assert [each.score for each in found] == [relevance("red sea", each) for each in documents]
        (asked,) = fleet.servers["a"].asked
        assert ("texts" in asked) is (metrics is not None)

    run(scenario, "a", settings=BOTH, metrics=metrics)


def test_vectors_beyond_one_message_of_the_link_arrive_whole() -> None:
    async def scenario(fleet: Fleet) -> None:
        texts = [f"text {number}" for number in range(300)]
        found = await vectors(fleet, embedding(fleet, *texts))
        assert found == [embed(each, 4_096) for each in texts]
        await fleet.at_rest()

    run(scenario, "a", settings=BOTH, dimensions=4_096)


@pytest.mark.parametrize("mood", [Mood.FAILING, Mood.FULL, Mood.GARBAGE])
def test_another_site_answers_where_one_fails(mood: Mood) -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.servers["a"].mood = mood
        for _ in range(4):
            assert await vectors(fleet, embedding(fleet, "one")) == [embed("one", 8)]
        assert {each.status for each in fleet.here.outcomes} == {Status.ANSWERED}
        await fleet.at_rest()

    run(scenario, "a", "b", settings=BOTH)


def test_another_site_answers_where_one_is_killed_at_work() -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.servers["a"].go.clear()
        fleet.hold_back("b")
        asking = [asyncio.create_task(vectors(fleet, embedding(fleet, f"t{n}"))) for n in range(3)]
        await fleet.servers["a"].until(lambda: len(fleet.servers["a"].asked) == 3)
        fleet.hold_back()
        await fleet.servers["a"].die()
        assert await asyncio.gather(*asking) == [[embed(f"t{n}", 8)] for n in range(3)]
        for outcome in fleet.here.outcomes:
            assert [each.decision.site for each in outcome.attempts] == ["a", "b"]
            assert outcome.prompt_tokens == 7
        await fleet.at_rest()

    run(scenario, "a", "b", settings=BOTH)


def test_only_sites_with_the_feature_are_asked() -> None:
    async def scenario(fleet: Fleet) -> None:
        for _ in range(6):
            await vectors(fleet, embedding(fleet, "one"))
        assert not fleet.servers["chats"].asked
        await fleet.servers["b"].die()
        await until(lambda: fleet.ready() == {"chats"}, "the site that embeds is gone")
        with pytest.raises(NoSite, match="lacks embed"):
            await vectors(fleet, embedding(fleet, "one"))

    run(scenario, "chats", "b", settings={"b": EMBEDS})


def test_a_mistake_of_the_client_is_told_in_the_servers_words() -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.servers["a"].mood = Mood.INVALID
        with pytest.raises(BadRequest, match="top_p must be in"):
            await vectors(fleet, embedding(fleet, "one"))
        assert fleet.here.outcomes[0].prompt_tokens == 0

    run(scenario, "a", settings=BOTH)


def test_a_server_that_only_embeds_gets_more_than_the_first_few_at_once() -> None:
    async def scenario(fleet: Fleet) -> None:
        server = fleet.servers["a"]
        for _ in range(3):
            await asyncio.gather(*(vectors(fleet, embedding(fleet, f"t{n}")) for n in range(32)))
        server.go.clear()
        asking = [asyncio.create_task(vectors(fleet, embedding(fleet, f"t{n}"))) for n in range(32)]
        await server.until(lambda: server.running > INITIAL_LIMIT)
        server.go.set()
        assert await asyncio.gather(*asking) == [[embed(f"t{n}", 8)] for n in range(32)]
        await fleet.at_rest()

    run(scenario, "a", settings={"a": {**EMBEDS, "slots": 32}})


def test_a_client_that_leaves_frees_the_server() -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.servers["a"].go.clear()
        asking = asyncio.create_task(vectors(fleet, embedding(fleet, "one")))
        await fleet.servers["a"].until(lambda: fleet.servers["a"].asked)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await fleet.servers["a"].until(lambda: fleet.servers["a"].left == 1)
        await fleet.at_rest()

    run(scenario, "a", settings=BOTH)
