"""`/admin/api/routes`: set, taken apart by one command and removed, each with a reason; never by a user."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import httpx2
from msgspec.structs import replace

from gateway.routing.model_routes import draw
from tests.support.admin_replica import BEARER, USER, Replica, open_replica, play
from tests.support.answers import collect, text_of
from tests.support.fakes.federation import scene, until
from wire import federation_pb2 as pb

PATH = "/admin/api/routes"
ALIAS: dict[str, Any] = {"name": "alias", "targets": [{"model": "m"}]}
CANARY: dict[str, Any] = {
    "name": "chat",
    "targets": [{"model": "m", "weight": 1}, {"model": "n", "weight": 1}],
}


async def post(o: Replica, path: str = "", headers: dict[str, str] = BEARER, **body: Any) -> httpx2.Response:
    return await o.http.post(PATH + path, json={"reason": "a test", **body}, headers=headers)


def test_a_canary_that_errs_is_seen_and_taken_out_by_one_request(url: str) -> None:
    async def scenario(o: Replica) -> None:
        good, bad = await o.here.site("a"), await o.here.site("b", model="n")
        (await post(o, **CANARY)).raise_for_status()
        drawn_for_canary = next(f"{n:x}" for n in range(100) if draw(f"{n:x}") > 0.5)
        query = replace(o.here.query(model="chat"), id=drawn_for_canary)
        task = asyncio.create_task(collect(o.here, query))
        await bad.step(await bad.assigned(), "", 0, finish=pb.Delta.FAILED, error="broke")
        await good.finish(await good.assigned(), "answered all the same", 5)
        assert text_of(await task) == "answered all the same"
        o.publisher.observe(o.here.outcomes[0])
        o.publisher.tick()
        for shown in (
            (await o.http.get("/admin/api/overview", headers=BEARER)).json()["model_routes"],
            (await o.http.get(PATH, headers=BEARER)).json()["routes"][0]["figures"],
        ):
            found = [(each["model"], each["queries"], each["failed"]) for each in shown]
            assert found == [("m", 1, 0), ("n", 1, 1)]
        changed = (await post(o, "/off", model="n")).raise_for_status().json()["routes"]
        assert [target["weight"] for target in changed[0]["targets"]] == [1, 0]
        for number in range(8):
            query = o.here.query(model="chat")
            task = asyncio.create_task(collect(o.here, query))
            await good.finish(await good.assigned(), f"{number}", 1)
            assert text_of(await task) == f"{number}"
        later = o.here.outcomes[1:]
        assert {attempt.model for outcome in later for attempt in outcome.attempts} == {"m"}

    play(url, scenario)


def test_a_change_of_a_route_is_an_event_at_every_replica_at_once(url: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), scene() as first, scene() as second:
            await first.site("a")
            async with open_replica(first, url) as one, open_replica(second, url) as two:
                for act in ("set route alias", "remove route alias"):
                    path, body = ("", ALIAS) if act.startswith("set") else ("/remove", {"name": "alias"})
                    (await post(one, path, **body)).raise_for_status()
                    for replica in (one, two):
                        await until(partial(is_shown, replica, act), act)
                assert len(shown_acts(two)) == 2, "each is told once"

    asyncio.run(main())


def shown_acts(o: Replica) -> list[str]:
    """Return the operators' acts among the events, newest first."""
    return [event.text for event in o.publisher.events.newest() if event.kind == "operator"]


def is_shown(o: Replica, act: str) -> bool:
    return any(text.startswith(act) for text in shown_acts(o))


def test_what_is_listed_of_a_route(url: str) -> None:
    async def scenario(o: Replica) -> None:
        await o.here.site("a")
        answer = (await post(o, **CANARY, shadow={"model": "s", "share": 0.5})).raise_for_status().json()
        (listed,) = (await o.http.get(PATH, headers=BEARER)).json()["routes"]
        assert listed == answer
        assert [(each["model"], each["served"]) for each in listed["targets"]] == [("m", True), ("n", False)]
        assert (listed["source"], listed["reason"], listed["shadow"]["share"]) == ("operator", "a test", 0.5)
        (await post(o, "/remove", name="chat")).raise_for_status()
        assert (await o.http.get(PATH, headers=BEARER)).json() == {"routes": []}

    play(url, scenario)


def test_a_mistake_is_a_clear_refusal_and_changes_nothing(url: str) -> None:
    async def scenario(o: Replica) -> None:
        for path, body, status, word in (
            ("", {"name": "chat", "targets": []}, 400, "targets"),
            ("", {"name": "chat", "targets": [{"model": "m", "wieght": 1}]}, 400, "wieght"),
            ("", {"name": "chat", "targets": [{"model": "m"}], "reason": ""}, 400, "Say why"),
            ("/off", {"model": "n"}, 404, "any route"),
            ("/off", {"model": "n", "name": "chat"}, 404, "'chat'"),
            ("/remove", {"name": "chat"}, 404, "'chat'"),
        ):
            refused = await post(o, path, **body)
            assert (refused.status_code, word in refused.text) == (status, True), refused.text
        for refused in (
            await post(o, headers={"authorization": f"Bearer {USER}"}, **CANARY),
            await o.http.get(PATH, headers={"authorization": f"Bearer {USER}"}),
        ):
            assert refused.status_code == 403
        assert (await o.http.get(PATH, headers=BEARER)).json() == {"routes": []}

    play(url, scenario)
