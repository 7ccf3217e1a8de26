"""Sites that were lost together come back, and the answers of one go on at another."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.domain import AnswerEvent
from gateway.errors import UpstreamFailed, UpstreamLost
from tests.support.answers import assigned_site, run, start_answer, text_of
from tests.support.fakes.federation import Scene, ScriptedSite, until
from wire import federation_pb2 as pb


class Turns:
    """Counts the decisions of a gateway."""

    taken = 0

    def __next__(self) -> int:
        self.taken += 1
        return self.taken


async def begun(
    here: Scene, *sites: ScriptedSite
) -> tuple[asyncio.Task[None], list[AnswerEvent], ScriptedSite]:
    """Return an answer of which one of the sites has given the first part, and that site."""
    task, pieces = start_answer(here, here.query())
    serving, assign = await assigned_site(here, *sites)
    await serving.step(assign, "Hel", 3)
    await until(lambda: text_of(pieces) == "Hel", "the first part")
    return task, pieces, serving


class SilentAtFirst(ScriptedSite):
    """A site that joins, and reports when its test says so."""

    async def report(self, **figures: Any) -> None:
        pass

    async def first_report(self) -> None:
        await super().report()


def test_an_answer_goes_on_when_sites_that_were_all_lost_at_once_come_back() -> None:
    """A gateway that stood still for some seconds finds every link ended."""

    async def scenario(here: Scene) -> None:
        sites = [await here.site("a"), await here.site("b")]
        task, pieces, serving = await begun(here, *sites)
        other = next(s for s in sites if s is not serving)
        await other.close()
        await until(lambda: other.name not in here.gateway.federation.links, "the other one is lost")
        await serving.close()
        await until(lambda: not here.gateway.federation.links, "both are lost")
        again = await here.site(other.name)
        await again.finish(await again.assigned(), "lo", 5)
        await task
        assert text_of(pieces) == "Hello"
        assert len(here.outcomes) == 1

    run(scenario)


def test_an_answer_goes_on_at_its_own_site_when_that_comes_back() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        task, pieces, _ = await begun(here, site)
        await site.close()
        await until(lambda: not here.gateway.federation.links, "the only site is lost")
        again = await here.site("a")
        await again.finish(await again.assigned(), "lo", 5)
        await task
        assert text_of(pieces) == "Hello"

    run(scenario)


def test_a_site_that_came_back_takes_over_when_the_next_one_fails() -> None:
    async def scenario(here: Scene) -> None:
        first, other = await here.site("a"), await here.site("b")
        task, pieces, serving = await begun(here, first, other)
        left = first if serving is other else other
        await serving.close()
        attempt = await left.assigned()
        again = await here.site(serving.name)
        await left.step(attempt, "", 0, finish=pb.Delta.FAILED, error="out of memory")
        await again.finish(await again.assigned(), "lo", 5)
        await task
        assert text_of(pieces) == "Hello"

    run(scenario)


def test_a_site_that_a_query_cost_twice_is_not_asked_again() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        task, _ = start_answer(here, here.query())
        for _ in range(2):
            await site.assigned()
            await site.close()
            await until(lambda: not here.gateway.federation.links, "the site is lost")
            site = await here.site("a")
        with pytest.raises(UpstreamFailed):
            await task

    run(scenario, max_tries=5)


@pytest.mark.parametrize("crowded", [False, True])
def test_a_site_that_is_full_for_a_moment_is_asked_again_to_go_on(
    crowded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers of a site that is lost all come to the one that is left."""
    monkeypatch.setattr("gateway.query.answer.ROOM_AFTER_S", 0.0)
    monkeypatch.setattr("gateway.query.answer.ASK_AGAIN_AFTER_S", 0.2 if crowded else 60.0)

    async def scenario(here: Scene) -> None:
        dying, other = await here.site("a"), await here.site("b", slots=1, seconds_per_token=0.1)
        task, pieces, _ = await begun(here, dying)
        await other.report(running=1, pending=8 * crowded, running_remaining=[99])
        await dying.close()
        attempt = (await other.next()).assign.attempt_id
        rejected = pb.Rejected(attempt_id=attempt, reason=pb.Rejected.FULL, message="queue of 8 is full")
        await other.send(rejected=rejected)
        if not crowded:
            await other.report()
        await other.finish(await other.assigned(), "lo", 5)
        await task
        assert text_of(pieces) == "Hello"

    run(scenario)


def test_a_site_that_stays_full_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.query.answer.ROOM_AFTER_S", 0.0)

    async def scenario(here: Scene) -> None:
        dying, other = await here.site("a"), await here.site("b", seconds_per_token=0.1)
        task, _pieces, _ = await begun(here, dying)
        await dying.close()
        for _ in range(here.gateway.max_tries - 1):
            attempt = (await other.next()).assign.attempt_id
            await other.send(rejected=pb.Rejected(attempt_id=attempt, reason=pb.Rejected.FULL))
        with pytest.raises(UpstreamLost):
            await task

    run(scenario)


def test_a_site_that_came_back_is_waited_for_until_its_first_report() -> None:
    """It is there a round trip before that; looked at in between, it counted as one that can't take over."""
    turns = Turns()

    async def scenario(here: Scene) -> None:
        dying, other = await here.site("a"), await here.site("b")
        await other.close()
        await until(lambda: "b" not in here.gateway.federation.links, "the other one is lost")
        task, pieces, _ = await begun(here, dying)
        await dying.close()
        await until(lambda: not here.gateway.federation.links, "both are lost")
        again = SilentAtFirst("b", here.address)
        here.sites.append(again)
        await again.join()
        before = turns.taken
        await until(lambda: turns.taken >= before + 2 or task.done(), "two looks at the site")
        await again.first_report()
        await again.finish(await again.assigned(), "lo", 5)
        await task
        assert text_of(pieces) == "Hello"

    run(scenario, turns=turns)


def test_a_site_whose_reports_wait_unread_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a stall of the gateway the end of one link may be read before the reports of the others."""
    turns = Turns()

    async def scenario(here: Scene) -> None:
        dying = await here.site("a")
        task, pieces = start_answer(here, here.query())
        assign = await dying.assigned()
        other = await here.site("b")
        await dying.step(assign, "Hel", 3)
        await until(lambda: text_of(pieces) == "Hel", "the first part")
        with monkeypatch.context() as stalled:
            stalled.setattr("gateway.routing.filters.STALE_AFTER_S", 0.0)
            before = turns.taken
            await dying.close()
            await until(lambda: turns.taken >= before + 2 or task.done(), "two looks at the site")
        await other.report()
        await other.finish(await other.assigned(), "lo", 5)
        await task
        assert text_of(pieces) == "Hello"

    run(scenario, turns=turns)
