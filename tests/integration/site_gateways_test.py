"""A site and its gateways: links that break, replicas, peers and draining."""

from __future__ import annotations

import asyncio

import pytest

from site_engine.federation import link
from tests.support.site_gateway import TOKEN, Gateway, assign, serving, site_before
from tests.support.site_links import HURRIED, falls_idle, run
from wire import federation_pb2 as pb


def test_a_lost_link_costs_its_attempts_after_the_grace_only() -> None:
    async def scenario() -> None:
        async with serving(Gateway()) as gateway, site_before(gateway, timeouts=HURRIED) as scene:
            session = await gateway.linked(grace_s=5.0)
            await session.send(**assign("a", max_tokens=50))
            await session.wait_for("accepted")
            await scene.step()
            session.hang_up()
            again = await gateway.joined()  # the site is back, but nobody says Welcome
            scene.clock.now += 4.0
            scene.site.tick()
            assert scene.site.live == 1
            scene.clock.now += 1.0
            scene.site.tick()
            await scene.step()
            assert scene.site.live == 0
            assert not scene.engine.has_work
            assert list((await again.wait_for("hello"))[0].attempts) == ["a"]

    run(scenario())


def test_a_gateway_that_is_back_in_time_misses_nothing() -> None:
    async def scenario() -> None:
        async with serving(Gateway()) as gateway, site_before(gateway) as scene:
            first = await gateway.linked(grace_s=50.0)
            await first.send(**assign("a", max_tokens=6))
            await first.send(**assign("b", max_tokens=6))
            await first.wait_for("accepted", 2)
            await scene.step(2)
            await first.until(lambda: first.text("a") == "ab" and first.text("b") == "ab")
            first.hang_up()
            second = await gateway.joined()
            await scene.step(2)  # goes on meanwhile
            hello = await second.welcome(grace_s=50.0, cancel=["b"])
            assert sorted(hello.attempts) == ["a", "b"]
            await second.wait_for("load")
            await scene.step(2)
            assert await second.finished("a") == pb.Delta.LENGTH
            assert first.text("a") + second.text("a") == "abcabc"
            assert await second.finished("b") == pb.Delta.CANCELLED
            assert second.deltas("b")[-1].completion_tokens == 4
            await falls_idle(second)

    run(scenario())


def test_another_replica_at_the_same_address_does_not_inherit() -> None:
    async def scenario() -> None:
        async with serving(Gateway()) as gateway, site_before(gateway) as scene:
            first = await gateway.linked("east", grace_s=50.0)
            await first.send(**assign("a", max_tokens=6))
            await first.wait_for("accepted")
            await scene.step(2)
            first.hang_up()
            second = await gateway.joined()
            await second.welcome("west", cancel=["a"])
            await second.wait_for("load")
            await scene.step(4)
            assert second.deltas("a") == []
            second.hang_up()
            third = await gateway.linked("east")
            assert await third.finished("a") == pb.Delta.LENGTH

    run(scenario())


def test_two_gateways_share_a_site_and_hear_their_own() -> None:
    async def scenario() -> None:
        async with serving(Gateway()) as one, serving(Gateway()) as two, site_before(one, two) as scene:
            east, west = await one.linked("east"), await two.linked("west")
            await east.send(**assign("same-id", "ab"))
            await west.send(**assign("same-id", "xy"))
            await east.wait_for("accepted")
            await west.wait_for("accepted")
            await scene.step()
            await east.until(
                lambda: [load.running for load in east.received("load")[-1:]] == [2]
            )  # the whole load, to each
            await west.until(lambda: [load.running for load in west.received("load")[-1:]] == [2])
            await scene.step(4)
            await east.finished("same-id")
            await west.finished("same-id")
            assert (east.text("same-id"), west.text("same-id")) == ("abab", "xyxy")

    run(scenario())


def known_as(hashes: bytes, attempt_id: str) -> dict[str, pb.Assign]:
    body = assign(attempt_id)
    body["assign"].prefix_hashes = hashes
    return body


def test_a_gateway_that_reads_them_hears_of_the_prompts_of_others() -> None:
    async def scenario() -> None:
        async with (
            serving(Gateway()) as one,
            serving(Gateway()) as two,
            serving(Gateway()) as three,
            site_before(one, two, three) as scene,
        ):
            east = await one.linked("east", reads_prefixes=True)
            west = await two.linked("west", reads_prefixes=True)
            old = await three.linked("old")
            await east.send(**known_as(b"eastern1", "a"))
            await old.send(**known_as(b"", "b"))
            await east.wait_for("accepted")
            await old.wait_for("accepted")
            assert west.received("prefixes") == [], "nothing is computed yet"
            await scene.step(5)
            await east.finished("a")
            await old.finished("b")
            (told,) = await west.wait_for("prefixes")
            assert told.hashes == b"eastern1"
            assert east.received("prefixes") == old.received("prefixes") == []

    run(scenario())


def test_peers_are_dialled_too() -> None:
    async def scenario() -> None:
        async with serving(Gateway()) as one, serving(Gateway()) as two, site_before(one):
            await one.linked("east", peers=[two.address, one.address])
            assert (await (await two.joined()).welcome("west")).site == "alpha"

    run(scenario())


def test_the_workers_of_a_gateway_are_dialled_at_its_host() -> None:
    async def scenario() -> None:
        async with serving(Gateway()) as one, serving(Gateway()) as two, site_before(one):
            await one.linked("east", worker_ports=[one.port, two.port])
            assert (await (await two.joined()).welcome("east.2")).site == "alpha"

    run(scenario())


def test_a_peer_is_dialled_for_as_long_as_a_linked_gateway_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MAX_PEER_FAILURES", 1)

    async def scenario() -> None:
        two = Gateway()
        async with serving(Gateway()) as one, site_before(one):
            async with serving(two):
                await one.linked("east", peers=[two.address])
                await two.linked("west")
            async with serving(two):  # on its port again
                assert (await (await two.joined()).welcome("west")).site == "alpha"

    run(scenario())


def test_one_replica_under_two_addresses_has_one_link() -> None:
    async def scenario() -> None:
        async with (
            serving(Gateway()) as gateway,
            site_before(gateway, stepped=False, timeouts=HURRIED) as scene,
        ):
            first = await gateway.linked("east")
            await first.wait_for("load")
            scene.links.add([f"127.0.0.1:{gateway.alias_port}"])
            second = await gateway.linked("east")
            await first.ended()
            for count in range(1, 20):
                await second.send(ping=pb.Ping(nonce=count))
                await second.wait_for("pong", count)
            await second.send(**assign("a"))
            await second.finished("a")
            assert gateway.sessions.empty()  # nobody fights for the place
            second.hang_up()
            await gateway.joined()
            await gateway.joined()  # with no link left, every address is tried

    run(scenario())


def test_a_refused_token_is_tried_again() -> None:
    async def scenario() -> None:
        async with serving(Gateway(token="another")) as gateway, site_before(gateway):
            async with asyncio.timeout(60):
                while gateway.refusals < 2:  # noqa: ASYNC110 - the server counts, nobody tells
                    await asyncio.sleep(0)
            gateway.token = TOKEN
            await gateway.linked()

    run(scenario())


def test_a_silent_gateway_is_left_after_three_heartbeats() -> None:
    async def scenario() -> None:
        async with serving(Gateway()) as gateway, site_before(gateway, timeouts=HURRIED):
            session = await gateway.joined()
            await session.wait_for("hello")
            await session.send(welcome=pb.Welcome(gateway="east", heartbeat_s=0.01))
            assert await gateway.joined() is not session

    run(scenario())


def test_draining_takes_nothing_new_finishes_and_says_bye_last() -> None:
    async def scenario() -> None:
        async with serving(Gateway()) as gateway, site_before(gateway) as scene:
            session = await gateway.linked()
            await session.send(**assign("a"))
            await session.wait_for("accepted")
            await scene.step()
            done = asyncio.Event()
            scene.site.drain("a rolling update")
            scene.site.when_idle(done.set)
            assert (await session.wait_for("draining"))[0].reason == "a rolling update"
            await session.send(**assign("b"))
            assert (await session.wait_for("rejected"))[0].reason == pb.Rejected.DRAINING
            assert not done.is_set()
            await scene.step(3)
            await done.wait()
            await scene.links.close("gone")
            await session.ended()
            assert session.finish("a") == pb.Delta.LENGTH
            assert session.log[-1].bye.reason == "gone"

    run(scenario())
