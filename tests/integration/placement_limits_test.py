"""A request may limit where it is served and what that may cost, and is refused where nothing fits."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from gateway.decision import PlacementLimits
from gateway.domain import Query
from gateway.errors import BadRequest, NoSite, UpstreamLost
from tests.support.answers import collect, run, start_answer, text_of
from tests.support.fakes.edge import Edge, chat_body, error_of
from tests.support.fakes.edge import run as run_edge
from tests.support.fakes.federation import Scene, ScriptedSite, until
from wire import federation_pb2 as pb


def limited(here: Scene, **limits: object) -> Query:
    return msgspec.structs.replace(here.query(), limits=PlacementLimits(**limits))  # type: ignore[arg-type]


async def served(here: Scene, query: Query, site: ScriptedSite) -> None:
    asking = asyncio.create_task(collect(here, query))
    await site.finish(await site.assigned(), "x", 1)
    await asking


def test_a_query_goes_where_its_limits_allow() -> None:
    async def scenario(here: Scene) -> None:
        dear = await here.site("dear", region="there", output_usd_per_mtok=100.0)
        cheap = await here.site("cheap", region="here", output_usd_per_mtok=1.0)
        for _ in range(3):
            await served(here, limited(here, regions=frozenset({"there", "moon"})), dear)
            await served(here, limited(here, sites=frozenset({"cheap"})), cheap)
            await served(here, limited(here, max_usd=0.001), cheap)
        decision = here.outcomes[-1].attempts[0].decision
        assert decision.excluded.keys() == {"dear"}
        assert "is expected to cost 0.00" in decision.excluded["dear"]

    run(scenario)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"regions": frozenset({"moon"})}, "a is in here"),
        ({"sites": frozenset({"b"})}, "a is another site"),
        ({"max_usd": 0.0}, "a is expected to cost 0.00"),
    ],
)
def test_limits_that_no_site_keeps_are_refused_with_the_reason(
    limits: dict[str, object], reason: str
) -> None:
    async def scenario(here: Scene) -> None:
        await here.site("a", output_usd_per_mtok=100.0)
        with pytest.raises(BadRequest, match=reason):
            await collect(here, limited(here, **limits))
        assert here.outcomes[-1].mistaken

    run(scenario)


def test_a_site_that_is_down_may_come_back_within_the_limits() -> None:
    async def scenario(here: Scene) -> None:
        await here.site("a")
        await here.site("b")
        await here.sites[1].close()
        await until(lambda: "b" not in here.gateway.federation.links, "the site to be gone")
        with pytest.raises(NoSite, match="b: down"):
            await collect(here, limited(here, sites=frozenset({"b"})))

    run(scenario)


def test_a_site_whose_price_rose_while_it_answered_is_to_blame_for_its_failure() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a", usd_per_hour=1.0)
        answering, pieces = start_answer(here, limited(here, max_usd=0.01))
        assign = await site.assigned()
        await site.step(assign, "Hel", 3)
        await until(lambda: text_of(pieces) == "Hel", "the first part")
        await site.report(iteration=pb.IterationCost(base_s=1000.0))
        await until(lambda: here.gateway.directory.sites[0].load.iteration.base_s > 1.0, "the report")
        await site.step(assign, "", 3, finish=pb.Delta.FAILED, error="out of memory")
        with pytest.raises(UpstreamLost):
            await answering
        assert not here.outcomes[-1].mistaken

    run(scenario)


HEADERS = [
    ({"x_mico_region": "eu, us"}, PlacementLimits(regions=frozenset({"eu", "us"}))),
    ({"x_mico_site": "a"}, PlacementLimits(sites=frozenset({"a"}))),
    ({"x_mico_max_usd": "0.002"}, PlacementLimits(max_usd=0.002)),
    ({}, None),
]


@pytest.mark.parametrize(("headers", "limits"), HEADERS)
def test_headers_carry_the_limits(headers: dict[str, str], limits: PlacementLimits | None) -> None:
    async def scenario(edge: Edge) -> None:
        assert (await edge.post("/v1/chat/completions", chat_body(), **headers)).status_code == 200

    (query,) = run_edge(scenario).queries
    assert query.limits == limits


@pytest.mark.parametrize(
    "headers",
    [
        {"x_mico_region": " , "},
        {"x_mico_site": ",".join(map(str, range(65)))},
        *({"x_mico_max_usd": usd} for usd in ("cheap", "-1", "nan", "inf", "")),
    ],
)
def test_limits_that_make_no_sense_are_refused(headers: dict[str, str]) -> None:
    async def scenario(edge: Edge) -> None:
        response = await edge.post("/v1/chat/completions", chat_body(), **headers)
        (name,) = headers
        assert name.replace("_", "-") in error_of(response, 400)["message"]

    assert not run_edge(scenario).queries
