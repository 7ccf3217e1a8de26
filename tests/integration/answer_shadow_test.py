"""A share of a route's queries is copied to a second model, after the user's answer and on no user's bill."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.domain import SHADOW_TENANT, Caller, Lane, Query
from gateway.errors import UpstreamFailed
from gateway.outcome import Status
from gateway.prompt import Chat, Message
from gateway.query import shadows
from gateway.query.shadows import Shadows
from gateway.routing.model_routes import ModelRoute, Shadow, Target
from gateway.store.key_table import is_valid_name
from gateway.telemetry.route_figures import Copied
from tests.support.answers import collect, run, text_of
from tests.support.fakes.federation import Scene, ScriptedSite, until
from wire import federation_pb2 as pb

ROUTE = ModelRoute("name", (Target("m"),), Shadow("s", 1.0))
Copies = list[Copied]


def play(
    scenario: Callable[[Scene, Copies], Awaitable[None]], route: ModelRoute = ROUTE, **settings: Any
) -> None:
    async def main(here: Scene) -> None:
        copies: Copies = []
        shadowing = Shadows(here.gateway, copies.append)
        here.gateway.ended = shadowing.ended
        try:
            await scenario(here, copies)
        finally:
            await shadowing.close()

    run(main, routes=lambda: {"name": route}, **settings)


def ask(here: Scene, **more: Any) -> Query:
    return replace(here.query(model="name"), **more)


async def answered(here: Scene, site: ScriptedSite, query: Query, tokens: int = 5) -> None:
    task = asyncio.create_task(collect(here, query))
    await site.finish(await site.assigned(), "user's", tokens)
    assert text_of(await task) == "user's"


async def two(here: Scene, **more: Any) -> tuple[ScriptedSite, ScriptedSite]:
    return await here.site("main", model="m"), await here.site("shadow", model="s", **more)


def test_a_copy_comes_after_the_answer_in_the_batch_lane_and_is_compared() -> None:
    async def scenario(here: Scene, copies: Copies) -> None:
        main, shadow = await two(here)
        task = asyncio.create_task(collect(here, ask(here, priority=-3)))
        assign = await main.assigned()
        await main.step(assign, "us", 2)
        assert shadow.inbox.empty(), "not while the user's answer runs"
        await main.finish(assign, "er", 5)
        await task
        copy = await shadow.assigned()
        assert (copy.model, copy.lane, copy.priority) == ("s", Lane.BATCH, 0)
        assert [turn.content for turn in copy.chat.messages] == ["Say something."]
        await shadow.finish(copy, "shadow's", 9)
        (copied,) = await until(lambda: copies, "the comparison")
        assert (copied.route, copied.model, copied.result) == ("name", "s", "answered")
        assert (copied.tokens, copied.user_tokens) == (9, 5)
        assert copied.seconds > 0 and copied.user_seconds > 0
        user, of_copy = here.outcomes
        assert (user.tenant, of_copy.tenant) == ("tenant-1", SHADOW_TENANT)
        assert (of_copy.model, of_copy.asked_model, of_copy.key_id) == ("s", "name", "")
        assert of_copy.request_id == user.request_id

    play(scenario)


def test_a_copy_that_fails_is_counted_and_the_user_knows_nothing() -> None:
    async def scenario(here: Scene, copies: Copies) -> None:
        main, shadow = await two(here)
        await answered(here, main, ask(here))
        copy = await shadow.assigned()
        await shadow.step(copy, "", 0, finish=pb.Delta.FAILED, error="broke")
        (copied,) = await until(lambda: copies, "the end of the copy")
        assert copied.result == "failed"
        assert [outcome.status for outcome in here.outcomes] == [Status.ANSWERED, Status.FAILED]

    play(scenario)


@pytest.mark.parametrize(
    "load", [{"running": 2, "running_remaining": [50]}, {"pending": 2}, {"running": 4, "pending": 3}]
)
def test_a_site_that_is_more_than_half_busy_gets_no_copy(load: dict[str, Any]) -> None:
    async def scenario(here: Scene, copies: Copies) -> None:
        main, shadow = await two(here, slots=4)
        await shadow.report(**load)
        await until(lambda: here.gateway.directory.load_of("shadow").seq == 2, "the report")
        await answered(here, main, ask(here))
        (copied,) = await until(lambda: copies, "the verdict")
        assert copied.result == "skipped"
        assert shadow.inbox.empty()
        await shadow.report(running=1, running_remaining=[50])
        await until(lambda: here.gateway.directory.load_of("shadow").seq == 3, "the report")
        await answered(here, main, ask(here))
        await shadow.finish(await shadow.assigned(), "room", 1)
        await until(lambda: len(copies) == 2, "the copy")

    play(scenario)


def test_copies_in_flight_are_bounded_and_none_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadows, "MAX_COPIES", 2)

    async def scenario(here: Scene, copies: Copies) -> None:
        main, shadow = await two(here, slots=64)
        for _ in range(5):
            await answered(here, main, ask(here))
        await until(lambda: len(copies) == 3, "three are skipped")
        assert {copied.result for copied in copies} == {"skipped"}
        for _ in range(2):
            await shadow.finish(await shadow.assigned(), "x", 1)
        await until(lambda: len(copies) == 5, "two are answered")
        await answered(here, main, ask(here))
        await shadow.finish(await shadow.assigned(), "x", 1)
        await until(lambda: copies[5:], "there is room again")

    play(scenario)


def test_nobody_is_copied_whose_key_regions_or_answer_forbid_it() -> None:
    async def scenario(here: Scene, copies: Copies) -> None:
        main, shadow = await two(here, region="abroad")
        await answered(here, main, ask(here, caller=Caller("k", "t", models=frozenset({"m"}))))
        await answered(here, main, ask(here, caller=Caller("k", "t", regions=frozenset({"here"}))))
        await until(lambda: [copied.result for copied in copies] == ["skipped"], "no site in the region")
        await answered(here, main, here.query(model="m"))  # by no route
        task = asyncio.create_task(collect(here, ask(here)))
        await main.step(await main.assigned(), "", 0, finish=pb.Delta.FAILED, error="broke")
        with pytest.raises(UpstreamFailed, match="broke"):
            await task
        assert shadow.inbox.empty() and len(copies) == 1

    play(scenario)


def test_a_tenants_own_model_gets_copies_of_its_queries_alone() -> None:
    async def scenario(here: Scene, copies: Copies) -> None:
        main = await here.site("main", model="m")
        base = await here.site("base", model="b")
        tuned = pb.Model(id="s", context_tokens=1024, features=["chat"], parent="b", tenant="tenant-1")
        await base.send(models=pb.Models(models=[base.served_model, tuned]))
        await until(lambda: "s" in here.gateway.directory.served, "the tuned model")
        await answered(here, main, ask(here, caller=Caller("k", "another")))
        await answered(here, main, ask(here))
        copy = await base.assigned()
        assert (copy.model, copy.tenant) == ("s", SHADOW_TENANT)
        await base.finish(copy, "shadow's", 9)
        await until(lambda: copies, "the copy")
        assert [copied.result for copied in copies] == ["answered"]
        assert [each.tenant for each in here.outcomes] == ["another", "tenant-1", SHADOW_TENANT]

    play(scenario)


def test_copies_leave_the_quota_of_the_user_alone() -> None:
    async def scenario(here: Scene, copies: Copies) -> None:
        main, shadow = await two(here)
        opened: list[Caller] = []
        real = here.gateway.quotas.open

        def watched(caller: Caller, tokens: int) -> Any:
            opened.append(caller)
            return real(caller, tokens)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(here.gateway.quotas, "open", watched)
            await answered(here, main, ask(here))
            await shadow.finish(await shadow.assigned(), "x", 1)
            await until(lambda: copies, "the copy")
        assert [caller.tenant for caller in opened] == ["tenant-1", SHADOW_TENANT]
        assert not is_valid_name(SHADOW_TENANT), "no operator gives it a key or a quota"

    play(scenario)


def test_a_copy_in_flight_ends_with_the_gateway() -> None:
    async def scenario(here: Scene, copies: Copies) -> None:
        main, shadow = await two(here)
        await answered(here, main, ask(here, prompt=Chat((Message("user", "x"),))))
        assign = await shadow.assigned()
        here.gateway.shut_down()
        message = await shadow.next()
        assert message.cancel.attempt_id == assign.attempt_id
        await shadow.step(assign, "", 0, finish=pb.Delta.CANCELLED)
        await until(lambda: copies, "its end")

    play(scenario)
