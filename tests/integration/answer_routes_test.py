"""A name stands for several models: what was accepted is answered by the next one, unless it has begun."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace

from gateway.domain import Caller, Opening, Query
from gateway.errors import BadRequest, Forbidden, NoSite, UpstreamFailed, UpstreamLost
from gateway.prompt import Chat, Message
from gateway.query.counting import TokenCounter
from gateway.query.targets import model_of_batch
from gateway.routing.model_routes import ModelRoute, Target, When, draw
from tests.support.answers import collect, run, start_answer, text_of
from tests.support.fakes.federation import CALLER, Scene, ScriptedSite, until
from wire import federation_pb2 as pb

FALLBACK = ModelRoute("name", (Target("a"), Target("b", when=When.UNAVAILABLE)))


def play(route: ModelRoute, scenario: Callable[[Scene], Awaitable[None]]) -> None:
    run(scenario, routes=lambda: {route.name: route})


def ask(here: Scene, **more: object) -> Query:
    return replace(here.query(model="name"), **more)


def reject(assign: pb.Assign, reason: pb.Rejected.Reason, message: str) -> dict[str, pb.Rejected]:
    return {"rejected": pb.Rejected(attempt_id=assign.attempt_id, reason=reason, message=message)}


async def two_models(here: Scene) -> tuple[ScriptedSite, ScriptedSite]:
    return await here.site("one", model="a"), await here.site("two", model="b")


def test_the_answer_names_the_model_and_the_record_both() -> None:
    async def scenario(here: Scene) -> None:
        one, two = await two_models(here)
        task = asyncio.create_task(collect(here, ask(here)))
        assign = await one.assigned()
        assert assign.model == "a"
        await one.finish(assign, "done", 1)
        opening, *_ = await task
        assert isinstance(opening, Opening)
        assert (opening.model, opening.site) == ("a", "one")
        (outcome,) = here.outcomes
        assert (outcome.model, outcome.asked_model) == ("a", "name")
        assert [attempt.model for attempt in outcome.attempts] == ["a"]
        assert two.inbox.empty()

    play(FALLBACK, scenario)


def test_a_query_of_a_model_without_a_route_is_recorded_as_it_was() -> None:
    async def scenario(here: Scene) -> None:
        one, _ = await two_models(here)
        task = asyncio.create_task(collect(here, here.query(model="a")))
        await one.finish(await one.assigned(), "done", 1)
        await task
        assert (here.outcomes[0].model, here.outcomes[0].asked_model) == ("a", "")

    play(FALLBACK, scenario)


def test_all_sites_of_a_model_are_killed_and_the_other_answers_everything() -> None:
    async def scenario(here: Scene) -> None:
        sites = [await here.site("a1", model="a"), await here.site("a2", model="a")]
        other = await here.site("b", model="b")
        before = [asyncio.create_task(collect(here, ask(here))) for _ in range(6)]
        await until(lambda: sum(site.inbox.qsize() for site in sites) == len(before), "all at sites of a")
        for site in sites:
            await site.close()
        await until(lambda: not here.gateway.directory.served.get("a"), "no site of a")
        after = [asyncio.create_task(collect(here, ask(here))) for _ in range(6)]
        for _ in range(12):
            assign = await other.assigned()
            assert assign.model == "b"
            await other.finish(assign, "from b", 1)
        answers = await asyncio.gather(*before, *after)
        assert [text_of(pieces) for pieces in answers] == ["from b"] * 12
        assert {(outcome.model, outcome.asked_model) for outcome in here.outcomes} == {("b", "name")}
        moved = [outcome for outcome in here.outcomes if len(outcome.attempts) > 1]
        assert [attempt.model for attempt in moved[0].attempts][-1] == "b"

    play(FALLBACK, scenario)


def test_after_the_first_token_only_the_same_model_goes_on() -> None:
    async def scenario(here: Scene) -> None:
        one, two = await two_models(here)
        spare = await here.site("spare", model="a")
        task, pieces = start_answer(here, ask(here))
        await until(lambda: not one.inbox.empty() or not spare.inbox.empty(), "an assignment")
        begun, same = (one, spare) if not one.inbox.empty() else (spare, one)
        await begun.step(await begun.assigned(), "Hel", 3)
        await until(lambda: text_of(pieces) == "Hel", "the first part")
        await begun.close()
        resumed = await same.assigned()
        assert resumed.model == "a"
        await same.finish(resumed, "lo", 5)
        await task
        assert text_of(pieces) == "Hello"
        assert two.inbox.empty()

    play(FALLBACK, scenario)


def test_an_answer_that_has_begun_ends_in_an_error_rather_than_as_another_model() -> None:
    async def scenario(here: Scene) -> None:
        one, two = await two_models(here)
        task, pieces = start_answer(here, ask(here, sampling=here.query(logprobs=1).sampling))
        await one.step(await one.assigned(), "Hel", 3)
        await until(lambda: text_of(pieces) == "Hel", "the first part")
        await one.close()
        with pytest.raises(UpstreamLost):
            await task
        assert two.inbox.empty()

    play(FALLBACK, scenario)


def test_a_model_that_no_site_ever_served_is_passed_over() -> None:
    async def scenario(here: Scene) -> None:
        two = await here.site("two", model="b")
        task = asyncio.create_task(collect(here, ask(here)))
        await two.finish(await two.assigned(), "from b", 1)
        assert text_of(await task) == "from b"

    play(FALLBACK, scenario)


def test_a_batch_waits_for_no_room_at_a_target_of_another_tenant() -> None:
    """Its lines go to the next target, whose room is the one that counts."""

    async def scenario(here: Scene) -> None:
        owned = await here.site("one", model="a")
        await here.site("two", model="b")
        model = owned.served_model
        model.tenant = "tenant-2"
        await owned.send(models=pb.Models(models=[model]))
        await until(lambda: here.gateway.directory.models["a"].tenant == "tenant-2", "the tenant's model")
        assert model_of_batch("name", "batch", CALLER, here.gateway) == "b"
        assert model_of_batch("name", "batch", Caller("k", "tenant-2"), here.gateway) == "a"

    play(FALLBACK, scenario)


def test_a_route_whose_models_no_site_serves_asks_to_come_back() -> None:
    async def scenario(here: Scene) -> None:
        await here.site("other", model="m")
        with pytest.raises(NoSite, match="'name'") as refused:
            await collect(here, ask(here))
        assert refused.value.retry_after_s
        assert here.outcomes[0].model == "name"

    play(FALLBACK, scenario)


def test_if_every_model_fails_the_error_is_that_of_the_first() -> None:
    async def scenario(here: Scene) -> None:
        one, two = await two_models(here)
        task = asyncio.create_task(collect(here, ask(here)))
        for site, message in ((one, "a broke"), (two, "b broke")):
            assign = await site.assigned()
            await site.step(assign, "", 0, finish=pb.Delta.FAILED, error=message)
        with pytest.raises(UpstreamFailed, match="a broke"):
            await task

    play(FALLBACK, scenario)


def test_a_prompt_too_long_for_the_canary_is_answered_by_the_longer_model() -> None:
    async def scenario(here: Scene) -> None:
        short = await here.site("short", model="a", context_tokens=64)
        long = await here.site("long", model="b")
        task = asyncio.create_task(collect(here, ask(here)))
        assign = (await short.next()).assign
        await short.send(**reject(assign, pb.Rejected.CONTEXT_LENGTH, "70 tokens do not fit"))
        await long.finish(await long.assigned(), "fits", 1)
        assert text_of(await task) == "fits"

    play(FALLBACK, scenario)


def test_a_full_model_hands_over_to_the_next() -> None:
    async def scenario(here: Scene) -> None:
        one, two = await two_models(here)
        task = asyncio.create_task(collect(here, ask(here)))
        assign = (await one.next()).assign
        await one.send(**reject(assign, pb.Rejected.FULL, "full"))
        await two.finish(await two.assigned(), "room", 1)
        assert text_of(await task) == "room"

    play(FALLBACK, scenario)


@pytest.mark.parametrize(
    "target", [Target("b", when=When.OVERLOADED), Target("b", when=When.SLOWER_THAN, slower_than_s=0.5)]
)
def test_an_overloaded_or_slow_model_is_left_by_the_estimates_and_taken_again(target: Target) -> None:
    async def scenario(here: Scene) -> None:
        one = await here.site("one", model="a", slots=1, seconds_per_token=0.01)
        two = await here.site("two", model="b", slots=1, seconds_per_token=0.01)
        busy = {"running": 1, "pending": 3, "pending_response_tokens": 900.0, "running_remaining": [300]}
        await one.report(**busy)
        await until(lambda: here.gateway.directory.load_of("one").pending == 3, "the report")
        task = asyncio.create_task(collect(here, ask(here)))
        await two.finish(await two.assigned(), "sooner", 1)
        assert text_of(await task) == "sooner"
        assert one.inbox.empty()
        await one.report()
        await until(lambda: here.gateway.directory.load_of("one").pending == 0, "the report")
        task = asyncio.create_task(collect(here, ask(here)))
        await one.finish(await one.assigned(), "again", 1)
        assert text_of(await task) == "again"

    play(ModelRoute("name", (Target("a"), target)), scenario)


def test_an_overloaded_model_still_answers_if_the_one_that_stood_in_is_lost() -> None:
    async def scenario(here: Scene) -> None:
        one = await here.site("one", model="a", slots=1)
        two = await here.site("two", model="b")
        await one.report(running=1, pending=3, pending_response_tokens=900.0, running_remaining=[300])
        await until(lambda: here.gateway.directory.load_of("one").pending == 3, "the report")
        task = asyncio.create_task(collect(here, ask(here)))
        await two.assigned()
        await two.close()
        await one.finish(await one.assigned(), "late", 1)
        assert text_of(await task) == "late"

    play(ModelRoute("name", (Target("a"), Target("b", when=When.OVERLOADED))), scenario)


CANARY = ModelRoute("name", (Target("a", weight=1), Target("b", weight=1)))


def test_a_key_gets_the_targets_of_its_scope_and_no_other() -> None:
    async def scenario(here: Scene) -> None:
        one, two = await two_models(here)
        narrow = Caller("key-2", "tenant-2", models=frozenset({"a"}))
        drawn_for_b = next(f"{n:x}" for n in range(100) if draw(f"{n:x}") > 0.5)
        task = asyncio.create_task(collect(here, ask(here, id=drawn_for_b, caller=narrow)))
        await one.finish(await one.assigned(), "mine", 1)
        await task
        wide = asyncio.create_task(collect(here, ask(here, id=drawn_for_b)))
        await two.finish(await two.assigned(), "canary", 1)
        await wide
        for models in ({"name"}, {"c"}):
            with pytest.raises(Forbidden, match="'name'"):
                await collect(here, ask(here, caller=Caller("k", "t", models=frozenset(models))))

    play(CANARY, scenario)


def test_a_target_without_the_feature_is_left_out_and_a_name_without_it_refused() -> None:
    async def scenario(here: Scene) -> None:
        await here.site("one", model="a")
        two = await here.site("two", model="b", features=("chat", "logprobs", "resume", "guided"))
        guided = here.query(guided_json='{"type": "object"}').sampling
        for _ in range(4):
            task = asyncio.create_task(collect(here, ask(here, sampling=guided)))
            await two.finish(await two.assigned(), "{}", 1)
            await task
        chat = Chat((Message("user", "Hi"),), tools_json="[]", template_kwargs_json="{}")
        with pytest.raises(BadRequest, match="tools"):
            await collect(here, ask(here, prompt=chat))

    play(CANARY, scenario)


def test_the_prompts_of_one_request_go_to_one_model() -> None:
    async def scenario(here: Scene) -> None:
        sites = await two_models(here)
        for request in range(8):
            tasks = [asyncio.create_task(collect(here, ask(here, id=f"{request}-{n}"))) for n in range(3)]
            await until(lambda: sum(site.inbox.qsize() for site in sites) == 3, "all prompts")
            taken = [site for site in sites if not site.inbox.empty()]
            assert len(taken) == 1
            for _ in tasks:
                await taken[0].finish(await taken[0].assigned(), "x", 1)
            await asyncio.gather(*tasks)
        assert len({outcome.model for outcome in here.outcomes}) == 2, "and requests to both"

    play(CANARY, scenario)


def test_tokens_are_counted_by_a_target_that_can() -> None:
    async def scenario(here: Scene) -> None:
        await here.site("one", model="a")
        two = await here.site("two", model="b", features=("chat", "count"))
        task = asyncio.create_task(TokenCounter(here.gateway).count(ask(here)))
        message = await two.next()
        assert message.WhichOneof("body") == "count"
        assert message.count.assign.model == "b"
        attempt_id = message.count.assign.attempt_id
        await two.send(counted=pb.Counted(attempt_id=attempt_id, prompt_tokens=9))
        assert await task == 9

    play(FALLBACK, scenario)
