"""Orders of operators: a site is drained, paused, resumed, at every replica and for as long as ordered."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

import pytest

from gateway.errors import NoSite
from tests.support.admin_replica import (
    BEARER,
    Replica,
    open_replica,
    play,
    site_events,
    text_of,
)
from tests.support.fakes.edge import error_of
from tests.support.fakes.federation import scene, until
from wire import federation_pb2 as pb


def test_a_drained_site_gets_nothing_new_finishes_what_runs_and_is_resumed(url: str) -> None:
    async def scenario(o: Replica) -> None:
        site = await o.here.site("a")
        running = asyncio.create_task(text_of(o.here))
        assign = await site.assigned()
        o.publisher.tick()
        done = await o.act("a", "drain")
        assert done.json()["preview"]["refused_models"] == ["m"]
        assert await o.state("a") == "draining"
        with pytest.raises(NoSite, match="a: draining"):
            await text_of(o.here)
        await site.finish(assign, "done", 1)
        assert await running == "done"
        assert (await o.act("a", "resume")).status_code == 200
        again = asyncio.create_task(text_of(o.here))
        await site.finish(await site.assigned(), "again", 1)
        assert await again == "again"
        acts = [(entry.action, entry.before, entry.after) for entry in await o.book.entries(10)]
        assert acts == [
            ("resume", "service: drain", "service: default"),
            ("drain", "service: default", "service: drain"),
        ]

    play(url, scenario)


def test_a_pause_moves_what_still_runs_once_its_time_has_passed(url: str) -> None:
    async def scenario(o: Replica) -> None:
        slow = await o.here.site("a")
        running = asyncio.create_task(text_of(o.here))
        assign = await slow.assigned()
        await slow.step(assign, "Hel", 3)
        await until(lambda: any(s.opened for s in o.here.gateway.live_queries.values()), "the first token")
        other = await o.here.site("b")
        o.publisher.tick()
        assert (await o.act("a", "pause", within_s=60)).status_code == 200
        assert await o.state("a") == "paused"
        assert other.inbox.empty()
        o.pass_time(61)
        resumed = await other.assigned()
        assert list(resumed.resume.token_ids) == [ord(letter) for letter in "Hel"]
        assert (await slow.next()).cancel.attempt_id == assign.attempt_id
        await other.finish(resumed, "lo", 5)
        assert await running == "Hello"
        assert [attempt.ended for attempt in o.here.outcomes[0].attempts] == ["draining", "finished"]

    play(url, scenario)


def test_what_can_not_go_on_elsewhere_is_left_to_finish(url: str) -> None:
    async def scenario(o: Replica) -> None:
        site = await o.here.site("a")
        running = asyncio.create_task(text_of(o.here, n=2))
        assign = await site.assigned()
        await site.step(assign, "x", 1)
        await until(lambda: any(s.opened for s in o.here.gateway.live_queries.values()), "the first token")
        await o.here.site("b")
        o.publisher.tick()
        await o.act("a", "pause", within_s=0)
        await site.finish(assign, "y", 2)
        await site.finish(assign, "z", 1, index=1)
        assert sorted(await running) == ["x", "y", "z"]
        assert len(o.here.outcomes[0].attempts) == 1

    play(url, scenario)


def test_a_pause_moves_nothing_to_other_weights(url: str) -> None:
    async def scenario(o: Replica) -> None:
        site = await o.here.site("a")
        running = asyncio.create_task(text_of(o.here))
        assign = await site.assigned()
        await site.step(assign, "Hel", 3)
        await until(lambda: any(s.opened for s in o.here.gateway.live_queries.values()), "the first token")
        other = await o.here.site("b", revision="rev-2")
        o.publisher.tick()
        await o.act("a", "pause", within_s=0)
        await site.finish(assign, "lo", 5)
        assert (await running, other.inbox.empty()) == ("Hello", True)

    play(url, scenario)


@pytest.mark.parametrize("unable", [("chat", "logprobs"), ("chat", "resume")])
def test_a_pause_moves_nothing_to_a_site_that_can_not_go_on_with_it(
    url: str, unable: tuple[str, ...]
) -> None:
    """Without tokens, or in mid-thought, the answer ended with an error instead of finishing where it was."""

    async def scenario(o: Replica) -> None:
        site = await o.here.site("a")
        running = asyncio.create_task(text_of(o.here))
        assign = await site.assigned()
        thought: dict[str, Any] = {"reasoning": "Hm"} if "resume" in unable else {}
        await site.step(assign, "Hel", 3, **thought)
        await until(lambda: any(s.opened for s in o.here.gateway.live_queries.values()), "the first token")
        other = await o.here.site("b", features=unable)
        o.publisher.tick()
        await o.act("a", "pause", within_s=0)
        await site.finish(assign, "lo", 5)
        assert (await running, other.inbox.empty()) == ("Hello", True)

    play(url, scenario)


def test_a_pause_moves_nothing_to_the_site_that_failed_it_before(url: str) -> None:
    async def scenario(o: Replica) -> None:
        failing = await o.here.site("b")
        running = asyncio.create_task(text_of(o.here))
        first = await failing.assigned()
        site = await o.here.site("a")
        await failing.step(first, "", 0, finish=pb.Delta.FAILED, error="out of memory")
        assign = await site.assigned()
        o.publisher.tick()
        await o.act("a", "pause", within_s=0)
        await site.finish(assign, "done", 1)
        assert (await running, failing.inbox.qsize()) == ("done", 1), "one message is the end of its attempt"

    play(url, scenario)


def test_an_order_ends_by_itself_and_the_audit_says_so(url: str) -> None:
    async def scenario(o: Replica) -> None:
        await o.here.site("a")
        o.publisher.tick()
        await o.act("a", "weight", weight=0, for_s=600)
        assert o.here.gateway.directory.sites[0].weight == 0
        o.pass_time(601)
        await until(lambda: o.here.gateway.directory.sites[0].weight == 1.0, "the weight is back")
        await until(lambda: o.order_service.orders == [], "the order is removed")
        assert [entry.action for entry in await o.book.entries(10)] == ["expired", "weight 0"]

    play(url, scenario)


def test_an_order_holds_at_every_replica_and_after_a_restart(url: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), scene() as first, scene() as second:
            for here in (first, second):
                await here.site("a")
            async with open_replica(first, url) as one, open_replica(second, url) as two:
                one.publisher.tick()
                assert (await one.act("a", "pin-off", model="m")).status_code == 200
                await until(lambda: "m" in second.gateway.directory.sites[0].pinned_off, "the other replica")
                await until(
                    lambda: any(e.kind == "operator" for e in two.publisher.events.newest()),
                    "its event there",
                )
            async with open_replica(second, url) as reborn:
                assert second.gateway.directory.sites[0].pinned_off == {"m"}
                assert [e.who for e in reborn.publisher.events.newest() if e.kind == "operator"] == ["key-a"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("site", "verb", "body", "param"),
    [
        ("a", "drain", {"reason": ""}, "reason"),
        ("nowhere", "drain", {}, "site"),
        ("a", "explode", {}, "verb"),
        ("a", "weight", {"weight": 101}, "weight"),
        ("a", "weight", {}, "weight"),
        ("a", "drain", {"for_s": -1}, "for_s"),
        ("a", "pin-off", {"model": "gpt-9"}, "model"),
        ("a", "drain", {"colour": "red"}, None),
    ],
)
def test_an_act_that_makes_no_sense_is_refused(
    url: str, site: str, verb: str, body: dict[str, Any], param: str | None
) -> None:
    async def scenario(o: Replica) -> None:
        await o.here.site("a")
        o.publisher.tick()
        refused = await o.act(site, verb, **body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert await o.book.entries(5) == []

    play(url, scenario)


@pytest.mark.parametrize("name", ["aws/us-east-1", "a//b", "events", "ü ?#%2F"])
def test_a_site_is_drained_and_told_of_whatever_its_name(url: str, name: str) -> None:
    async def scenario(o: Replica) -> None:
        await o.here.site(name)
        o.publisher.tick()
        quoted = quote(name, safe="")
        assert (await o.act(quoted, "drain")).status_code == 200
        assert await o.state(name) == "draining"
        assert ("key-a", "drain: a test") in await site_events(o, quoted)
        error_of(await o.http.get(f"/admin/api/sites/{quoted}/drain", headers=BEARER), 404)
        error_of(await o.http.get(f"/admin/api/sites/{quoted}", headers=BEARER), 404)

    play(url, scenario)


def test_orders_for_what_is_not_there_any_more_can_be_lifted(url: str) -> None:
    """A site is not listed any more after a day, and may come back without a model."""

    async def main() -> None:
        async with asyncio.timeout(60), scene() as before, scene() as after:
            for name in ("a", "b"):
                await before.site(name)
            async with open_replica(before, url) as o:
                o.publisher.tick()
                assert (await o.act("a", "pause")).status_code == 200
                for name in ("a", "b"):
                    assert (await o.act(name, "pin-off", model="m")).status_code == 200
            await after.site("b", model="other")
            async with open_replica(after, url) as o:
                o.publisher.tick()
                for act in ("drain", "weight", "pin-off"):
                    assert (await o.act("a", act, weight=100, model="m")).status_code == 400, "not an order"
                assert (await o.act("b", "pin-off", model="m")).status_code == 400
                for site, act in (("a", "resume"), ("a", "unpin"), ("b", "unpin")):
                    lifted = await o.act(site, act, model="m")
                    assert lifted.status_code == 200 and lifted.json()["preview"]["warnings"] == []
                    assert (await o.act(site, act, model="m")).status_code == 400, "there is none any more"
                assert await o.book.orders() == []

    asyncio.run(main())
