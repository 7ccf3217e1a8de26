"""One query through the gateway's core, against sites that misbehave in every way the link allows."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import pytest

from gateway.domain import AnswerEvent, Delta, Opening, Query, Status, Usage
from gateway.errors import (
    BadRequest,
    ContextTooLong,
    DeadlinePassed,
    ModelNotFound,
    NoSite,
    Overloaded,
    UpstreamFailed,
    UpstreamLost,
)
from gateway.query.answer import answer
from gateway.query.forecasting import ForecastService
from gateway.routing.failover import MAX_MOVES
from predictor.forecast import Forecast
from predictor.onnx_forecaster import Features
from tests.support.fakes.federation import DEADLINE_S, FlatForecaster, Scene, ScriptedSite, scene, until
from wire import federation_pb2 as pb
from wire import federation_pb2_grpc as rpc


def run(scenario: Callable[[Scene], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        async with scene(**settings) as here:
            await scenario(here)
            await here.gateway.wait_settled()
            await until(here.nothing_is_left, "all counters at zero")

    asyncio.run(main())


async def whole(here: Scene, query: Query) -> list[AnswerEvent]:
    return [piece async for piece in answer(here.gateway, query)]


def text_of(pieces: list[AnswerEvent]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Delta))


async def one_of(here: Scene, *sites: ScriptedSite) -> tuple[ScriptedSite, pb.Assign]:
    """The site that got the next query, which it accepts."""
    await until(lambda: any(not site.inbox.empty() for site in sites), "an assignment")
    site = next(site for site in sites if not site.inbox.empty())
    return site, await site.assigned()


def test_an_answer_opens_flows_and_ends_with_its_usage() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        task = asyncio.create_task(whole(here, here.query()))
        assign = await site.assigned()
        await site.step(assign, "Hel", 1)
        await site.finish(assign, "lo", 2)
        pieces = await task
        assert isinstance(pieces[0], Opening)
        assert (pieces[0].site, pieces[0].prompt_tokens, pieces[0].fingerprint) == ("a", 7, "rev-1")
        assert text_of(pieces) == "Hello"
        assert pieces[-1] == Usage(prompt_tokens=7, completion_tokens=2)
        (outcome,) = here.outcomes
        assert (outcome.status, outcome.site, outcome.completion_tokens) == (Status.ANSWERED, "a", 2)
        assert outcome.attempts[0].decision.reason.startswith("earliest finish")

    run(scenario)


def test_choices_arrive_apart_and_are_summed() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        task = asyncio.create_task(whole(here, here.query(n=2)))
        assign = await site.assigned()
        await site.finish(assign, "one", 1, index=1)
        await site.finish(assign, "zero", 3, index=0)
        pieces = await task
        texts = {piece.index: piece.text for piece in pieces if isinstance(piece, Delta)}
        assert texts == {0: "zero", 1: "one"}
        assert pieces[-1] == Usage(prompt_tokens=7, completion_tokens=4)

    run(scenario)


def test_a_full_site_is_passed_over_unnoticed() -> None:
    async def scenario(here: Scene) -> None:
        sites = [await here.site("a"), await here.site("b")]
        task = asyncio.create_task(whole(here, here.query()))
        await until(lambda: any(not s.inbox.empty() for s in sites), "an assignment")
        full = next(s for s in sites if not s.inbox.empty())
        message = await full.next()
        await full.send(
            rejected=pb.Rejected(
                attempt_id=message.assign.attempt_id, reason=pb.Rejected.FULL, message="full"
            )
        )
        other = next(s for s in sites if s is not full)
        assign = await other.assigned()
        await other.finish(assign, "done", 1)
        pieces = await task
        assert isinstance(pieces[0], Opening)
        assert (pieces[0].site, pieces[0].attempts) == (other.name, 2)

    run(scenario)


def test_when_every_site_is_full_the_client_is_told_to_come_back() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        task = asyncio.create_task(whole(here, here.query()))
        attempt = (await site.next()).assign.attempt_id
        await site.send(
            rejected=pb.Rejected(attempt_id=attempt, reason=pb.Rejected.FULL, message="queue of 8 is full")
        )
        with pytest.raises(Overloaded, match="queue of 8 is full") as failure:
            await task
        assert failure.value.retry_after_s
        assert here.outcomes[0].status is Status.REFUSED

    run(scenario)


@pytest.mark.parametrize(
    ("reason", "error"), [(pb.Rejected.CONTEXT_LENGTH, ContextTooLong), (pb.Rejected.INVALID, BadRequest)]
)
def test_the_clients_mistake_is_not_tried_elsewhere(reason: Any, error: type[Exception]) -> None:
    async def scenario(here: Scene) -> None:
        sites = [await here.site("a"), await here.site("b")]
        task = asyncio.create_task(whole(here, here.query()))
        await until(lambda: any(not s.inbox.empty() for s in sites), "an assignment")
        site = next(s for s in sites if not s.inbox.empty())
        attempt = (await site.next()).assign.attempt_id
        await site.send(
            rejected=pb.Rejected(attempt_id=attempt, reason=reason, message="2000 > 1024", param="messages")
        )
        with pytest.raises(error, match="2000 > 1024") as failure:
            await task
        assert getattr(failure.value, "param", None) == "messages"
        assert all(s.inbox.empty() for s in sites)

    run(scenario)


def test_a_site_lost_before_the_first_token_is_replaced_unnoticed() -> None:
    async def scenario(here: Scene) -> None:
        sites = [await here.site("a"), await here.site("b")]
        task = asyncio.create_task(whole(here, here.query()))
        dying, _ = await one_of(here, *sites)
        await dying.close()
        other = next(s for s in sites if s is not dying)
        await other.finish(await other.assigned(), "done", 1)
        assert text_of(await task) == "done"
        assert [attempt.ended for attempt in here.outcomes[0].attempts] == ["lost", "finished"]

    run(scenario)


def test_a_site_lost_in_mid_answer_is_resumed_from_what_the_client_has() -> None:
    async def scenario(here: Scene) -> None:
        sites = [await here.site("a"), await here.site("b")]
        pieces: list[AnswerEvent] = []

        async def read() -> None:
            async for piece in answer(here.gateway, here.query()):
                pieces.append(piece)

        task = asyncio.create_task(read())
        dying, assign = await one_of(here, *sites)
        await dying.step(assign, "Hel", 3)
        await until(lambda: text_of(pieces) == "Hel", "the first part")
        await dying.close()
        other = next(s for s in sites if s is not dying)
        resumed = await other.assigned()
        assert list(resumed.resume.token_ids) == [ord(letter) for letter in "Hel"]
        assert resumed.resume.text_chars == 3
        await other.finish(resumed, "lo", 5)
        await task
        assert text_of(pieces) == "Hello"
        assert pieces[-1] == Usage(prompt_tokens=7, completion_tokens=5)
        assert len(here.outcomes) == 1

    run(scenario)


def test_an_answer_that_can_not_be_resumed_ends_with_an_honest_error() -> None:
    async def scenario(here: Scene) -> None:
        sites = [await here.site("a"), await here.site("b")]
        task = asyncio.create_task(whole(here, here.query(n=2)))
        dying, assign = await one_of(here, *sites)
        await dying.step(assign, "Hel", 3)
        await until(lambda: any(a.opened for a in here.gateway.live_queries.values()), "the first token")
        await dying.close()
        with pytest.raises(UpstreamLost, match="n > 1"):
            await task
        (outcome,) = here.outcomes
        assert (outcome.status, outcome.completion_tokens) == (Status.FAILED, 3)

    run(scenario)


def test_an_answer_without_token_ids_goes_on_from_its_text() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        site.names_tokens = False
        pieces: list[AnswerEvent] = []

        async def read() -> None:
            async for piece in answer(here.gateway, here.query()):
                pieces.append(piece)

        task = asyncio.create_task(read())
        assign = await site.assigned()
        await here.site("old")
        other = await here.site("b", features=("chat", "resume_text", "resume_chat"))
        await site.step(assign, "Hel", 3)
        await until(lambda: text_of(pieces) == "Hel", "the first part")
        await site.close()
        resumed = await other.assigned()
        assert (resumed.resume.text, resumed.resume.tokens, resumed.resume.text_chars) == ("Hel", 3, 3)
        assert not resumed.resume.token_ids
        await other.finish(resumed, "lo", 5)
        await task
        assert text_of(pieces) == "Hello"
        assert pieces[-1] == Usage(prompt_tokens=7, completion_tokens=5)

    run(scenario)


def test_an_answer_drawn_from_a_seed_does_not_go_on_from_its_text() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        site.names_tokens = False
        task = asyncio.create_task(whole(here, here.query(seed=1)))
        assign = await site.assigned()
        await here.site("b", features=("chat", "resume_text", "resume_chat"))
        await site.step(assign, "Hel", 3)
        await until(lambda: any(a.opened for a in here.gateway.live_queries.values()), "the first token")
        await site.close()
        with pytest.raises(UpstreamLost, match="drawn from a seed, and no site named the tokens"):
            await task

    run(scenario)


def test_a_site_that_refuses_to_go_on_is_not_the_clients_mistake() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        task = asyncio.create_task(whole(here, here.query()))
        assign = await site.assigned()
        others = {name: await here.site(name) for name in ("b", "c")}
        await site.step(assign, "Hel", 3)
        await until(lambda: any(a.opened for a in here.gateway.live_queries.values()), "the first token")
        await site.close()
        first, resumed = await one_of(here, *others.values())
        refusal = pb.Rejected(attempt_id=resumed.attempt_id, reason=pb.Rejected.INVALID, message="no")
        await first.send(rejected=refusal)
        second = next(each for each in others.values() if each is not first)
        await second.finish(await second.assigned(), "lo", 5)
        assert text_of(await task) == "Hello"

    run(scenario)


def test_an_answer_does_not_go_on_at_a_site_that_can_not_resume() -> None:
    async def scenario(here: Scene) -> None:
        dying = await here.site("a")
        pieces: list[AnswerEvent] = []

        async def read() -> None:
            async for piece in answer(here.gateway, here.query()):
                pieces.append(piece)

        task = asyncio.create_task(read())
        assign = await dying.assigned()
        other = await here.site("b", features=("chat",))
        await dying.step(assign, "Hel", 3)
        await until(lambda: text_of(pieces) == "Hel", "the first part")
        await dying.close()
        with pytest.raises(UpstreamLost, match="no other site could go on"):
            await task
        assert other.inbox.empty()

    run(scenario)


@pytest.mark.parametrize("engine", ["native", "vllm"])
def test_an_answer_does_not_go_on_with_other_weights(engine: str) -> None:
    """They would have said something else. What a server has is for its operator to know."""

    async def scenario(here: Scene) -> None:
        dying = await here.site("a")
        task = asyncio.create_task(whole(here, here.query()))
        assign = await dying.assigned()
        other = await here.site("b", revision="rev-2", engine=engine)
        await dying.step(assign, "Hel", 3)
        await until(lambda: any(a.opened for a in here.gateway.live_queries.values()), "the first token")
        await dying.close()
        if engine == "native":
            with pytest.raises(UpstreamLost, match=r"b: has other weights than those that began"):
                await task
            assert other.inbox.empty()
        else:
            await other.finish(await other.assigned(), "lo", 5)
            assert text_of(await task) == "Hello"

    run(scenario)


def test_half_a_character_goes_on_with_no_other_weights() -> None:
    """The client has no text of it, but was told the revision, and the token is of these weights."""

    async def scenario(here: Scene) -> None:
        dying = await here.site("a")
        task = asyncio.create_task(whole(here, here.query()))
        assign = await dying.assigned()
        other = await here.site("b", revision="rev-2")
        half = pb.Delta(attempt_id=assign.attempt_id, token_ids=[240], completion_tokens=1)
        await dying.send(step=pb.Step(deltas=[half]))
        await until(lambda: any(a.opened for a in here.gateway.live_queries.values()), "the first token")
        await dying.close()
        with pytest.raises(UpstreamLost, match=r"b: has other weights than those that began"):
            await task
        assert other.inbox.empty()

    run(scenario)


def test_what_has_not_begun_is_answered_by_whichever_weights_there_are() -> None:
    async def scenario(here: Scene) -> None:
        dying = await here.site("a")
        task = asyncio.create_task(whole(here, here.query()))
        await dying.assigned()
        other = await here.site("b", revision="rev-2")
        await dying.close()
        await other.finish(await other.assigned(), "Hello", 5)
        assert text_of(await task) == "Hello"
        assert [piece.fingerprint for piece in task.result() if isinstance(piece, Opening)] == ["rev-2"]

    run(scenario)


def test_an_engine_failure_everywhere_is_reported_with_its_reason() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        task = asyncio.create_task(whole(here, here.query()))
        assign = await site.assigned()
        await site.step(assign, "", 0, finish=pb.Delta.FAILED, error="out of memory")
        with pytest.raises(UpstreamFailed, match="out of memory"):
            await task
        assert here.outcomes[0].status is Status.FAILED

    run(scenario)


def test_a_client_that_leaves_is_cancelled_and_charged_what_the_site_counted() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        pieces = answer(here.gateway, here.query())
        reading = asyncio.create_task(anext(pieces))
        assign = await site.assigned()
        await site.step(assign, "Hel", 3)
        await reading
        await pieces.aclose()
        message = await site.next()
        assert message.cancel.attempt_id == assign.attempt_id
        assert here.outcomes == []
        await site.step(assign, "", 9, finish=pb.Delta.CANCELLED)
        await until(lambda: here.outcomes, "the outcome")
        (outcome,) = here.outcomes
        assert (outcome.status, outcome.prompt_tokens, outcome.completion_tokens) == (Status.CANCELLED, 7, 9)

    run(scenario)


def test_a_client_that_leaves_before_the_first_token_frees_the_site_too() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        task = asyncio.create_task(whole(here, here.query()))
        assign = await site.assigned()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await site.next()).cancel.attempt_id == assign.attempt_id
        await site.step(assign, "", 0, finish=pb.Delta.CANCELLED)
        await until(lambda: here.outcomes, "the outcome")
        assert here.outcomes[0].status is Status.CANCELLED

    run(scenario)


def test_output_of_an_attempt_that_is_over_is_dropped() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        task = asyncio.create_task(whole(here, here.query()))
        assign = await site.assigned()
        await site.finish(assign, "done", 1)
        await site.step(assign, " and more", 5)
        assert text_of(await task) == "done"
        second = asyncio.create_task(whole(here, here.query()))
        await site.finish(await site.assigned(), "again", 1)
        assert text_of(await second) == "again"

    run(scenario)


def test_the_deadline_ends_a_query_whatever_the_site_does() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        ahead_s = 0.0
        loop = asyncio.get_running_loop()
        here.gateway.clock = lambda: time.monotonic() + ahead_s
        loop.time = here.gateway.clock  # type: ignore[method-assign]
        task = asyncio.create_task(whole(here, here.query(within_s=DEADLINE_S)))
        assign = await site.assigned()
        ahead_s = DEADLINE_S
        with pytest.raises(DeadlinePassed):
            await task
        assert (await site.next()).cancel.attempt_id == assign.attempt_id
        await site.step(assign, "", 0, finish=pb.Delta.CANCELLED)

    run(scenario)


def test_a_silent_site_is_noticed_by_its_heartbeat() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        other = await here.site("b", seconds_per_token=1.0)
        task = asyncio.create_task(whole(here, here.query()))
        await site.assigned()
        site.answers_pings = False
        await here.heartbeats_until_gone("a")
        await other.finish(await other.assigned(), "done", 1)
        assert text_of(await task) == "done"
        assert here.outcomes[0].attempts[0].ended == "lost"

    run(scenario)


def test_garbage_from_a_site_costs_the_site_its_link_not_the_client_its_answer() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        other = await here.site("b", seconds_per_token=1.0)
        task = asyncio.create_task(whole(here, here.query()))
        assign = await site.assigned()
        await site.step(assign, "x", 1, index=7)
        await other.finish(await other.assigned(), "done", 1)
        assert text_of(await task) == "done"

    run(scenario)


def test_unknown_models_and_absent_sites_are_different_errors() -> None:
    async def scenario(here: Scene) -> None:
        with pytest.raises(NoSite, match="no site has joined") as failure:
            await whole(here, here.query())
        assert failure.value.retry_after_s
        site = await here.site("a")
        with pytest.raises(ModelNotFound, match="served here: m"):
            await whole(here, here.query(model="gpt-9"))
        await site.close()
        await until(lambda: not here.gateway.federation.links, "the link to end")
        with pytest.raises(NoSite, match="a: down"):
            await whole(here, here.query())
        assert [outcome.status for outcome in here.outcomes] == [Status.REFUSED] * 3

    run(scenario)


def test_a_site_without_the_token_is_turned_away() -> None:
    """Before its Hello is read."""

    async def scenario(here: Scene) -> None:
        async with grpc.aio.insecure_channel(here.address) as channel:
            call = rpc.FederationStub(channel).Join(metadata=(("authorization", "Bearer wrong"),))
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "token is missing or wrong" in await call.details()
        assert here.gateway.directory.sites == ()

    run(scenario)


def test_a_site_that_joins_again_replaces_its_older_link() -> None:
    async def scenario(here: Scene) -> None:
        older = await here.site("a")
        task = asyncio.create_task(whole(here, here.query()))
        assign = await older.assigned()
        other = await here.site("b", seconds_per_token=1.0)
        newer = ScriptedSite("a", here.address)
        here.sites.append(newer)
        welcome = await newer.join(attempts=[assign.attempt_id])
        assert list(welcome.cancel) == [assign.attempt_id]
        await other.finish(await other.assigned(), "done", 1)
        assert text_of(await task) == "done"

    run(scenario)


def test_the_most_live_queries_bound_memory() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        first = asyncio.create_task(whole(here, here.query()))
        assign = await site.assigned()
        with pytest.raises(Overloaded, match="most allowed"):
            await whole(here, here.query())
        await site.finish(assign, "done", 1)
        await first

    run(scenario, max_live=1)


async def queue_at(
    here: Scene, busy: ScriptedSite, count: int
) -> tuple[list[asyncio.Task[list[AnswerEvent]]], list[pb.Assign]]:
    """`count` queries that a site with one slot has accepted; it reports all but the first as waiting."""
    tasks = [asyncio.create_task(whole(here, here.query())) for _ in range(count)]
    assigns = [await busy.assigned() for _ in range(count)]
    await busy.report(
        running=1, running_remaining=[500], pending=count - 1, pending_response_tokens=50 * (count - 1)
    )
    await until(lambda: here.gateway.directory.sites[0].load.pending == count - 1, "the report")
    return tasks, assigns


def test_an_idle_site_takes_over_what_waits_elsewhere_and_only_what_is_released() -> None:
    async def scenario(here: Scene) -> None:
        busy = await here.site("busy", slots=1)
        tasks, assigns = await queue_at(here, busy, 4)
        idle = await here.site("idle", slots=3)
        asked = (await busy.next()).release
        assert len(asked.attempt_ids) == 3
        kept, *gone = asked.attempt_ids
        await busy.send(released=pb.Released(release_id=asked.release_id, attempt_ids=gone))
        moved = [await idle.assigned() for _ in gone]
        assert not {a.attempt_id for a in moved} & {a.attempt_id for a in assigns}
        for assign in moved:
            await idle.finish(assign, "moved", 1)
        for assign in assigns:
            await busy.finish(assign, "stayed", 1)  # of the released ones this is dropped
        texts = sorted(text_of(pieces) for pieces in await asyncio.gather(*tasks))
        assert texts == ["moved", "moved", "stayed", "stayed"]
        hops = sorted([a.ended for a in outcome.attempts] for outcome in here.outcomes)
        assert hops == [["finished"], ["finished"], ["released", "finished"], ["released", "finished"]]
        assert kept

    run(scenario)


def test_what_started_in_the_meantime_stays() -> None:
    async def scenario(here: Scene) -> None:
        busy = await here.site("busy", slots=1)
        tasks, assigns = await queue_at(here, busy, 2)
        await here.site("idle", slots=3)
        asked = (await busy.next()).release
        await busy.send(released=pb.Released(release_id=asked.release_id))
        for assign in assigns:
            await busy.finish(assign, "stayed", 1)
        assert [text_of(pieces) for pieces in await asyncio.gather(*tasks)] == ["stayed", "stayed"]

    run(scenario)


def test_a_bidder_that_dies_leaves_the_released_queries_to_the_others() -> None:
    async def scenario(here: Scene) -> None:
        busy = await here.site("busy", slots=1)
        tasks, assigns = await queue_at(here, busy, 2)
        idle = await here.site("idle", slots=3)
        asked = (await busy.next()).release
        await idle.close()
        await until(lambda: "idle" not in here.gateway.federation.links, "the bidder to be gone")
        await busy.send(released=pb.Released(release_id=asked.release_id, attempt_ids=asked.attempt_ids))
        again = [await busy.assigned() for _ in asked.attempt_ids]
        for assign in (*assigns, *again):
            await busy.finish(assign, "served", 1)
        assert [text_of(pieces) for pieces in await asyncio.gather(*tasks)] == ["served", "served"]

    run(scenario)


def test_a_burst_on_one_old_report_spreads_over_equal_sites() -> None:
    async def scenario(here: Scene) -> None:
        sites = [await here.site(name, slots=4, answers_pings=False) for name in "abc"]  # none is nearer
        tasks = [asyncio.create_task(whole(here, here.query())) for _ in range(30)]
        await until(lambda: sum(s.inbox.qsize() for s in sites) == 30, "all assigned")
        assert [s.inbox.qsize() for s in sites] == [10, 10, 10]
        for site in sites:
            while not site.inbox.empty():
                await site.finish(await site.assigned(), "x", 1)
        assert all(text_of(pieces) == "x" for pieces in await asyncio.gather(*tasks))

    run(scenario)


def test_a_release_of_what_has_started_does_not_start_the_answer_again() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        pieces: list[AnswerEvent] = []

        async def read() -> None:
            async for piece in answer(here.gateway, here.query()):
                pieces.append(piece)

        task = asyncio.create_task(read())
        assign = await site.assigned()
        await site.step(assign, "Hel", 3)
        await site.send(released=pb.Released(release_id="nobody asked", attempt_ids=[assign.attempt_id]))
        resumed = await site.assigned()
        assert resumed.resume.text_chars == 3
        await site.finish(resumed, "lo", 5)
        await task
        assert text_of(pieces) == "Hello"

    run(scenario)


def test_a_site_that_gives_everything_up_is_given_up() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        task = asyncio.create_task(whole(here, here.query()))
        for _ in range(MAX_MOVES + 1):
            attempt = (await site.next()).assign.attempt_id
            await site.send(released=pb.Released(release_id="nobody asked", attempt_ids=[attempt]))
        with pytest.raises(UpstreamFailed):
            await task
        assert site.inbox.empty()

    run(scenario)


def test_a_choice_that_fails_ends_the_others_at_the_site() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        task = asyncio.create_task(whole(here, here.query(n=2)))
        assign = await site.assigned()
        await site.step(assign, "x", 1, index=0)
        await site.step(assign, "", 0, index=1, finish=pb.Delta.FAILED, error="out of memory")
        assert (await site.next()).cancel.attempt_id == assign.attempt_id
        with pytest.raises(UpstreamLost, match="out of memory"):
            await task

    run(scenario)


def test_a_site_that_never_ends_what_was_cancelled_holds_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.query.context.LAST_COUNT_WITHIN_S", 0.01)

    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        task = asyncio.create_task(whole(here, here.query()))
        assign = (await site.next()).assign
        task.cancel()
        assert (await site.next()).cancel.attempt_id == assign.attempt_id
        await until(lambda: here.outcomes, "the outcome")
        assert here.outcomes[0].status is Status.CANCELLED

    run(scenario)


def test_usage_counts_the_answer_that_was_given() -> None:
    async def scenario(here: Scene) -> None:
        sites = [await here.site("a"), await here.site("b")]
        task = asyncio.create_task(whole(here, here.query()))
        failing, assign = await one_of(here, *sites)
        await failing.step(assign, "lost words", 10, finish=pb.Delta.FAILED, error="out of memory")
        other = next(s for s in sites if s is not failing)
        await other.finish(await other.assigned(), "done", 4)
        assert (await task)[-1] == Usage(prompt_tokens=7, completion_tokens=4)
        assert here.outcomes[0].completion_tokens == 4

    run(scenario)


def test_absurd_figures_of_one_site_cost_the_others_nothing() -> None:
    async def scenario(here: Scene) -> None:
        mad = await here.site("a")
        sane = await here.site("b")
        await mad.report(
            running=9, pending=9, running_remaining=[9], pending_response_tokens=1e308, token_load=1e308
        )
        await until(lambda: "a" not in here.gateway.federation.links, "the link to end")
        task = asyncio.create_task(whole(here, here.query()))
        await sane.finish(await sane.assigned(), "done", 1)
        assert text_of(await task) == "done"

    run(scenario)


def test_a_prompt_too_long_for_one_site_goes_to_one_with_a_longer_context() -> None:
    async def scenario(here: Scene) -> None:
        short = await here.site("a")
        task = asyncio.create_task(whole(here, here.query()))
        attempt = (await short.next()).assign.attempt_id
        await here.site("b")
        long = await here.site("c", context_tokens=4096)
        await short.send(
            rejected=pb.Rejected(
                attempt_id=attempt, reason=pb.Rejected.CONTEXT_LENGTH, message="2000 > 1024", param="messages"
            )
        )
        await long.finish(await long.assigned(), "done", 1)
        assert text_of(await task) == "done"

    run(scenario)


def test_why_a_site_is_gone_is_told_to_its_clients_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(here: Scene) -> None:
        cut = await here.site("a")
        await cut.close()
        await until(lambda: not here.gateway.federation.links, "the link to end")
        silent = await here.site("b")
        task = asyncio.create_task(whole(here, here.query(n=2)))
        assign = await silent.assigned()
        await silent.step(assign, "x", 1)
        silent.answers_pings = False
        await here.heartbeats_until_gone("b")
        with pytest.raises(UpstreamLost, match="b was lost: silent for"):
            await task

    run(scenario)
    left = [record.message for record in caplog.records if " left: " in record.message]
    assert left[0] == "site a left: the connection ended"
    assert left[1].startswith("site b left: silent for")


def test_the_deadline_holds_while_the_forecast_is_waited_for() -> None:
    held = threading.Event()

    class Stuck(FlatForecaster):
        def forecast(self, queries: Sequence[Features]) -> list[Forecast]:
            assert held.wait(DEADLINE_S)
            return super().forecast(queries)

    async def scenario(here: Scene) -> None:
        await here.site("a")
        await here.gateway.forecasts.close()
        here.gateway.forecasts = ForecastService(Stuck(), FlatForecaster())
        try:
            async with asyncio.timeout(DEADLINE_S / 4):
                with pytest.raises(DeadlinePassed):
                    await whole(here, here.query(within_s=0.05))
        finally:
            held.set()
            await here.gateway.forecasts.close()

    run(scenario)


def test_a_fault_of_the_gateway_is_not_recorded_as_the_clients() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        here.gateway.policy_name = "no such policy"
        with pytest.raises(KeyError):
            await whole(here, here.query())
        assert site.inbox.empty()
        assert "unexpectedly" in here.outcomes[0].error
        assert here.outcomes[0].status is not Status.CANCELLED

    run(scenario)


def test_a_burst_onto_full_sites_is_assigned_as_one_window() -> None:
    async def scenario(here: Scene) -> None:
        sites = [await here.site("a", slots=1), await here.site("b", slots=1)]
        tasks = [asyncio.create_task(whole(here, here.query())) for _ in range(12)]
        for _ in tasks:
            site, assign = await one_of(here, *sites)
            await site.finish(assign, "x", 1)
        await asyncio.gather(*tasks)
        reasons = [outcome.attempts[0].decision.reason for outcome in here.outcomes]
        jointly = sum(reason.startswith("assigned jointly") for reason in reasons)
        assert 0 < jointly < len(tasks), "those that find a slot free need not wait for others"
        assert {outcome.status for outcome in here.outcomes} == {Status.ANSWERED}

    run(scenario)
