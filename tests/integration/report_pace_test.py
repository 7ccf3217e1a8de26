"""A gateway with many sites asks them for fewer reports, and knows how long each may be silent then."""

from __future__ import annotations

import asyncio

import pytest

from gateway.errors import UpstreamFailed
from gateway.federation.report_pace import RARELY_OFF, in_share
from tests.support.answers import collect, run
from tests.support.fakes.federation import DEADLINE_S, Scene, until
from wire import federation_pb2 as pb


def test_of_many_sites_those_that_know_how_are_asked_for_fewer_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And, as sites leave, for more again. An older site goes on as in a small fleet."""
    monkeypatch.setattr("gateway.federation.report_pace.LINKS_PER_SECOND", 2)
    monkeypatch.setattr("gateway.federation.report_pace.LINKS_TWICE_OFF", 3)
    monkeypatch.setattr("gateway.federation.report_pace.LINKS_PER_PING", 2)

    async def scenario(here: Scene) -> None:
        sites = [await here.site(str(n), paces_reports=n != 1) for n in range(3)]
        await here.heartbeat()
        for each in (sites[0], sites[2]):
            pace = pb.ReportPace(times_off=2, every_s=2, heartbeat_s=2 * DEADLINE_S)
            assert (await each.next()).report_pace == pace
        before = [each.pings for each in sites]
        for _ in range(4):
            await here.heartbeat()
        await until(lambda: sum(each.pings for each in sites) >= sum(before) + 8, "the pings to arrive")
        assert [each.pings - past for each, past in zip(sites, before, strict=True)] == [2, 4, 2]
        assert all(each.inbox.empty() for each in sites)
        assert [each.load.quiet_s for each in here.gateway.directory.sites] == [1.0, 0.0, 1.0]
        for _ in range(2):
            gone = here.sites.pop()
            await gone.close()
            await until(lambda name=gone.name: name not in here.gateway.federation.links, "the link to end")  # type: ignore[misc]
        await here.heartbeat()
        assert (await sites[0].next()).report_pace == pb.ReportPace(
            times_off=1, every_s=1, heartbeat_s=DEADLINE_S
        )
        await here.heartbeat()
        assert here.gateway.directory.load_of("0").quiet_s == 0.0

    run(scenario)


def test_of_two_gateways_one_hears_of_a_site_rarely_unless_few_have_its_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until the other is gone."""
    monkeypatch.setattr("gateway.federation.report_pace.LINKS_TWICE_OFF", 1)
    monkeypatch.setattr("gateway.federation.server.FEW_SITES", 2)

    async def scenario(here: Scene) -> None:
        federation = here.gateway.federation
        names = [str(number) for number in range(6)]
        sites = {name: await here.site(name, paces_reports=True) for name in names}
        few = await here.site("few", paces_reports=True, model="x")
        await here.heartbeat()
        for each in (*sites.values(), few):
            assert (await each.next()).report_pace.times_off == 2
        own = "g1"
        federation.replicas = lambda: (own, "other")
        rare = {name for name in (*names, "few") if not in_share(name, own, (own, "other"))}
        assert rare and not rare.issuperset(names)
        await here.heartbeat()
        for name in sorted(rare - {"few"}):
            assert (await sites[name].next()).report_pace.times_off == RARELY_OFF
        federation.replicas = lambda: (own,)
        await here.heartbeat()
        for name in sorted(rare - {"few"}):
            assert (await sites[name].next()).report_pace.times_off == 2
        assert all(each.inbox.empty() for each in (*sites.values(), few))

    run(scenario)


def test_a_site_that_is_asked_for_fewer_reports_may_be_silent_for_longer_unless_it_has_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.federation.report_pace.LINKS_PER_SECOND", 1)
    monkeypatch.setattr("gateway.federation.pings.MAX_UNANSWERED_PINGS", 100)

    async def scenario(here: Scene) -> None:
        idle = await here.site("idle", paces_reports=True, answers_pings=False, model="x")
        works = await here.site("works", paces_reports=True, answers_pings=False)
        await here.heartbeat()
        assert [(await idle.next()).report_pace.every_s for _ in range(2)] == [2, 3]
        assert (await works.next()).report_pace.every_s == 3
        await here.silent_heartbeats(4)
        assert set(here.gateway.federation.links) == {"idle", "works"}
        task = asyncio.create_task(collect(here, here.query()))
        assign = (await works.next()).assign
        await here.silent_heartbeats(1)
        assert "works" in here.gateway.federation.links, "it owes a sign since it has work"
        await works.send(accepted=pb.Accepted(attempt_id=assign.attempt_id, prompt_tokens=7))
        await until(here.gateway.federation.links["works"].pending, "the site to be heard")
        await here.silent_heartbeats(1)
        assert set(here.gateway.federation.links) == {"works"}, "six heartbeats in all, and no work"
        await here.silent_heartbeats(3)
        await until(lambda: not here.gateway.federation.links, "the silent site to be gone")
        with pytest.raises(UpstreamFailed, match="silent for"):
            await task

    run(scenario)
