"""Which jobs are paused, which a replica holds, and which wait for a site."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from gateway.quotas.limits import Kind, LimitId, Scope
from gateway.store.database import open_engine
from gateway.tuning.ledger import Ledger
from gateway.tuning.values import Job, TuningLimits
from tests.support.batch_replica import POLL_S, Replica, replica
from tests.support.fakes.federation import until
from tests.support.training_site import TRAINS, next_run, stopped
from tests.support.tuning_jobs import JOBS, create, reached, recorded
from wire import federation_pb2 as pb

MONTH = LimitId(Scope.TENANT, "tenant-1", Kind.MONTH)
LIMITS = TuningLimits(lost_s=60.0, unlinked_s=60.0, replica_jobs=2)


def play(
    url: str, scenario: Callable[[Replica], Coroutine[Any, Any, None]], limits: TuningLimits = LIMITS
) -> None:
    async def main() -> None:
        async with replica(url, trains=TRAINS, tuning_limits=limits) as here:
            await scenario(here)

    asyncio.run(main())


def test_paused_jobs_keep_no_place_of_those_that_train(url: str) -> None:
    async def scenario(here: Replica) -> None:
        for _ in range(2):
            job = await create(here)
            run = await next_run(here)
            await here.sdk().fine_tuning.jobs.pause(job.id)
            await stopped(here, run, snapshot=True)
            await run.report(0, end=pb.Training.STOPPED)
            await stopped(here, run, snapshot=False)
        last = await create(here)
        await (await next_run(here)).succeed()
        await reached(here, last.id, "succeeded")
        await here.sdk().fine_tuning.jobs.resume(job.id)
        assert (await next_run(here)).order.job_id == job.id

    play(url, scenario)


def test_jobs_of_a_model_that_no_site_has_keep_no_place_of_those_that_can_train(url: str) -> None:
    async def scenario(here: Replica) -> None:
        first = await create(here)
        await (await next_run(here)).succeed()
        await reached(here, first.id, "succeeded")
        for name in ("ftjob-gone-1", "ftjob-gone-2"):
            await create_for(url, "gone", name, like=first.id)
            await newest_event_says(here, name, "No site has room")
        last = await create(here)
        await (await next_run(here)).succeed()
        await reached(here, last.id, "succeeded")
        assert (await here.sdk().fine_tuning.jobs.retrieve("ftjob-gone-1")).status == "queued"

    play(url, scenario)


def test_a_job_goes_to_a_replica_that_has_a_site_for_it(url: str) -> None:
    limits = replace(LIMITS, unlinked_s=0.2)
    patient = partial(replica, url, trains=TRAINS, tuning_limits=limits, lease_s=3.0)

    async def main() -> None:
        async with patient(sites=("a",)) as first:
            job = await create(first)
            await (await next_run(first)).site.close()
            await newest_event_says(first, job.id, "No site has room")
            async with patient(name="r2", sites=("b",)) as other:
                run = await next_run(other)
                assert run.order.job_id == job.id
                await run.succeed()
                await reached(first, job.id, "succeeded")

    asyncio.run(main())


async def create_for(url: str, model: str, name: str, like: str) -> None:
    """Create a job of a model that no site serves, which once was served, with another job's file and key."""
    engine = open_engine(url)
    try:
        ledger = Ledger(engine, "another", time.time, LIMITS)
        job = await ledger.get("tenant-1", like)
        assert job is not None
        await ledger.create(
            Job(name, job.tenant, job.key_id, model, job.training_file_id, time.time(), job.plan)
        )
    finally:
        await engine.dispose()


def test_a_job_that_is_over_when_the_month_is_spent_is_not_paused(url: str) -> None:
    async def scenario(here: Replica) -> None:
        quotas = here.scene.gateway.quotas
        for end, status in ((pb.Training.SUCCEEDED, "succeeded"), (pb.Training.FAILED, "failed")):
            quotas.set_limits({})
            quotas.set_limits({MONTH: 250})
            job = await create(here)
            run = await next_run(here)
            await run.store(pb.StoreBegin.ADAPTER, 6, b"adapter")
            await run.report(6, end=end)
            await reached(here, job.id, status)

    play(url, scenario)


def test_a_job_that_is_paused_when_its_run_is_over_is_over(url: str) -> None:
    async def scenario(here: Replica) -> None:
        jobs = here.sdk().fine_tuning.jobs
        for resumed in (False, True):
            for end, status in ((pb.Training.SUCCEEDED, "succeeded"), (pb.Training.FAILED, "failed")):
                job = await create(here)
                run = await next_run(here)
                await run.store(pb.StoreBegin.ADAPTER, 6, b"adapter")
                await jobs.pause(job.id)
                await stopped(here, run, snapshot=True)
                if resumed:
                    await jobs.resume(job.id)
                await run.report(6, end=end)
                assert (await reached(here, job.id, status)).trained_tokens == 600
                await stopped(here, run, snapshot=False)

    play(url, scenario)


def test_a_job_that_is_resumed_while_the_month_is_spent_begins_no_run(url: str) -> None:
    async def scenario(here: Replica) -> None:
        quotas, jobs = here.scene.gateway.quotas, here.sdk().fine_tuning.jobs
        quotas.set_limits({MONTH: 250})
        job = await create(here)
        run = await next_run(here)
        await run.report(3)  # 300 tokens
        await stopped(here, run, snapshot=True)
        await run.report(3, end=pb.Training.STOPPED)
        await stopped(here, run, snapshot=False)
        for _ in range(2):
            await jobs.resume(job.id)
            await newest_event_says(here, job.id, "Paused: the quota of 250 tokens per month")
            state = (await here.raw("GET", f"{JOBS}/{job.id}")).json()["mico"]
            assert (state["paused"], state["site"]) == (True, None)
        quotas.set_limits({MONTH: 1_000})
        await jobs.resume(job.id)
        assert (await next_run(here)).order.job_id == job.id

    play(url, scenario)


def test_a_job_goes_on_with_the_base_that_it_began_with(url: str) -> None:
    async def scenario(here: Replica) -> None:
        job = await create(here)
        run = await next_run(here)
        other = run.site
        await run.report(0, end=pb.Training.GIVEN_UP, revision="rev-0")
        run = await next_run(here)
        assert run.order.revision == "", "without a step it has begun with no base"
        site = run.site
        await run.report(2)
        await recorded(here, job.id, 2)
        other.revision = "rev-2"
        await other.send(models=pb.Models(models=[other.served_model]))
        await until(lambda: revision_at(here, other.name) == "rev-2", "another base")
        await run.report(2, end=pb.Training.GIVEN_UP, revision="rev-2")
        run = await next_run(here)
        assert (run.site, run.order.revision) == (site, "rev-1")
        await site.close()
        await newest_event_says(here, job.id, "No site has room")
        orders = [here.orders.get_nowait()[1] for _ in range(here.orders.qsize())]
        assert not any(each.HasField("train") for each in orders)

    play(url, scenario, limits=replace(LIMITS, unlinked_s=0.2))


def revision_at(here: Replica, name: str) -> str:
    sites = here.scene.gateway.directory.sites
    return next(site.identity.models["m"].revision for site in sites if site.name == name)


async def newest_event_says(here: Replica, job_id: str, text: str) -> None:
    """Wait until the newest event says so."""
    async with asyncio.timeout(60):
        while True:
            (newest,) = (await here.sdk().fine_tuning.jobs.list_events(job_id, limit=1)).data
            if text in newest.message:
                return
            await asyncio.sleep(POLL_S)
