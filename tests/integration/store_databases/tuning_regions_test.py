"""A job, its data and its adapter keep to the regions of the key that created it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

import pytest

from gateway.domain import Caller
from gateway.tuning.values import TuningLimits
from tests.integration.store_databases.tuning_waits_test import waits
from tests.support import batch_replica
from tests.support.batch_replica import Replica, replica
from tests.support.training_site import TRAINS, next_run, ordered
from tests.support.tuning_jobs import JOBS, create, reached, rows, upload

LIMITS = TuningLimits(lost_s=60.0, unlinked_s=60.0)


@pytest.fixture(autouse=True)
def _key_of_a_region(monkeypatch: pytest.MonkeyPatch) -> None:
    caller = Caller("key-eu", "tenant-1", regions=frozenset({"eu"}))
    monkeypatch.setitem(batch_replica.CALLERS, "eu", caller)
    monkeypatch.setitem(batch_replica.CALLERS_BY_ID, "key-eu", caller)


def play(
    url: str,
    scenario: Callable[[Replica], Coroutine[Any, Any, None]],
    regions: Mapping[str, str],
    limits: TuningLimits = LIMITS,
) -> None:
    async def main() -> None:
        sites = tuple(regions)
        async with replica(url, trains=TRAINS, tuning_limits=limits, sites=sites, regions=regions) as here:
            await scenario(here)

    asyncio.run(main())


def test_a_job_of_a_model_elsewhere_is_refused_as_a_chat_is(url: str) -> None:
    async def scenario(here: Replica) -> None:
        chat = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
        job = {"model": "m", "training_file": await upload(here, rows(), "eu")}
        refused = await here.raw("POST", "/v1/chat/completions", "eu", json=chat)
        assert refused.status_code == 403
        asked = await here.raw("POST", JOBS, "eu", json=job)
        assert (asked.status_code, asked.json()) == (403, refused.json())
        assert (await here.raw("GET", JOBS)).json()["data"] == []

    play(url, scenario, {"a": "us"})


def test_jobs_wait_for_a_site_of_their_region_though_another_is_idle(url: str) -> None:
    async def scenario(here: Replica) -> None:
        await create(here, key="eu")
        assert (await next_run(here)).site.name == "b"
        waiting = await create(here, key="eu")
        await waits(here, waiting.id, 1)
        assert (await here.sdk().fine_tuning.jobs.retrieve(waiting.id)).status == "queued"
        free = await create(here)
        run = await next_run(here)
        assert (run.order.job_id, run.site.name) == (free.id, "a")

    play(url, scenario, {"a": "us", "b": "eu"})


def test_a_run_without_time_stays_in_its_region(url: str) -> None:
    async def scenario(here: Replica) -> None:
        await create(here, key="eu")
        run = await next_run(here)
        assert run.site.name == "b"
        for _ in range(100):
            await run.site.report(running=3)
            await run.report(1)
            await asyncio.sleep(0.01)
        assert here.orders.empty(), "it was not asked to stop"

    play(url, scenario, {"a": "us", "b": "eu"}, limits=replace(LIMITS, starved_s=0.3))


def test_an_adapter_is_fetched_in_the_regions_of_its_key(url: str) -> None:
    async def scenario(here: Replica) -> None:
        job = await create(here, key="eu")
        await (await next_run(here)).succeed()
        await reached(here, job.id, "succeeded")
        site, order = await ordered(here, "order")
        assert (order.kind, site.name) == ("add", "b")

    play(url, scenario, {"a": "us", "b": "eu", "c": "us", "d": "us"})
