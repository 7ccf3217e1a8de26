"""Which jobs are paused, which a replica holds, and which wait for a site."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from gateway.quotas.limits import Kind, LimitId, Scope
from gateway.tuning.values import TuningLimits
from tests.support.batch_replica import Replica, replica
from tests.support.training_site import TRAINS, next_run, stopped
from tests.support.tuning_jobs import create, reached
from wire import federation_pb2 as pb

LIMITS = TuningLimits(lost_s=60.0, unlinked_s=60.0, replica_jobs=2)


def play(url: str, scenario: Callable[[Replica], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with replica(url, trains=TRAINS, tuning_limits=LIMITS) as here:
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


def test_a_job_that_is_over_when_the_month_is_spent_is_not_paused(url: str) -> None:
    async def scenario(here: Replica) -> None:
        here.scene.gateway.quotas.set_limits({LimitId(Scope.TENANT, "tenant-1", Kind.MONTH): 250})
        for end, status in ((pb.Training.SUCCEEDED, "succeeded"), (pb.Training.FAILED, "failed")):
            job = await create(here)
            run = await next_run(here)
            await run.store(pb.StoreBegin.ADAPTER, 6, b"adapter")
            await run.report(6, end=end)
            await reached(here, job.id, status)

    play(url, scenario)
