"""Each choice of an answer takes a slot of its site, as the site counts it and so the gateway."""

from __future__ import annotations

import asyncio

from gateway.routing.fleet import figures
from tests.support.answers import run, start_answer
from tests.support.fakes.federation import Scene, ScriptedSite, until
from wire import federation_pb2 as pb


async def finish(site: ScriptedSite, assign: pb.Assign, *choices: int) -> None:
    for index in choices:
        await site.finish(assign, "x", 1, index=index)


def test_until_a_report_an_attempt_counts_as_many_requests_as_it_has_choices() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a", slots=4)
        task, _ = start_answer(here, here.query(n=4))
        assign = await site.assigned()
        seen = here.gateway.directory.sites[0]
        at = figures(seen, seen.credit)
        assert (at.requests, at.too_many) == (4, 1)
        await finish(site, assign, 0, 1, 2, 3)
        await task

    run(scenario)


def test_each_choice_that_ends_after_a_report_is_left_out_of_it() -> None:
    async def scenario(here: Scene) -> None:
        site = await here.site("a", slots=8)
        directory = here.gateway.directory
        task, _ = start_answer(here, here.query(n=3))
        assign = await site.assigned()
        await finish(site, assign, 0)
        await site.report(running=5, running_remaining=[10] * 5, kv_free_tokens=100)  # 3 of another gateway
        await until(lambda: directory.load_of("a").running == 5)
        await finish(site, assign, 1)
        await until(lambda: directory.load_of("a").running == 4)
        assert directory.load_of("a").kv_free_tokens == 101
        await finish(site, assign, 2)
        await task
        load = directory.load_of("a")
        assert (load.running, load.running_remaining) == (3, (10,) * 3)
        assert load.kv_free_tokens > 102, "with the prompt"

    run(scenario)


def test_the_next_query_goes_where_slots_are_free_for_its_choices() -> None:
    async def scenario(here: Scene) -> None:
        sites = [
            await here.site("a", slots=4, seconds_per_token=0.010),
            await here.site("b", slots=4, seconds_per_token=0.011),
        ]
        tasks = []
        assigns = []
        for _ in sites:
            tasks.append(start_answer(here, here.query(n=4))[0])
            taker = await until(lambda: next((each for each in sites if not each.inbox.empty()), None))
            assigns.append((taker, await taker.assigned()))
        assert {taker.name for taker, _ in assigns} == {"a", "b"}
        for taker, assign in assigns:
            await finish(taker, assign, 0, 1, 2, 3)
        await asyncio.gather(*tasks)

    run(scenario)
