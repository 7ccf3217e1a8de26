"""Batches of one replica side by side: how they share its sites."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from gateway.batches.values import WINDOW_S
from gateway.domain import Caller
from tests.support.batch_replica import (
    CALLERS_BY_ID,
    Replica,
    asked_at_least,
    chat_line,
    jsonl,
    replica,
)
from tests.support.fakes.federation import until


def lines_at_sites(here: Replica, batch_id: str) -> int:
    return sum(
        query_id.startswith(batch_id) and state.current is not None
        for query_id, state in here.scene.gateway.live_queries.items()
    )


def test_batches_of_other_models_leave_a_batch_all_of_its_sites(url: str) -> None:
    async def main() -> None:
        async with replica(url, in_flight=1) as here:
            serving = asyncio.create_task(here.serve(await here.scene.site("z", model="other")))
            here.open.clear()
            others = [await here.submit(jsonl(chat_line(0, model="other"))) for _ in range(3)]
            for each in others:
                await until(lambda each=each: lines_at_sites(here, each) == 1, "it runs")  # type: ignore[misc]
            batch_id = await here.submit(jsonl(*(chat_line(number) for number in range(20))))
            await until(lambda: lines_at_sites(here, batch_id) == 10, "both its sites are full")
            here.open.set()
            for each in (batch_id, *others):
                assert (await here.ended(each)).status == "completed"
            serving.cancel()

    asyncio.run(main())


def test_beside_a_late_batch_others_run_at_the_sites_that_it_may_not_use(url: str) -> None:
    def caller(key_id: str) -> Caller | None:
        found = CALLERS_BY_ID.get(key_id)
        return replace(found, regions=frozenset({"here"})) if found and key_id == "key-1" else found

    async def main() -> None:
        async with replica(url, caller=caller) as here:
            serving = asyncio.create_task(here.serve(await here.scene.site("c", region="elsewhere")))
            here.open.clear()
            late = await here.submit(jsonl(*(chat_line(number) for number in range(40))))
            await asked_at_least(here, 2)
            here.pass_time(0.85 * WINDOW_S)
            on_time = await here.submit(jsonl(*(chat_line(number) for number in range(100, 110))), "two")
            await until(lambda: lines_at_sites(here, on_time) == 5, "the third site is full")
            sites = {
                state.current.site.name
                for query_id, state in here.scene.gateway.live_queries.items()
                if query_id.startswith(on_time) and state.current is not None
            }
            assert sites == {"c"}
            here.open.set()
            await until(lambda: not here.batches.runner._jobs, "both are over")
            for batch_id, key in ((late, "one"), (on_time, "two")):
                assert (await here.sdk(key).batches.retrieve(batch_id)).status == "completed"
            serving.cancel()

    asyncio.run(main())
