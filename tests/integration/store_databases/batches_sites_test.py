"""The sites to which the lines of a batch may go, and what becomes of them while those are away."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from gateway.batches.job import Job
from gateway.batches.values import Line
from gateway.domain import Caller, SiteState
from gateway.errors import NoSite
from gateway.operator_orders import Standing
from tests.support.batch_replica import (
    CALLERS_BY_ID,
    Replica,
    asked_at_least,
    chat_line,
    jsonl,
    replica,
    until_two_are_held,
)
from tests.support.fakes.federation import until
from wire import federation_pb2 as pb


def limited_to(*regions: str) -> Callable[[str], Caller]:
    return lambda key_id: Caller(key_id, "tenant-1", regions=frozenset(regions))


async def has_looked(here: Replica, batch_id: str) -> None:
    """Wait until a batch has looked for sites often, or is over."""
    entry: Any = here.batches.runner._jobs[batch_id]
    job, running = entry
    looks, look = 0, job._start_lines

    def counted() -> None:
        nonlocal looks
        looks += 1
        look()

    job._start_lines = counted
    await until(lambda: looks > 10 or running.done(), "looks for sites")


async def counts(here: Replica, batch_id: str) -> tuple[int, int]:
    """Return how many lines were answered, and how many failed."""
    found = (await here.sdk().batches.retrieve(batch_id)).request_counts
    assert found is not None
    return found.completed, found.failed


def test_lines_wait_for_a_site_in_the_regions_of_their_key(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free slots elsewhere are of no use to them: each of these lines failed three times within seconds."""
    monkeypatch.setattr("gateway.batches.job.BACKOFF_S", 0.01)

    async def main() -> None:
        async with replica(url, caller=limited_to("elsewhere")) as here:
            site = await here.scene.site("c", region="elsewhere", slots=4)
            directory = here.scene.gateway.directory
            directory.apply_standings({"c": Standing(pinned_off=frozenset({"m"}))})
            batch_id = await here.submit(jsonl(*(chat_line(number) for number in range(12))))
            await here.reached(batch_id, "in_progress")
            await has_looked(here, batch_id)
            assert await counts(here, batch_id) == (0, 0)
            here.open.clear()
            serving = asyncio.create_task(here.serve(site))
            directory.apply_standings({})
            await asked_at_least(here, 1)
            await has_looked(here, batch_id)
            assert len(here.scene.gateway.live_queries) == 5, "as many as its slots and a quarter"
            here.open.set()
            done = await here.ended(batch_id)
            assert (done.status, done.request_counts.completed) == ("completed", 12)
            serving.cancel()

    asyncio.run(main())


def test_lines_of_a_key_that_may_use_no_region_of_the_model_are_refused(url: str) -> None:
    async def main() -> None:
        async with replica(url, caller=limited_to("nowhere")) as here:
            done = await here.ended(await here.submit(jsonl(chat_line(0), chat_line(1))))
            lines = await here.lines(done.error_file_id)
            assert [line["response"]["status_code"] for line in lines] == [403, 403]
            assert here.asked == []

    asyncio.run(main())


@pytest.mark.parametrize("name", ["ft:m:tenant-1::there", "ft:m:tenant-1::not there"])
def test_a_batch_does_not_tell_whether_another_tenant_has_a_model(url: str, name: str) -> None:
    """Lines for one that is there waited while its site was busy; those for another failed at once."""

    async def main() -> None:
        async with replica(url, sites=("a",), slots=1) as here:
            (site,) = here.scene.sites
            tuned = pb.Model(id="ft:m:tenant-1::there", tenant="tenant-1", context_tokens=1024, parent="m")
            await site.send(models=pb.Models(models=[site.served_model, tuned]))
            await until(lambda: tuned.id in here.scene.gateway.directory.served, "it is served")
            here.open.clear()
            chat = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
            busy = [
                asyncio.create_task(here.raw("POST", "/v1/chat/completions", json=chat)) for _ in range(3)
            ]
            await asked_at_least(here, 1)
            done = await here.ended(await here.submit(jsonl(chat_line(0, model=name)), key="two"), key="two")
            (line,) = await here.lines(done.error_file_id, key="two")
            assert line["response"]["status_code"] == 404
            here.open.set()
            await asyncio.gather(*busy)

    asyncio.run(main())


def test_a_batch_whose_key_is_revoked_ends_though_its_sites_are_away(url: str) -> None:
    keys = dict(CALLERS_BY_ID)

    async def main() -> None:
        async with replica(url, sites=(), caller=keys.get) as here:
            batch_id = await here.submit(jsonl(chat_line(0), chat_line(1)))
            await here.reached(batch_id, "in_progress")
            del keys["key-1"]
            lines = await here.lines((await here.ended(batch_id)).error_file_id)
            assert [line["response"]["status_code"] for line in lines] == [401, 401]

    asyncio.run(main())


def test_a_batch_waits_for_sites_that_have_answered_it_though_its_gateway_has_not_met_them(
    url: str,
) -> None:
    """A gateway that starts while they are away knows of no site with the model: its lines do not fail."""

    async def main() -> None:
        async with replica(url, name="r1") as first:
            first.open.clear()
            batch_id = await first.submit(jsonl(*(chat_line(number) for number in range(100))))
            await asked_at_least(first, 2)
            first.open.set()
            await asked_at_least(first, 6)
            first.open.clear()
            assert 0 < await until_two_are_held(first, batch_id) < 98
            await first.die()
        async with replica(url, name="r2", sites=()) as second:
            await second.scene.site("z", model="other")
            await until(lambda: batch_id in second.batches.runner._jobs, "the batch is taken over")
            await has_looked(second, batch_id)
            assert (await counts(second, batch_id))[1] == 0
            serving = asyncio.create_task(second.serve(await second.scene.site("a")))
            done = await second.ended(batch_id)
            assert (done.status, done.request_counts.completed) == ("completed", 100)
            serving.cancel()

    asyncio.run(main())


def test_a_line_waits_for_a_site_by_time_however_often_it_has_run(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.job.BACKOFF_S", 0.0001)
    waits, wait = list[int](), Job._on_no_site

    def counted(self: Job, line: Line, query_id: str, exc: NoSite) -> Any:
        waits.append(line.runs)
        return wait(self, line, query_id, exc)

    monkeypatch.setattr(Job, "_on_no_site", counted)

    async def main() -> None:
        async with replica(url, features=("chat", "resume")) as here:
            await (await here.scene.site("c")).close()
            await until(lambda: here.scene.gateway.directory.site("c").state is SiteState.DOWN)  # type: ignore[union-attr]
            batch_id = await here.submit(jsonl(chat_line(0, logprobs=True)))
            await until(lambda: len(waits) > 80)
            assert await counts(here, batch_id) == (0, 0)
            monkeypatch.setattr("gateway.batches.job.MAX_AWAY_S", 0.0)
            done = await here.ended(batch_id)
            assert done.request_counts.failed == 1

    asyncio.run(main())


@pytest.mark.parametrize(
    ("is_known", "asked"),
    [(True, {"logprobs": True}), (False, {"logprobs": True}), (False, {"max_tokens": 1025})],
    ids=["down", "not met yet", "longer and not met yet"],
)
def test_lines_wait_for_the_site_that_has_what_they_need(
    url: str, monkeypatch: pytest.MonkeyPatch, is_known: bool, asked: dict[str, Any]
) -> None:
    """Another that lacks it is no reason to refuse them while the one that has it restarts, or has not joined
    a gateway that has just started.
    """
    monkeypatch.setattr("gateway.batches.job.BACKOFF_S", 0.01)

    async def main() -> None:
        async with replica(url, features=("chat", "resume")) as here:
            gateway = here.scene.gateway
            if is_known:
                await (await here.scene.site("c", context_tokens=4096)).close()
                await until(lambda: gateway.directory.site("c").state is SiteState.DOWN)  # type: ignore[union-attr]
            else:
                gateway.fleet_complete_s = math.inf
            lines = [chat_line(0, **asked), *(chat_line(number) for number in range(1, 9))]
            batch_id = await here.submit(jsonl(*lines))
            await here.reached(batch_id, "in_progress")
            await until(lambda: len(here.asked) == 8, "the others run")
            await has_looked(here, batch_id)
            assert await counts(here, batch_id) == (8, 0)
            gateway.fleet_complete_s = -math.inf
            able = await here.scene.site("c", boot_id="again", context_tokens=2048)
            serving = asyncio.create_task(here.serve(able))
            done = await here.ended(batch_id)
            assert (done.status, done.request_counts.completed) == ("completed", 9)
            serving.cancel()

    asyncio.run(main())
