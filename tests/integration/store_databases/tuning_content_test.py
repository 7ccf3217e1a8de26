"""Content of jobs that share a database: of the same digest, and stored at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from gateway.tuning.values import TuningLimits
from tests.support.batch_replica import Replica, replica
from tests.support.training_site import TRAINS, next_run
from tests.support.tuning_jobs import create, rows


def play(url: str, scenario: Callable[[Replica], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        limits = TuningLimits(lost_s=60.0, unlinked_s=60.0)
        async with replica(url, trains=TRAINS, tuning_limits=limits) as here:
            await scenario(here)

    asyncio.run(main())


def test_data_is_read_from_a_file_that_is_there_though_another_job_had_the_same(url: str) -> None:
    async def scenario(here: Replica) -> None:
        files, jobs = here.sdk().files, here.sdk().fine_tuning.jobs
        for _ in range(5):  # whichever row of the digest the database returns first
            job = await create(here)
            await next_run(here)
            await jobs.cancel(job.id)
            await files.delete(job.training_file)
            again = await create(here)
            run = await next_run(here)
            assert await run.fetch(run.order.data) == rows()
            await jobs.cancel(again.id)

    play(url, scenario)
