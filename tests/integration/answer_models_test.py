"""Models that come and go at a site while it is linked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.domain import Credit, LoadReport, Model, ModelState, SiteIdentity, SiteState
from gateway.errors import ModelNotFound, NoSite
from gateway.federation.directory import Directory
from tests.support.answers import collect, run, text_of
from tests.support.fakes.federation import Scene, ScriptedSite, until
from wire import federation_pb2 as pb


def model(name: str, parent: str = "", **more: Any) -> pb.Model:
    features = ("chat", "logprobs", "resume")
    settings = {"revision": f"rev-{name}", "context_tokens": 1024, "features": features, **more}
    return pb.Model(id=name, parent=parent, **settings)


async def serve(here: Scene, site: ScriptedSite, *models: pb.Model) -> None:
    await site.send(models=pb.Models(models=models))
    wanted = {each.id for each in models}
    directory = here.gateway.directory
    await until(
        lambda: any(s.name == site.name and set(s.identity.models) == wanted for s in directory.sites),
        f"{site.name} serves {wanted}",
    )


def test_a_variant_that_comes_later_is_answered_where_it_is() -> None:
    async def scenario(here: Scene) -> None:
        await here.site("a", seconds_per_token=0.001)
        slow = await here.site("b", seconds_per_token=0.1)
        with pytest.raises(ModelNotFound):
            await collect(here, here.query(model="v"))
        await serve(here, slow, model("m"), model("v", "m"))
        assert here.gateway.directory.models["v"].parent == "m"
        for _ in range(3):
            task = asyncio.create_task(collect(here, here.query(model="v")))
            assign = await slow.assigned()
            assert assign.model == "v"
            await slow.finish(assign, "done", 1)
            assert text_of(await task) == "done"
        await until(here.nothing_is_left)

    run(scenario)


def test_a_query_in_flight_ends_after_its_model_has_gone_and_new_ones_are_not_found() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        await serve(here, site, model("m"), model("v", "m"))
        task = asyncio.create_task(collect(here, here.query(model="v")))
        assign = await site.assigned()
        await serve(here, site, model("m"))
        await site.step(assign, "Hel", 1)
        await site.finish(assign, "lo", 2)
        pieces = await task
        assert text_of(pieces) == "Hello"
        assert pieces[0].fingerprint == "rev-v"
        with pytest.raises(ModelNotFound):
            await collect(here, here.query(model="v"))
        await until(here.nothing_is_left)

    run(scenario)


def test_a_query_whose_site_has_just_lost_the_model_goes_to_another_that_has_it() -> None:
    async def scenario(here: Scene) -> None:
        one, other = await here.site("a"), await here.site("b", seconds_per_token=0.1)
        for site in (one, other):
            await serve(here, site, model("m"), model("v", "m"))
        task = asyncio.create_task(collect(here, here.query(model="v")))
        message = await one.next()
        unknown = pb.Rejected(attempt_id=message.assign.attempt_id, reason=pb.Rejected.MODEL_UNKNOWN)
        await one.send(rejected=unknown)
        await other.finish(await other.assigned(), "done", 1)
        assert text_of(await task) == "done"
        await until(here.nothing_is_left)

    run(scenario)


def test_what_a_site_says_of_a_model_that_it_has_just_lost_is_not_told_to_clients() -> None:
    """It may name models of other tenants."""

    async def scenario(here: Scene) -> None:
        sites = [await here.site(name) for name in ("a", "b")]
        task = asyncio.create_task(collect(here, here.query()))
        for _ in sites:
            site = await until(lambda: next((each for each in sites if not each.inbox.empty()), None))
            rejected = pb.Rejected(
                reason=pb.Rejected.MODEL_UNKNOWN, message="serves acme/secret", param="model"
            )
            rejected.attempt_id = (await site.next()).assign.attempt_id
            await site.send(rejected=rejected)
        with pytest.raises(NoSite) as refused:
            await task
        assert "secret" not in refused.value.message
        assert {each.ended for each in here.outcomes[-1].attempts} == {"model_unknown"}
        await until(here.nothing_is_left)

    run(scenario)


def test_an_answer_of_a_variant_does_not_go_on_with_other_weights() -> None:
    async def scenario(here: Scene) -> None:
        one, other, same = [await here.site(name, seconds_per_token=0.001) for name in "abc"]
        await serve(here, one, model("m"), model("v", "m"))
        task = asyncio.create_task(collect(here, here.query(model="v")))
        assign = await one.assigned()
        await one.step(assign, "Hel", 3)
        await until(lambda: any(each.opened for each in here.gateway.live_queries.values()), "a first word")
        await serve(here, other, model("m"), model("v", "m", revision="rev-2"))
        await serve(here, same, model("m"), model("v", "m"))
        await one.close()
        resumed = await same.assigned()
        assert resumed.resume.text_chars == 3
        await same.finish(resumed, "lo", 5)
        assert text_of(await task) == "Hello"
        assert other.inbox.empty()

    run(scenario)


def test_a_query_waits_at_its_site_for_the_model_to_wake_and_the_site_is_not_at_fault() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        await serve(here, site, model("m"), model("v", "m", state=pb.Model.SLEEPING, wake_s=60.0))
        assert here.gateway.directory.models["v"].state is ModelState.SLEEPING
        task = asyncio.create_task(collect(here, here.query(model="v")))
        assign = (await site.next()).assign
        await site.send(held=pb.Held(attempt_id=assign.attempt_id))
        await site.report()
        await until(lambda: here.gateway.directory.load_of("a").seq == site.reports, "it has heard of that")
        here.let_pass(60.0)
        assert here.gateway.directory.sites[0].state is SiteState.READY
        await site.send(accepted=pb.Accepted(attempt_id=assign.attempt_id, prompt_tokens=7))
        await site.finish(assign, "done", 1)
        assert text_of(await task) == "done"
        await until(here.nothing_is_left)

    run(scenario)


@pytest.mark.parametrize("wrong", [[], [model("x" * 300)], [model("v", context_tokens=2**31)]])
def test_models_that_make_no_sense_end_the_link_with_the_reason(wrong: list[pb.Model]) -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a")
        await site.send(models=pb.Models(models=wrong))
        await until(lambda: "a" not in here.gateway.federation.links, "the link to end")
        assert "sent garbage" in here.gateway.directory.down_reasons["a"]

    run(scenario)


def test_variants_of_one_site_alone_do_not_keep_it_from_being_ejected() -> None:
    def site(name: str, *variants: str) -> SiteIdentity:
        served = [Model("m", "r", 1024, 0, "o")] + [Model(v, "r", 1024, 0, "o", parent="m") for v in variants]
        return SiteIdentity(name, "b", "c", "r", {each.id: each for each in served}, 4, 1000)

    directory = Directory()
    for each in (site("a", "v1", "v2"), site("b"), site("c")):
        directory.join(each, 0.0)
        directory.report(each.name, LoadReport(seq=1, received_s=0.0), Credit())
    assert not directory.is_one_of_many(site("a", "v1", "v2"))
    directory.eject("b", "it hangs")
    assert directory.is_one_of_many(site("a", "v1", "v2"))
