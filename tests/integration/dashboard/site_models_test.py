"""`/admin/api/models`: a variant is loaded at a site or dropped there, with a reason and an audit entry."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest

from tests.support.admin_replica import BEARER, Replica, play
from tests.support.fakes.federation import ScriptedSite, until
from wire import federation_pb2 as pb

PATH = "/admin/api/models"
ADD = {"site": "a", "model": "v", "adapter": "/srv/models/v"}


def post(o: Replica, verb: str, **body: Any) -> asyncio.Task[httpx2.Response]:
    given = {"reason": "a test", **body}
    return asyncio.create_task(o.http.post(f"{PATH}/{verb}", json=given, headers=BEARER))


async def answer(site: ScriptedSite, error: str = "") -> pb.ModelOrder:
    order = (await site.next()).order
    await site.send(ordered=pb.Ordered(order_id=order.order_id, error=error))
    return order


async def serve(o: Replica, site: ScriptedSite, *models: pb.Model) -> None:
    await site.send(models=pb.Models(models=models))
    wanted = {each.id for each in models}
    directory = o.here.gateway.directory
    await until(lambda: any(set(s.identity.models) == wanted for s in directory.sites), "the models")


async def audited(o: Replica) -> list[tuple[str, str, str, str]]:
    entries = await o.book.entries(10)
    return [(each.site, each.action, each.reason, each.after) for each in entries][::-1]


def test_a_variant_is_added_shown_and_removed(url: str) -> None:
    async def scenario(o: Replica) -> None:
        site = await o.here.site("a", takes_orders=True)
        adding = post(o, "add", **ADD)
        order = await answer(site)
        assert (order.kind, order.model, order.adapter, order.folder) == ("add", "v", "/srv/models/v", "")
        assert (await adding).raise_for_status().json() == {"done": True}
        base, variant = pb.Model(id="m"), pb.Model(id="v", parent="m", revision="f1", own_bytes=1000)
        await serve(o, site, base, variant)
        shown = (await o.http.get(f"{PATH}?site=a", headers=BEARER)).json()["models"]
        assert [(each["id"], each["parent"], each["own_bytes"]) for each in shown] == [
            ("m", None, 0),
            ("v", "m", 1000),
        ]
        removing = post(o, "remove", site="a", model="v")
        assert (await answer(site)).kind == "remove"
        assert (await removing).status_code == 200
        assert await audited(o) == [
            ("a", "add model v", "a test", "/srv/models/v"),
            ("a", "remove model v", "a test", "removed"),
        ]

    play(url, scenario)


def test_what_models_have_in_memory_is_shown_and_what_they_share(url: str) -> None:
    def block(name: str, kind: int, size: int, *, in_host: bool = False) -> pb.Block:
        return pb.Block(id=name.encode(), kind=kind, bytes=size, in_host=in_host)

    async def scenario(o: Replica) -> None:
        site = await o.here.site("a", takes_orders=True)
        weights = [block("", pb.Block.BASE, 16_000), block("", pb.Block.SLOTS, 800)]
        top, last = block("top", pb.Block.LAYERS, 300), block("last", pb.Block.LAYERS, 50)
        given = {
            "m": weights,
            "legal": [top, last],
            "sales": [top],
            "gone": [top],
            "in": [block("a", pb.Block.ADAPTER, 100)],
            "out": [block("b", 99, 100, in_host=True)],
        }
        models = [
            pb.Model(id=name, parent="m" if name != "m" else "", blocks=blocks, state=int(name == "gone"))
            for name, blocks in given.items()
        ]
        await serve(o, site, *models)
        shown = (await o.http.get(f"{PATH}?site=a", headers=BEARER)).json()
        assert shown["memory"] == {
            "base_bytes": 16_000,
            "slots_bytes": 800,  # which hold "in"
            "own_bytes": 350,
            "host_bytes": 100,
        }
        found = {each["id"]: each for each in shown["models"]}
        assert [name for name in given if found[name]["in_host"]] == ["out"]
        assert {name: (each["shared_bytes"], each["shared_with"]) for name, each in found.items()} == {
            "m": (0, []),
            "legal": (300, ["sales", "gone"]),
            "sales": (300, ["legal", "gone"]),
            "gone": (300, ["legal", "sales"]),
            "in": (0, []),
            "out": (0, []),
        }

    play(url, scenario)


def test_a_variant_sleeps_and_wakes_by_orders_with_a_reason(url: str) -> None:
    async def scenario(o: Replica) -> None:
        site = await o.here.site("a", takes_orders=True)
        awake, asleep = pb.Model(id="v", parent="m"), pb.Model(id="v", parent="m", state=1, wake_s=2.5)
        await serve(o, site, pb.Model(id="m"), awake)
        for kind, now in (("sleep", asleep), ("wake", awake)):
            ordering = post(o, kind, site="a", model="v")
            assert (await answer(site)).kind == kind
            assert (await ordering).raise_for_status().json() == {"done": True}
            await site.send(models=pb.Models(models=[pb.Model(id="m"), now]))
            state = {0: "ready", 1: "sleeping"}[now.state]
            await until(lambda state=state: o.here.gateway.directory.models["v"].state == state, state)
            shown = (await o.http.get(f"{PATH}?site=a", headers=BEARER)).json()["models"][1]
            assert (shown["state"], shown["wake_s"]) == (state, now.wake_s)
        assert (await post(o, "sleep", site="a", model="absent")).status_code == 404
        assert (await post(o, "sleep", site="a", model="v", reason=" ")).status_code == 400
        assert await audited(o) == [
            ("a", "sleep model v", "a test", "asleep"),
            ("a", "wake model v", "a test", "awake"),
        ]

    play(url, scenario)


def test_what_a_site_refuses_is_a_400_with_its_reason_and_in_the_audit(url: str) -> None:
    async def scenario(o: Replica) -> None:
        site = await o.here.site("a", takes_orders=True)
        adding = post(o, "add", **ADD)
        await answer(site, error="rank 128 is above the limit of 64")
        refused = await adding
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert message == "a has changed nothing: rank 128 is above the limit of 64"
        assert [each[1:] for each in await audited(o)] == [
            ("add model v", "a test", "/srv/models/v"),
            ("add model v: refused", "a test", message),
        ]

    play(url, scenario)


def test_a_site_that_is_lost_meanwhile_leaves_the_outcome_open_and_says_so(url: str) -> None:
    async def scenario(o: Replica) -> None:
        site = await o.here.site("a", takes_orders=True)
        adding = post(o, "add", **ADD)
        await site.next()
        await site.close()
        lost = await adding
        assert lost.status_code == 503
        assert "whether it carried the order out is not known" in lost.json()["error"]["message"]
        assert (await post(o, "add", **ADD)).status_code == 400  # it is not linked

    play(url, scenario)


@pytest.mark.parametrize(
    ("body", "status", "complaint"),
    [
        ({"site": "z"}, 404, "there is no site 'z'; sites now: a, b, c"),
        ({"site": "b"}, 400, "b takes no orders"),
        ({"model": "m"}, 400, "a serves m already"),
        ({"model": "n"}, 400, "b serves n as a base; choose another name"),
        ({"model": "w"}, 400, "c serves w as a variant of other; choose another name"),
        ({"folder": "/x"}, 400, "name one folder"),
        ({"adapter": ""}, 400, "name one folder"),
        ({"reason": " "}, 400, "Say why"),
        ({"unknown": 1}, 400, "the body is not understood"),
    ],
)
def test_what_cannot_be_ordered_never_reaches_the_site(
    url: str, body: dict[str, Any], status: int, complaint: str
) -> None:
    async def scenario(o: Replica) -> None:
        site = await o.here.site("a", takes_orders=True)
        await o.here.site("b", model="n")
        third = await o.here.site("c", takes_orders=True)
        await serve(o, third, pb.Model(id="other"), pb.Model(id="w", parent="other"))
        refused = await post(o, "add", **{**ADD, **body})
        assert (refused.status_code, site.inbox.empty()) == (status, True)
        assert complaint in refused.json()["error"]["message"]
        assert await audited(o) == []

    play(url, scenario)


def test_a_variant_of_the_same_base_may_be_at_several_sites(url: str) -> None:
    async def scenario(o: Replica) -> None:
        site = await o.here.site("a", takes_orders=True)
        other = await o.here.site("b")
        await serve(o, other, pb.Model(id="m"), pb.Model(id="v", parent="m"))
        adding = post(o, "add", **ADD)
        await answer(site)
        assert (await adding).status_code == 200
        assert (await post(o, "remove", site="a", model="absent")).status_code == 404

    play(url, scenario)
