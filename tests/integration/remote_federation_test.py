"""A gateway over sites in front of servers and one of our own: answers, failing over, and what can't be."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from gateway.domain import AnswerEvent, Delta, Finish, Opening, Query, Usage
from gateway.errors import BadRequest, ContextTooLong, UpstreamLost
from gateway.outcome import Status
from gateway.prompt import Chat, Message, Prompt
from gateway.query.answer import answer
from site_engine import remote_site
from tests.support.fakes.federation import until
from tests.support.openai_server import Mood
from tests.support.remote_fleet import Fleet, run
from wire import federation_pb2 as pb

SAID = "Say something."


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_EVERY_S", "LIST_EVERY_S", "REFRESH_EVERY_S", "BACKOFF_FIRST_S"):
        monkeypatch.setattr(remote_site, name, 0.02)


def test_three_servers_answer_as_one() -> None:
    async def scenario(fleet: Fleet) -> None:
        queries = [fleet.here.query(max_tokens=9) for _ in range(12)]
        answers = await asyncio.gather(*map(fleet.ask, queries))
        assert answers == [(SAID[:9], Usage(prompt_tokens=7, completion_tokens=9))] * 12
        assert all(server.asked for server in fleet.servers.values())
        assert [outcome.status for outcome in fleet.here.outcomes] == [Status.ANSWERED] * 12
        await fleet.at_rest()

    run(scenario, "a", "b", "c")


@pytest.mark.parametrize("mood", [Mood.FAILING, Mood.FULL, Mood.GARBAGE])
def test_before_the_first_word_another_site_takes_over(mood: Mood) -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.servers["a"].mood = mood
        for _ in range(4):
            text, usage = await fleet.ask(fleet.here.query(max_tokens=5))
            assert (text, usage.completion_tokens) == (SAID[:5], 5)
        await fleet.at_rest()

    run(scenario, "a", "b")


def test_half_a_chat_that_no_server_can_continue_ends_with_an_error() -> None:
    async def scenario(fleet: Fleet) -> None:
        for server in fleet.servers.values():
            server.mood = Mood.HALF
            server.go.clear()
        asking = asyncio.create_task(fleet.ask(fleet.here.query(max_tokens=9)))
        await until(
            lambda: any(each.opened for each in fleet.here.gateway.live_queries.values()), "a first word"
        )
        for server in fleet.servers.values():
            server.go.set()
        with pytest.raises(UpstreamLost, match="no other site could go on"):
            await asking
        assert sum(len(server.asked) for server in fleet.servers.values()) == 1
        assert fleet.here.outcomes[0].completion_tokens == 1
        await fleet.at_rest()

    run(scenario, "a", "b")


async def pieces(fleet: Fleet, query: Query) -> list[AnswerEvent]:
    return [piece async for piece in answer(fleet.here.gateway, query)]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "refusal"])
def test_what_a_server_says_beside_its_text_reaches_the_client(name: str) -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.servers["a"].thinks, fleet.servers["a"].cached_tokens = name, 5
        opening, *deltas, usage = await pieces(fleet, fleet.here.query(max_tokens=5))
        told = [each for each in deltas if isinstance(each, Delta)]
        assert isinstance(opening, Opening)
        beside = "".join(each.refusal if name == "refusal" else each.reasoning for each in told)
        assert (beside, "".join(each.text for each in told)) == (SAID[:2], SAID[2:5])
        thought = 0 if name == "refusal" else 2
        assert usage == Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=5, reasoning_tokens=thought)
        await fleet.at_rest()

    run(scenario, "a")


def test_an_answer_that_a_server_filtered_says_so() -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.servers["a"].ends = "content_filter"
        *_, last, _ = await pieces(fleet, fleet.here.query(max_tokens=5))
        assert isinstance(last, Delta) and last.finish is Finish.CONTENT_FILTER
        await fleet.at_rest()

    run(scenario, "a")


def test_half_a_thought_goes_on_nowhere_else() -> None:
    async def scenario(fleet: Fleet) -> None:
        for server in fleet.servers.values():
            server.mood, server.thinks = Mood.HALF, "reasoning"
            server.go.clear()
        asking = asyncio.create_task(fleet.ask(fleet.here.query(max_tokens=9)))
        await until(
            lambda: any(each.opened for each in fleet.here.gateway.live_queries.values()), "a thought"
        )
        for server in fleet.servers.values():
            server.go.set()
        with pytest.raises(UpstreamLost, match="reasoning"):
            await asking
        assert sum(len(server.asked) for server in fleet.servers.values()) == 1
        await fleet.at_rest()

    run(scenario, "a", "b", owner="vllm")


def test_words_that_come_together_with_the_failure_of_an_answer_are_not_missed() -> None:
    """The client has nothing yet, so that a server that can't continue a chat may still begin it anew."""

    async def scenario(fleet: Fleet) -> None:
        fleet.hold_back("a")  # the query goes to our own
        own = await fleet.here.site("own")
        asking = asyncio.create_task(fleet.ask(fleet.here.query(max_tokens=9)))
        assign = await own.assigned()
        fleet.hold_back()
        await own.step(assign, SAID[:3], 3, finish=pb.Delta.FAILED)
        assert (await asking)[0] == SAID[:9]
        await fleet.at_rest()

    run(scenario, "a")


@pytest.mark.parametrize("prompt", [Chat((Message("user", SAID),)), SAID])
def test_from_server_to_server_an_answer_goes_on_where_it_broke(prompt: Prompt) -> None:
    async def scenario(fleet: Fleet) -> None:
        for server in fleet.servers.values():
            server.mood = Mood.HALF
        query = replace(fleet.here.query(max_tokens=9), prompt=prompt)
        fleet.servers["c"].mood = Mood.ANSWERING
        text, usage = await fleet.ask(query)
        assert (text, usage.completion_tokens) == (SAID[:9], 9)
        (outcome,) = fleet.here.outcomes
        assert (outcome.status, outcome.completion_tokens) == (Status.ANSWERED, 9)
        await fleet.at_rest()

    run(scenario, "a", "b", "c", owner="vllm")


def test_from_our_own_site_to_a_server_and_back() -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.hold_back("a")  # the query goes to our own
        own = await fleet.here.site("own")
        asking = asyncio.create_task(fleet.ask(fleet.here.query(max_tokens=9)))
        assign = await own.assigned()
        server = fleet.servers["a"]
        fleet.hold_back()
        server.go.clear()
        await own.step(assign, SAID[:3], 3)
        (state,) = fleet.here.gateway.live_queries.values()
        await until(lambda: state.opened, "a first word")
        await own.close()
        await until(lambda: state.delivered and state.delivered.text == SAID[:4], "a letter of the server's")
        assert server.asked[-1]["messages"][-1] == {"role": "assistant", "content": SAID[:3]}
        again = await fleet.here.site("again", features=("chat", "resume", "resume_text", "resume_chat"))
        await server.die()
        resumed = await again.assigned()
        assert (resumed.resume.text, resumed.resume.tokens) == (SAID[:4], 4)
        assert not resumed.resume.token_ids  # the server's are unknown
        await again.finish(resumed, SAID[4:9], 9)
        text, usage = await asking
        assert (text, usage) == (SAID[:9], Usage(prompt_tokens=7, completion_tokens=9))
        assert len(fleet.here.outcomes) == 1

    run(scenario, "a", owner="vllm")


def test_what_our_own_sites_began_goes_on_exactly_where_one_is_left() -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.hold_back("a")
        sites = [await fleet.here.site("own"), await fleet.here.site("other")]
        asking = asyncio.create_task(fleet.ask(fleet.here.query(max_tokens=9)))
        await until(lambda: any(not site.inbox.empty() for site in sites), "an assignment")
        own = next(site for site in sites if not site.inbox.empty())
        other = next(site for site in sites if site is not own)
        assign = await own.assigned()
        fleet.hold_back()
        asked = len(fleet.servers["a"].asked)
        await own.step(assign, SAID[:3], 3)
        await until(
            lambda: any(each.opened for each in fleet.here.gateway.live_queries.values()), "a first word"
        )
        await other.report()
        await own.close()
        resumed = await other.assigned()
        assert list(resumed.resume.token_ids) == [ord(letter) for letter in SAID[:3]]
        await other.finish(resumed, SAID[3:9], 9)
        assert (await asking)[0] == SAID[:9]
        assert len(fleet.servers["a"].asked) == asked

    run(scenario, "a", owner="vllm")


@pytest.mark.parametrize(("mood", "error"), [(Mood.TOO_LONG, ContextTooLong), (Mood.INVALID, BadRequest)])
def test_a_clients_mistake_is_told_as_the_server_told_it(mood: Mood, error: type[Exception]) -> None:
    async def scenario(fleet: Fleet) -> None:
        for server in fleet.servers.values():
            server.mood = mood
        with pytest.raises(error, match=r"maximum context|top_p"):
            await fleet.ask(fleet.here.query())
        assert sum(len(server.asked) for server in fleet.servers.values()) == 1
        (outcome,) = fleet.here.outcomes
        assert (outcome.status, outcome.prompt_tokens, outcome.completion_tokens) == (Status.REFUSED, 0, 0)

    run(scenario, "a", "b")


def test_a_killed_server_leaves_the_federation_and_comes_back() -> None:
    async def scenario(fleet: Fleet) -> None:
        server = fleet.servers["a"]
        await server.die()
        for _ in range(4):
            text, _ = await fleet.ask(fleet.here.query(max_tokens=5))
            assert text == SAID[:5]
        await until(lambda: fleet.ready() == {"b"}, "a has left")
        await server.start()
        await until(lambda: fleet.ready() == {"a", "b"}, "a is back")

    run(scenario, "a", "b")


def test_a_client_that_leaves_frees_the_server() -> None:
    async def scenario(fleet: Fleet) -> None:
        server = fleet.servers["a"]
        server.go.clear()
        asking = asyncio.create_task(fleet.ask(fleet.here.query(max_tokens=9)))
        await server.until(lambda: server.running)
        asking.cancel()
        await server.until(lambda: server.left == 1 and not server.running)
        await fleet.at_rest()

    run(scenario, "a")


def test_a_query_for_an_adapter_goes_to_the_servers_that_have_loaded_it() -> None:
    async def scenario(fleet: Fleet) -> None:
        directory = fleet.here.gateway.directory
        fleet.servers["b"].adapters = {"support": "m"}
        await until(lambda: "support" in directory.served, "the adapter is known")
        assert directory.served["support"].parent == "m"
        for _ in range(3):
            text, usage = await fleet.ask(fleet.here.query(max_tokens=5, model="support"))
            assert (text, usage.completion_tokens) == (SAID[:5], 5)
        assert [len(fleet.servers[name].asked) for name in "ab"] == [0, 3]
        fleet.servers["a"].adapters = {"support": "m"}
        fleet.servers["b"].adapters = {"other": "m"}
        assert (await fleet.ask(fleet.here.query(max_tokens=5, model="m")))[0] == SAID[:5]
        await until(
            lambda: {s.name for s in directory.sites if "support" in s.identity.models} == {"a"}, "it moved"
        )
        assert (await fleet.ask(fleet.here.query(max_tokens=5, model="support")))[0] == SAID[:5]
        await fleet.at_rest()

    run(scenario, "a", "b", owner="vllm")
