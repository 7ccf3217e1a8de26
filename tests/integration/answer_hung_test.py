"""A site that hangs behind a live link loses its queries to others, and gets work again once it moves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.errors import NoSite, UpstreamFailed, UpstreamLost
from gateway.federation.progress import (
    ANSWER_WITHIN_S,
    CHECK_EVERY_S,
    GIVE_UP_AFTER_S,
    MAX_EXPLAINED_S,
    PROGRESS_WITHIN_S,
    REPORT_WITHIN_S,
)
from gateway.prompt import Chat, Message
from tests.support.answers import collect, run, start_answer, text_of
from tests.support.fakes.federation import Scene, ScriptedSite, until
from wire import federation_pb2 as pb

MS = 0.001


def state_of(here: Scene, name: str) -> str:
    return next(site.state for site in here.gateway.directory.sites if site.name == name)


async def two_sites(here: Scene, **of_first: Any) -> tuple[ScriptedSite, ScriptedSite]:
    """The first is preferred; an iteration takes it 1 ms, so that no silence is explained by its work."""
    first = await here.site("a", seconds_per_token=MS, **of_first)
    return first, await here.site("b", seconds_per_token=1.0)


async def report(here: Scene, site: ScriptedSite, **figures: Any) -> None:
    """Send a report, and wait until the gateway has it."""
    await site.report(**figures)

    def arrived() -> bool:
        return any(
            each.name == site.name and each.load.seq == site.reports for each in here.gateway.directory.sites
        )

    await until(arrived, "its report")


async def report_for(here: Scene, site: ScriptedSite, seconds: float, **figures: Any) -> None:
    """Let time pass in which the site goes on reporting."""
    for _ in range(round(seconds)):
        here.let_pass(1.0)
        await report(here, site, **figures)


async def opened(here: Scene) -> None:
    await until(lambda: any(a.opened for a in here.gateway.live_queries.values()), "the first token")


async def accepted(here: Scene) -> None:
    def all_accepted() -> bool:
        live = here.gateway.live_queries.values()
        return all(state.current and state.current.prompt_tokens is not None for state in live)

    await until(lambda: here.gateway.live_queries and all_accepted(), "Accepted")


def test_an_assignment_that_is_not_answered_goes_elsewhere_within_two_seconds() -> None:
    async def scenario(here: Scene) -> None:
        silent, other = await two_sites(here)
        task = asyncio.create_task(collect(here, here.query()))
        first = await silent.next()
        here.let_pass(ANSWER_WITHIN_S - CHECK_EVERY_S)
        assert state_of(here, "a") == "ready"
        here.let_pass(2.0 - ANSWER_WITHIN_S + CHECK_EVERY_S)
        await other.finish(await other.assigned(), "done", 1)
        assert text_of(await task) == "done"
        assert (await silent.next()).cancel.attempt_id == first.assign.attempt_id
        assert state_of(here, "a") == "ejected"
        assert [attempt.ended for attempt in here.outcomes[0].attempts] == ["lost", "finished"]

    run(scenario)


def test_a_site_that_answers_others_is_slow_not_hung() -> None:
    async def scenario(here: Scene) -> None:
        busy, _ = await two_sites(here)
        tasks = [asyncio.create_task(collect(here, here.query())) for _ in range(3)]
        waiting = [(await busy.next()).assign for _ in tasks]
        for number, assign in enumerate(waiting, 1):
            here.let_pass(ANSWER_WITHIN_S - CHECK_EVERY_S)
            await busy.send(accepted=pb.Accepted(attempt_id=assign.attempt_id, prompt_tokens=7))
            await report(here, busy)
            await busy.finish(assign, "done", 1)
            await until(lambda n=number: sum(task.done() for task in tasks) == n, "an answer")
        assert state_of(here, "a") == "ready"

    run(scenario)


def test_a_long_prompt_has_the_time_that_reading_it_takes() -> None:
    async def scenario(here: Scene) -> None:
        silent, other = await two_sites(here, context_tokens=1_000_000)
        query = here.query()
        task = asyncio.create_task(
            collect(here, replace(query, prompt=Chat((Message("user", "x" * 1_000_000),))))
        )
        await silent.next()
        await report_for(here, silent, 6.0)  # 250,000 tokens at 50,000 a second
        assert state_of(here, "a") == "ready"
        await report_for(here, silent, 1.0)
        await other.finish(await other.assigned(), "done", 1)
        assert text_of(await task) == "done"

    run(scenario)


@pytest.mark.parametrize("stalled", [False, True])
def test_an_engine_that_stops_in_mid_answer_is_replaced_with_the_same_text(stalled: bool) -> None:
    """Whether its site says so, or says nothing at all while it answers pings."""

    async def scenario(here: Scene) -> None:
        hung, other = await two_sites(here)
        task, pieces = start_answer(here, here.query())
        assign = await hung.assigned()
        await hung.step(assign, "Hel", 3)
        await until(lambda: text_of(pieces) == "Hel", "the first part")
        if stalled:
            await hung.report(running=1, stalled_s=2.3)
        else:
            here.let_pass(REPORT_WITHIN_S + 2 * CHECK_EVERY_S)
        resumed = await other.assigned()
        assert list(resumed.resume.token_ids) == [ord(letter) for letter in "Hel"]
        await hung.step(assign, "xyz", 6)  # too late: the attempt is no longer here
        await other.finish(resumed, "lo", 5)
        await task
        assert text_of(pieces) == "Hello"
        assert state_of(here, "a") == "ejected"
        with pytest.raises(NoSite, match="a: ejected"):
            await other.close()
            await until(lambda: "b" not in here.gateway.federation.links, "b is gone")
            await collect(here, here.query())
        here.let_pass(CHECK_EVERY_S)
        await report(here, hung)
        here.let_pass(CHECK_EVERY_S)
        assert state_of(here, "a") == "ready"
        task = asyncio.create_task(collect(here, here.query()))
        assert (await hung.next()).cancel.attempt_id == assign.attempt_id
        await hung.finish(await hung.assigned(), "back", 1)
        assert text_of(await task) == "back"

    run(scenario)


def test_a_site_that_accepts_and_says_no_more_is_replaced() -> None:
    async def scenario(here: Scene) -> None:
        silent, other = await two_sites(here)
        task = asyncio.create_task(collect(here, here.query()))
        await silent.assigned()
        await accepted(here)
        await report_for(here, silent, PROGRESS_WITHIN_S, running=1)  # fresh, and always the same
        here.let_pass(2 * CHECK_EVERY_S)
        await other.finish(await other.assigned(), "done", 1)
        assert text_of(await task) == "done"
        assert state_of(here, "a") == "ejected"

    run(scenario)


def test_a_long_prefill_shows_in_the_reports_and_is_waited_for() -> None:
    async def scenario(here: Scene) -> None:
        slow, _ = await two_sites(here)
        task = asyncio.create_task(collect(here, here.query()))
        assign = await slow.assigned()
        await accepted(here)
        for unread in range(20_000, 0, -2_000):
            await report_for(here, slow, 2.0, running=1, unread_tokens=unread)
        assert state_of(here, "a") == "ready"
        await slow.finish(assign, "done", 1)
        assert text_of(await task) == "done"

    run(scenario)


def test_a_slow_iteration_is_explained_by_the_sites_own_fit() -> None:
    async def scenario(here: Scene) -> None:
        slow, other = await two_sites(here)
        await report(here, slow, longest_iteration_s=4.0)
        task = asyncio.create_task(collect(here, here.query()))
        await slow.assigned()
        await accepted(here)
        here.let_pass(2 * 4.0 + REPORT_WITHIN_S - CHECK_EVERY_S)
        assert state_of(here, "a") == "ready"
        here.let_pass(3 * CHECK_EVERY_S)
        await other.finish(await other.assigned(), "done", 1)
        assert text_of(await task) == "done"

    run(scenario)


@pytest.mark.parametrize("claim", [1e12, 1e9])
def test_no_claim_of_a_site_explains_silence_for_ever(claim: float) -> None:
    async def scenario(here: Scene) -> None:
        hung, other = await two_sites(here)
        await report(here, hung, longest_iteration_s=claim)
        task = asyncio.create_task(collect(here, here.query()))
        await hung.assigned()
        here.let_pass(MAX_EXPLAINED_S)
        assert state_of(here, "a") == "ready"
        await report(here, other)
        here.let_pass(REPORT_WITHIN_S + 2 * CHECK_EVERY_S)
        await other.finish(await other.assigned(), "done", 1)
        assert text_of(await task) == "done"

    run(scenario)


@pytest.mark.parametrize("n", [1, 2])
def test_what_no_other_site_can_take_waits_and_ends_with_an_error_that_says_why(n: int) -> None:
    """With one site alone an engine that comes back in time still finishes its answers."""

    async def scenario(here: Scene) -> None:
        hung = await here.site("a", seconds_per_token=MS)
        if n > 1:
            await here.site("b", seconds_per_token=1.0)
        task = asyncio.create_task(collect(here, here.query(n=n)))
        assign = await hung.assigned()
        await hung.step(assign, "Hel", 3)
        await opened(here)
        here.let_pass(GIVE_UP_AFTER_S - 1.0)
        assert not task.done()
        here.let_pass(1.0 + 2 * CHECK_EVERY_S)
        with pytest.raises(UpstreamLost, match=r"a hangs: it has reported no load for 3\d\.\d s"):
            await task

    run(scenario)


def test_a_query_that_no_other_site_can_take_fails_before_its_deadline() -> None:
    async def scenario(here: Scene) -> None:
        silent = await here.site("a", seconds_per_token=MS)
        task = asyncio.create_task(collect(here, here.query()))
        await silent.next()
        await report_for(here, silent, GIVE_UP_AFTER_S + ANSWER_WITHIN_S + 1.0)
        with pytest.raises(UpstreamFailed, match="a hangs: it has answered no assignment"):
            await task

    run(scenario)


def test_a_site_that_answered_nothing_is_tried_again_after_a_while() -> None:
    async def scenario(here: Scene) -> None:
        silent, other = await two_sites(here)
        for waits_s in (5.0, 10.0):
            await report(here, silent)
            task = asyncio.create_task(collect(here, here.query()))
            assert (await silent.next()).WhichOneof("body") == "assign"
            here.let_pass(ANSWER_WITHIN_S + 2 * CHECK_EVERY_S)
            await other.finish(await other.assigned(), "done", 1)
            await task
            assert (await silent.next()).WhichOneof("body") == "cancel"
            await report(here, silent)
            here.let_pass(waits_s - 1.0)
            assert state_of(here, "a") == "ejected"
            here.let_pass(1.0 + CHECK_EVERY_S)
            assert state_of(here, "a") == "ready"
        task = asyncio.create_task(collect(here, here.query()))
        await silent.finish(await silent.assigned(), "back", 1)
        assert text_of(await task) == "back"

    run(scenario)


def test_sites_that_are_slow_together_are_overloaded_and_keep_their_work() -> None:
    async def scenario(here: Scene) -> None:
        sites = [await here.site(name, seconds_per_token=MS) for name in ("a", "b", "c")]
        tasks = [asyncio.create_task(collect(here, here.query())) for _ in sites]
        await until(lambda: sum(site.inbox.qsize() for site in sites) == 3, "an assignment each")
        here.let_pass(ANSWER_WITHIN_S + 2 * CHECK_EVERY_S)
        states = [state_of(here, site.name) for site in sites]
        assert states.count("ejected") <= 1, "the rest would be slower still"
        here.let_pass(1.0)
        assert [state_of(here, site.name) for site in sites] == states
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for site in sites:
            await site.close()

    run(scenario)


def test_a_server_behind_a_site_may_think_for_long() -> None:
    """Its site judges it, by `silence_s`."""

    async def scenario(here: Scene) -> None:
        thinking = await here.site("a", seconds_per_token=MS, engine="openai")
        await here.site("b", seconds_per_token=1.0)
        task = asyncio.create_task(collect(here, here.query()))
        assign = await thinking.assigned()
        await accepted(here)
        await report_for(here, thinking, 90.0, running=1)
        await thinking.finish(assign, "done", 1)
        assert text_of(await task) == "done"

    run(scenario)


def test_a_gateway_that_was_suspended_blames_no_site() -> None:
    async def scenario(here: Scene) -> None:
        site, _ = await two_sites(here)
        task = asyncio.create_task(collect(here, here.query()))
        assign = await site.assigned()
        here.suspend(60.0)
        await site.finish(assign, "done", 1)
        assert text_of(await task) == "done"
        assert state_of(here, "a") == "ready"

    run(scenario)


def test_orders_of_a_draining_site_survive_its_hang() -> None:
    async def scenario(here: Scene) -> None:
        hung, other = await two_sites(here)
        task = asyncio.create_task(collect(here, here.query()))
        await hung.assigned()
        await hung.send(draining=pb.Draining(reason="its machine is taken back"))
        await until(lambda: state_of(here, "a") == "draining", "it drains")
        await hung.report(stalled_s=3.0)
        await other.finish(await other.assigned(), "done", 1)
        assert text_of(await task) == "done"
        here.let_pass(1.0)
        await report(here, hung)
        here.let_pass(1.0)
        assert state_of(here, "a") == "draining"

    run(scenario)
