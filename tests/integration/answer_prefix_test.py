"""A conversation stays where the beginning of its prompt is cached, unless waiting there costs more."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import msgspec
import pytest

from gateway.decision import Decision
from gateway.domain import Query
from gateway.prompt import Chat, Message
from gateway.routing.prefixes import HASH_BYTES, prefix_of
from tests.support.answers import assigned_site, collect, run
from tests.support.fakes.edge import MODEL, Edge
from tests.support.fakes.edge import run as run_edge
from tests.support.fakes.federation import CALLER, Scene, ScriptedSite, until
from wire import federation_pb2 as pb

COST = pb.IterationCost(base_s=0.01, per_token_s=0.001)


def cached_tokens(decision: Decision) -> float:
    """Return the tokens of the prompt that were expected in the cache of the chosen site."""
    return next(each.cached_tokens for each in decision.estimates if each.site == decision.site)


def turn(here: Scene, of: str, number: int, tenant: str = CALLER.tenant) -> Query:
    """Return turn `number` of the conversation `of`: its prompt begins with that of the turn before."""
    messages = [Message("user", f"{of} {each} ".ljust(200, ".")) for each in range(number + 1)]
    query = here.query(caller=replace(CALLER, tenant=tenant))
    return msgspec.structs.replace(query, prompt=Chat(tuple(messages)))


async def sites_of(here: Scene, names: str) -> list[ScriptedSite]:
    sites = [await here.site(name, slots=8, answers_pings=False) for name in names]  # none is nearer
    await report(here, sites)
    return sites


async def report(here: Scene, sites: list[ScriptedSite]) -> None:
    for site in sites:
        await site.report(iteration=COST)
    known = here.gateway.directory
    await until(lambda: all(each.load.iteration.per_token_s for each in known.sites), "the reports")


async def serve(here: Scene, query: Query, *sites: ScriptedSite, cached: int = 7) -> str:
    """Answer a query; return the site that it went to, which had `cached` of its 7 tokens."""
    task = asyncio.create_task(collect(here, query))
    site, assign = await assigned_site(here, *sites)
    timings = pb.Timings(cached_prompt_tokens=cached)
    await site.step(assign, "x", 1, finish=pb.Delta.STOP, timings=timings)
    await task
    return site.name


def test_turns_of_a_conversation_stay_at_the_site_that_has_them() -> None:
    async def scenario(here: Scene) -> None:
        sites = await sites_of(here, "abc")
        served = [
            [await serve(here, turn(here, f"talk {of}", n), *sites) for of in range(8)] for n in range(6)
        ]
        assert len(set(served[0])) == 3, "conversations begin everywhere"
        assert served[1:] == 5 * served[:1], "and stay"
        decision = here.outcomes[-1].attempts[0].decision
        assert cached_tokens(decision) > 0
        assert "prompt tokens cached" in decision.reason

    run(scenario)


def test_a_turn_moves_where_waiting_costs_more_than_its_prefix() -> None:
    async def scenario(here: Scene) -> None:
        sites = await sites_of(here, "ab")
        home = await serve(here, turn(here, "talk", 0), *sites)
        busy, idle = sorted(sites, key=lambda site: site.name != home)
        await busy.report(iteration=COST, running=8, running_remaining=[500] * 8, pending=20)
        known = here.gateway.directory
        await until(lambda: any(each.load.pending == 20 for each in known.sites), "the report")
        assert await serve(here, turn(here, "talk", 1), *sites) == idle.name

    run(scenario)


def named(here: Scene, name: str, text: str) -> Query:
    """Return a query of the conversation `name` whose text is like no other."""
    prompt = Chat((Message("user", text.ljust(1_000, ".")),))
    return msgspec.structs.replace(here.query(), prompt=prompt, conversation=name)


def test_a_conversation_that_the_client_names_stays_though_its_texts_differ() -> None:
    async def scenario(here: Scene) -> None:
        sites = await sites_of(here, "abc")
        served = [
            [await serve(here, named(here, f"talk {of}", f"{of} {n}"), *sites, cached=4) for of in range(7)]
            for n in range(4)
        ]
        assert len(set(served[0])) == 3, "conversations begin everywhere"
        assert served[1:] == 3 * served[:1], "and stay"

    run(scenario)


def test_a_name_of_a_conversation_that_tells_nothing_is_soon_of_no_account() -> None:
    async def scenario(here: Scene) -> None:
        sites = await sites_of(here, "abc")
        for number in range(12):
            await serve(here, named(here, "one for all", str(number)), *sites, cached=0)
        expected = [
            max(estimate.cached_tokens for estimate in outcome.attempts[0].decision.estimates) > 0
            for outcome in here.outcomes
        ]
        assert expected == [False, True] + 10 * [False]

    run(scenario)


def test_a_name_of_a_conversation_never_overrides_time() -> None:
    async def scenario(here: Scene) -> None:
        sites = await sites_of(here, "ab")
        home = await serve(here, named(here, "talk", "0"), *sites)
        busy, idle = sorted(sites, key=lambda site: site.name != home)
        await busy.report(iteration=COST, running=8, running_remaining=[500] * 8, pending=20)
        known = here.gateway.directory
        await until(lambda: any(each.load.pending == 20 for each in known.sites), "the report")
        assert await serve(here, named(here, "talk", "1"), *sites) == idle.name

    run(scenario)


NAMED = [
    ({"prompt_cache_key": "k"}, {}, "k"),
    ({"prompt_cache_key": "k"}, {"x_session_id": "s"}, "s"),
    ({"prompt_cache_key": "\U0001f600" * 300}, {}, "\U0001f600" * 200),
    ({"prompt_cache_key": 7}, {}, ""),
    ({}, {}, ""),
]


@pytest.mark.parametrize(("body", "headers", "conversation"), NAMED)
@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_requests_name_their_conversation(
    path: str, body: dict[str, object], headers: dict[str, str], conversation: str
) -> None:
    prompt = {"chat/completions": "messages", "completions": "prompt", "responses": "input"}[path]
    given = [{"role": "user", "content": "Hi"}] if prompt == "messages" else "Hi"

    refused = path == "responses" and not isinstance(body.get("prompt_cache_key", ""), str)

    async def scenario(edge: Edge) -> None:
        response = await edge.post(f"/v1/{path}", {"model": MODEL, prompt: given} | body, **headers)
        assert response.status_code == (400 if refused else 200)

    found = [query.conversation for query in run_edge(scenario).queries]
    assert found == ([] if refused else [conversation])


def test_a_conversation_that_began_at_another_gateway_stays_where_it_began() -> None:
    async def scenario(here: Scene) -> None:
        sites = await sites_of(here, "abc")
        known = here.gateway.prefixes
        for number, site in enumerate(sites):
            begun = turn(here, f"talk {number}", 0)
            await site.send(
                prefixes=pb.Prefixes(hashes=prefix_of(begun.prompt, CALLER.tenant, "m").announced)
            )
        await until(lambda: len(known) == 3, "the gateway to hear of it")
        for number in (2, 2, 1, 1, 0, 0):
            assert await serve(here, turn(here, f"talk {number}", 1), *sites) == "abc"[number]

    run(scenario)


def test_a_site_tells_of_prompts_no_more_often_than_once_in_half_a_second() -> None:
    async def scenario(here: Scene) -> None:
        (site,) = await sites_of(here, "a")
        told = [pb.SiteMessage(prefixes=pb.Prefixes(hashes=number.to_bytes(8))) for number in range(5)]
        await site.send(bunch=pb.SiteBunch(messages=told))
        await site.report(running=1)
        await until(lambda: here.gateway.directory.sites[0].load.running == 1, "the report")
        assert len(here.gateway.prefixes) == 1

    run(scenario)


@pytest.mark.parametrize("hashes", [b"x" * 7, b"x" * 1032])
def test_a_site_that_tells_no_hashes_is_cut_off(hashes: bytes) -> None:
    async def scenario(here: Scene) -> None:
        (site,) = await sites_of(here, "a")
        await site.send(prefixes=pb.Prefixes(hashes=hashes))
        await until(lambda: not here.gateway.federation.links, "the link to end")
        assert len(here.gateway.prefixes) == 0

    run(scenario)


def test_sites_get_the_hashes_by_which_gateways_know_a_prompt() -> None:
    async def scenario(here: Scene) -> None:
        sites = await sites_of(here, "ab")
        query = msgspec.structs.replace(turn(here, "talk", 0), conversation="talk")
        task = asyncio.create_task(collect(here, query))
        site, assign = await assigned_site(here, *sites)
        assert assign.prefix_hashes == prefix_of(query.prompt, CALLER.tenant, "m", "talk").announced
        assert len(assign.prefix_hashes) == 2 * HASH_BYTES
        await site.step(assign, "x", 1, finish=pb.Delta.STOP)
        await task

    run(scenario)


@pytest.mark.parametrize("told", ["nothing cached", "unknown", "cut before it told"])
def test_a_site_that_does_not_tell_what_it_had_keeps_its_expectations(told: str) -> None:
    async def scenario(here: Scene) -> None:
        sites = await sites_of(here, "ab")
        for number in range(6):
            task = asyncio.create_task(collect(here, turn(here, "talk", number + 1)))
            site, assign = await assigned_site(here, *sites)
            if told == "cut before it told":
                await site.step(assign, "x", 1)
                (state,) = here.gateway.live_queries.values()
                await until(partial(getattr, state, "opened"), "the first token")
                assert state.current is not None
                state.current.truncate()  # as where a quota ends
                assert (await site.next()).WhichOneof("body") == "cancel"
                await site.step(assign, "", 1, finish=pb.Delta.CANCELLED)
            else:
                timings = pb.Timings(cached_unknown=told == "unknown")
                await site.step(assign, "x", 1, finish=pb.Delta.STOP, timings=timings)
            await task
            await here.gateway.wait_settled()
        expected = [
            max(each.cached_tokens for each in outcome.attempts[0].decision.estimates) / (number + 2)
            for number, outcome in enumerate(here.outcomes)
        ]
        assert (expected[-1] > expected[1]) is (told != "nothing cached")

    run(scenario)


def test_a_site_that_starts_anew_is_expected_to_have_nothing() -> None:
    async def scenario(here: Scene) -> None:
        sites = await sites_of(here, "ab")
        home = await serve(here, turn(here, "talk", 0), *sites)
        site = next(each for each in sites if each.name == home)
        await site.close()
        await until(lambda: len(here.gateway.federation.links) == 1, "the site to be gone")
        site.boot_id = "another"
        await site.join()
        await report(here, sites)
        await serve(here, turn(here, "talk", 1), *sites)
        estimates = here.outcomes[-1].attempts[0].decision.estimates
        assert [each.cached_tokens for each in estimates] == [0.0, 0.0]

    run(scenario)


def test_a_tenant_learns_nothing_of_the_prompts_of_another() -> None:
    async def scenario(here: Scene) -> None:
        sites = await sites_of(here, "ab")
        home = await serve(here, turn(here, "talk", 0, "one"), *sites)
        for _ in range(2):  # with nothing known, turns alternate
            await serve(here, turn(here, "talk", 0, "two"), *sites)
        others = [each.attempts[0].decision for each in here.outcomes[1:2]]
        assert [cached_tokens(each) for each in others] == [0.0]
        assert home in "ab"

    run(scenario)


def test_what_every_site_has_favours_none() -> None:
    async def scenario(here: Scene) -> None:
        sites = await sites_of(here, "abcdef")
        system = Message("system", "You are helpful. ".ljust(4_000, "."))

        def first_turn(number: int) -> Query:
            chat = Chat((system, Message("user", f"{number} ".ljust(30, "?"))))
            return msgspec.structs.replace(here.query(), prompt=chat)

        tasks = [asyncio.create_task(collect(here, first_turn(n))) for n in range(6)]
        for site in sites:  # a burst: nothing is known of its prompts yet
            await site.finish(await site.assigned(), "x", 1)
        await asyncio.gather(*tasks)
        served = [await serve(here, first_turn(6 + n), *sites) for n in range(12)]
        assert sorted(served) == sorted("abcdef" * 2)

    run(scenario)


def test_a_site_that_caches_less_than_expected_is_expected_to_have_less() -> None:
    async def scenario(here: Scene) -> None:
        sites = await sites_of(here, "ab")
        for number in range(8):
            await serve(here, turn(here, "talk", number), *sites, cached=0)
        shares = [
            estimate.cached_tokens / here.outcomes[n].attempts[0].prompt_tokens
            for n in range(1, 8)
            for estimate in here.outcomes[n].attempts[0].decision.estimates
            if estimate.site == here.outcomes[n].site
        ]
        per_turn = [share / (n + 1) for n, share in enumerate(shares)]
        assert per_turn[-1] < 0.5 * per_turn[0]

    run(scenario)
