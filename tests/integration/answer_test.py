"""One query through the gateway's core, against sites that misbehave in every way the link allows."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from msgspec.structs import replace

from gateway.domain import Delta, Lane, Opening, Usage
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
from gateway.outcome import Status
from gateway.prompt import Chat, Message
from gateway.query.answer import answer
from gateway.query.forecasting import ForecastService
from predictor.forecast import Forecast
from predictor.onnx_forecaster import Features
from tests.support.answers import collect, run, start_answer, text_of
from tests.support.fakes.federation import DEADLINE_S, FlatForecaster, Scene, ScriptedSite, until
from wire import federation_pb2 as pb
from wire import federation_pb2_grpc as rpc


def test_an_answer_opens_flows_and_ends_with_its_usage() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        task = asyncio.create_task(collect(here, here.query()))
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


@pytest.mark.parametrize(
    "prompt",
    [
        Chat((Message("user", "Write."), Message("assistant", "", tool_calls_json="x" * 60_000))),
        Chat((Message("user", "Sum up."),), template_kwargs_json="x" * 60_000),
    ],
)
def test_the_tokens_of_whatever_a_template_reads_are_counted_in_full(prompt: Chat) -> None:
    """Arguments of an agent's calls hold whole files, those of a template documents."""

    async def scenario(here: Scene) -> None:
        features = ("chat", "resume", "template_kwargs")
        site = await here.site("a", context_tokens=100_000, features=features)
        task = asyncio.create_task(collect(here, replace(here.query(), prompt=prompt)))
        assign = (await site.next()).assign
        await site.send(accepted=pb.Accepted(attempt_id=assign.attempt_id, prompt_tokens=15_000))
        await site.finish(assign, "Good.", 2)
        assert (await task)[-1] == Usage(prompt_tokens=15_000, completion_tokens=2)

    run(scenario)


def test_choices_arrive_apart_and_are_summed() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        task = asyncio.create_task(collect(here, here.query(n=2)))
        assign = await site.assigned()
        await site.finish(assign, "one", 1, index=1)
        await site.finish(assign, "zero", 3, index=0)
        pieces = await task
        texts = {piece.index: piece.text for piece in pieces if isinstance(piece, Delta)}
        assert texts == {0: "zero", 1: "one"}
        assert pieces[-1] == Usage(prompt_tokens=7, completion_tokens=4)

    run(scenario)


@pytest.mark.parametrize(
    ("reason", "error"), [(pb.Rejected.CONTEXT_LENGTH, ContextTooLong), (pb.Rejected.INVALID, BadRequest)]
)
def test_the_clients_mistake_is_not_tried_elsewhere(reason: Any, error: type[Exception]) -> None:
    async def scenario(here: Scene) -> None:
        sites = [await here.site("a"), await here.site("b")]
        task = asyncio.create_task(collect(here, here.query()))
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


@pytest.mark.parametrize(
    ("end", "error", "status"),
    [
        ({"reason": pb.Rejected.INVALID}, BadRequest, Status.REFUSED),
        ({"reason": pb.Rejected.CONTEXT_LENGTH}, ContextTooLong, Status.REFUSED),
        ({"reason": pb.Rejected.FULL}, Overloaded, Status.REFUSED),
        ({"reason": pb.Rejected.UNSUPPORTED}, BadRequest, Status.REFUSED),
        ({"finish": pb.Delta.FAILED, "completion_tokens": 3}, UpstreamFailed, Status.FAILED),
    ],
)
def test_an_error_instead_of_an_answer_costs_nothing(
    end: dict[str, Any], error: type[Exception], status: Status
) -> None:
    """A site in front of a server has counted the prompt by the time that the server refuses it."""

    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        task = asyncio.create_task(collect(here, here.query()))
        assign = await site.assigned()
        if "reason" in end:
            await site.send(rejected=pb.Rejected(attempt_id=assign.attempt_id, message="no", **end))
        else:
            await site.send(step=pb.Step(deltas=[pb.Delta(attempt_id=assign.attempt_id, **end)]))
        with pytest.raises(error):
            await task
        (outcome,) = here.outcomes
        assert (outcome.status, outcome.prompt_tokens, outcome.completion_tokens) == (status, 0, 0)
        assert outcome.attempts[0].prompt_tokens == 7, "what the site counted is with its attempt"

    run(scenario)


@pytest.mark.parametrize(("lane", "charged"), [(Lane.INTERACTIVE, (7, 3)), (Lane.BATCH, (0, 0))])
def test_a_line_of_a_batch_is_not_charged_what_its_failed_run_began(
    lane: Lane, charged: tuple[int, int]
) -> None:
    """Nobody gets a part of a line; it runs again and is charged then."""

    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        task, pieces = start_answer(here, replace(here.query(n=2), lane=lane))  # of two choices none resumes
        await site.step(await site.assigned(), "Hel", 3)
        await until(lambda: text_of(pieces) == "Hel", "the first part")
        await site.close()
        with pytest.raises(UpstreamLost):
            await task
        await here.gateway.wait_settled()
        (outcome,) = here.outcomes
        assert (outcome.prompt_tokens, outcome.completion_tokens) == charged
        assert outcome.attempts[0].completion_tokens == 3

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
        task = asyncio.create_task(collect(here, here.query()))
        assign = await site.assigned()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await site.next()).cancel.attempt_id == assign.attempt_id
        await site.step(assign, "", 0, finish=pb.Delta.CANCELLED)
        await until(lambda: here.outcomes, "the outcome")
        (outcome,) = here.outcomes
        assert (outcome.status, outcome.prompt_tokens) == (Status.CANCELLED, 7), (
            "the site has read the prompt"
        )

    run(scenario)


def test_the_deadline_ends_a_query_whatever_the_site_does() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        ahead_s = 0.0
        loop = asyncio.get_running_loop()
        here.gateway.clock = lambda: time.monotonic() + ahead_s
        loop.time = here.gateway.clock  # type: ignore[method-assign]
        task = asyncio.create_task(collect(here, here.query(within_s=DEADLINE_S)))
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
        task = asyncio.create_task(collect(here, here.query()))
        await site.assigned()
        site.answers_pings = False
        await here.heartbeats_until_gone("a")
        await other.finish(await other.assigned(), "done", 1)
        assert text_of(await task) == "done"
        assert here.outcomes[0].attempts[0].ended == "lost"

    run(scenario)


def test_of_many_sites_those_that_show_life_are_pinged_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older site may say nothing through a long iteration: it is pinged at every heartbeat."""
    monkeypatch.setattr("gateway.federation.report_pace.LINKS_PER_PING", 1)

    async def scenario(here: Scene) -> None:
        sites = [
            await here.site(str(number), highest_protocol=protocol)
            for number, protocol in enumerate((3, 3, 2, 0, 3, 3, 3, 3))
        ]
        assert [each.heartbeat_s / DEADLINE_S for each in sites] == [1, 2, 1, 1, 5, 5, 5, 5]
        for _ in range(10):
            await here.heartbeat()
        expected = [11, 6, 11, 11, 3, 3, 3, 3]
        await until(lambda: [each.pings for each in sites] == expected, "the pings")

    run(scenario)


def test_garbage_from_a_site_costs_the_site_its_link_not_the_client_its_answer() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        other = await here.site("b", seconds_per_token=1.0)
        task = asyncio.create_task(collect(here, here.query()))
        assign = await site.assigned()
        await site.step(assign, "x", 1, index=7)
        await other.finish(await other.assigned(), "done", 1)
        assert text_of(await task) == "done"

    run(scenario)


def test_a_kind_of_message_that_only_newer_sites_know_is_ignored_and_counted() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        task = asyncio.create_task(collect(here, here.query()))
        assign = await site.assigned()
        await site.send()
        await site.send(bunch=pb.SiteBunch(messages=[pb.SiteMessage(), pb.SiteMessage()]))
        await site.finish(assign, "done", 1)
        assert text_of(await task) == "done"
        assert here.gateway.directory.unknown_messages == {"a": 3}

    run(scenario)


def test_unknown_models_and_absent_sites_are_different_errors() -> None:
    async def scenario(here: Scene) -> None:
        with pytest.raises(NoSite, match="no site has joined") as failure:
            await collect(here, here.query())
        assert failure.value.retry_after_s
        site = await here.site("a")
        with pytest.raises(ModelNotFound, match="served here: m"):
            await collect(here, here.query(model="gpt-9"))
        await site.close()
        await until(lambda: not here.gateway.federation.links, "the link to end")
        with pytest.raises(NoSite, match="a: down"):
            await collect(here, here.query())
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
        task = asyncio.create_task(collect(here, here.query()))
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
        first = asyncio.create_task(collect(here, here.query()))
        assign = await site.assigned()
        with pytest.raises(Overloaded, match="most allowed"):
            await collect(here, here.query())
        await site.finish(assign, "done", 1)
        await first

    run(scenario, max_live=1)


def test_a_choice_that_fails_ends_the_others_at_the_site() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        task = asyncio.create_task(collect(here, here.query(n=2)))
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
        task = asyncio.create_task(collect(here, here.query()))
        assign = (await site.next()).assign
        task.cancel()
        assert (await site.next()).cancel.attempt_id == assign.attempt_id
        await until(lambda: here.outcomes, "the outcome")
        assert here.outcomes[0].status is Status.CANCELLED

    run(scenario)


def test_absurd_figures_of_one_site_cost_the_others_nothing() -> None:
    async def scenario(here: Scene) -> None:
        mad = await here.site("a")
        sane = await here.site("b")
        await mad.report(
            running=9, pending=9, running_remaining=[9], pending_response_tokens=1e308, token_load=1e308
        )
        await until(lambda: "a" not in here.gateway.federation.links, "the link to end")
        task = asyncio.create_task(collect(here, here.query()))
        await sane.finish(await sane.assigned(), "done", 1)
        assert text_of(await task) == "done"

    run(scenario)


def test_why_a_site_is_gone_is_told_to_its_clients_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(here: Scene) -> None:
        cut = await here.site("a")
        await cut.close()
        await until(lambda: not here.gateway.federation.links, "the link to end")
        silent = await here.site("b")
        task = asyncio.create_task(collect(here, here.query(n=2)))
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
                    await collect(here, here.query(within_s=0.05))
        finally:
            held.set()
            await here.gateway.forecasts.close()

    run(scenario)


def test_a_fault_of_the_gateway_is_not_recorded_as_the_clients() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        here.gateway.policy_name = "no such policy"
        with pytest.raises(KeyError):
            await collect(here, here.query())
        assert site.inbox.empty()
        assert "unexpectedly" in here.outcomes[0].error
        assert here.outcomes[0].status is not Status.CANCELLED

    run(scenario)
