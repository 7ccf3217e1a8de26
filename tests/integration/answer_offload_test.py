"""Queries that wait at one site move to another, and a burst spreads over the sites."""

from __future__ import annotations

import asyncio

import pytest

from gateway.domain import AnswerEvent
from gateway.errors import NoSite, UpstreamFailed
from gateway.outcome import Status
from gateway.routing.failover import MAX_MOVES
from tests.support.answers import assigned_site, collect, run, start_answer, text_of
from tests.support.fakes.federation import Scene, ScriptedSite, until
from wire import federation_pb2 as pb


async def queue_at(
    here: Scene, busy: ScriptedSite, count: int
) -> tuple[list[asyncio.Task[list[AnswerEvent]]], list[pb.Assign]]:
    """`count` queries that a site with one slot has accepted; it reports all but the first as waiting."""
    tasks = [asyncio.create_task(collect(here, here.query())) for _ in range(count)]
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


def test_an_idle_site_is_not_given_what_it_has_failed_before() -> None:
    """What it failed was taken from its place at a busy site up to three times, and went back to the end."""

    async def scenario(here: Scene) -> None:
        failing = await here.site("failing", slots=2)
        tasks = [asyncio.create_task(collect(here, here.query()))]
        first = await failing.assigned()
        busy = await here.site("busy", slots=1)
        await failing.step(first, "", 0, finish=pb.Delta.FAILED, error="out of memory")
        assigns = [await busy.assigned()]
        await failing.send(draining=pb.Draining())
        await until(
            lambda: any(s.state == "draining" for s in here.gateway.directory.sites), "the other to go"
        )
        tasks.append(asyncio.create_task(collect(here, here.query())))
        assigns.append(await busy.assigned())
        await failing.close()
        await until(lambda: "failing" not in here.gateway.federation.links, "the other to be gone")
        await busy.report(running=1, running_remaining=[500], pending=1, pending_response_tokens=50)
        await until(lambda: here.gateway.directory.load_of("busy").pending == 1, "the report")
        await here.site("failing", slots=2)
        asked = (await busy.next()).release
        assert list(asked.attempt_ids) == [assigns[1].attempt_id]
        await busy.send(released=pb.Released(release_id=asked.release_id))
        for assign in assigns:
            await busy.finish(assign, "served", 1)
        assert [text_of(pieces) for pieces in await asyncio.gather(*tasks)] == ["served", "served"]

    run(scenario)


def test_an_idle_site_of_other_weights_is_not_given_what_it_could_not_go_on_with() -> None:
    async def scenario(here: Scene) -> None:
        dying = await here.site("dying")
        task, pieces = start_answer(here, here.query())
        first = await dying.assigned()
        busy = await here.site("busy", slots=1)
        await here.site("idle", revision="rev-2")
        await dying.step(first, "Hel", 3)
        await until(lambda: text_of(pieces) == "Hel", "the first part")
        await dying.close()
        resumed = await busy.assigned()
        await busy.report(running=1, running_remaining=[500], pending=1, pending_response_tokens=50)
        await until(lambda: here.gateway.directory.load_of("busy").pending == 1, "the report")
        here.gateway.federation._offloading.bid("idle")
        assert not here.gateway.federation._offloading._rounds
        await busy.finish(resumed, "lo", 5)
        await task
        assert text_of(pieces) == "Hello"

    run(scenario)


def test_a_burst_on_one_old_report_spreads_over_equal_sites() -> None:
    async def scenario(here: Scene) -> None:
        sites = [await here.site(name, slots=4, answers_pings=False) for name in "abc"]  # none is nearer
        tasks = [asyncio.create_task(collect(here, here.query())) for _ in range(30)]
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
        task, pieces = start_answer(here, here.query())
        assign = await site.assigned()
        await site.step(assign, "Hel", 3)
        await site.send(released=pb.Released(release_id="nobody asked", attempt_ids=[assign.attempt_id]))
        resumed = await site.assigned()
        assert resumed.resume.text_chars == 3
        await site.finish(resumed, "lo", 5)
        await task
        assert text_of(pieces) == "Hello"

    run(scenario)


def test_what_is_released_while_no_site_takes_work_is_asked_for_again() -> None:
    """A release is no failure, of which the client would be told."""

    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        task = asyncio.create_task(collect(here, here.query()))
        assign = await site.assigned()
        await site.send(draining=pb.Draining())
        await site.send(released=pb.Released(release_id="asked", attempt_ids=[assign.attempt_id]))
        with pytest.raises(NoSite, match="a: draining"):
            await task

    run(scenario)


def test_a_site_that_gives_everything_up_is_given_up() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        task = asyncio.create_task(collect(here, here.query()))
        for _ in range(MAX_MOVES + 1):
            attempt = (await site.next()).assign.attempt_id
            await site.send(released=pb.Released(release_id="nobody asked", attempt_ids=[attempt]))
        with pytest.raises(UpstreamFailed):
            await task
        assert site.inbox.empty()

    run(scenario)


def test_a_burst_onto_full_sites_is_assigned_as_one_window() -> None:
    async def scenario(here: Scene) -> None:
        sites = [await here.site("a", slots=1), await here.site("b", slots=1)]
        tasks = [asyncio.create_task(collect(here, here.query())) for _ in range(12)]
        for _ in tasks:
            site, assign = await assigned_site(here, *sites)
            await site.finish(assign, "x", 1)
        await asyncio.gather(*tasks)
        reasons = [outcome.attempts[0].decision.reason for outcome in here.outcomes]
        jointly = sum(reason.startswith("assigned jointly") for reason in reasons)
        assert 0 < jointly < len(tasks), "those that find a slot free need not wait for others"
        assert {outcome.status for outcome in here.outcomes} == {Status.ANSWERED}

    run(scenario)
