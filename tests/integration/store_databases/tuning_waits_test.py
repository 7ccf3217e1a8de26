"""How long a job of fine-tuning waits for a site, whichever replica looks after it."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from gateway.batches.values import DAY_S, HOUR_S
from gateway.tuning.ledger import Ledger
from gateway.tuning.runner import Runner
from gateway.tuning.values import Job, TuningLimits
from tests.support.batch_replica import POLL_S, Replica, replica
from tests.support.fakes.federation import until
from tests.support.training_site import TRAINS, next_run
from tests.support.tuning_jobs import create, reached

LIMITS = TuningLimits(lost_s=60.0, unlinked_s=0.1)


async def waits(here: Replica, job_id: str, times: int) -> None:
    """Wait until the events of a job say so many times that it waits for a site."""
    async with asyncio.timeout(60):
        while True:
            listed = await here.sdk().fine_tuning.jobs.list_events(job_id, limit=100)
            if sum("No site has room" in each.message for each in listed.data) == times:
                return
            await asyncio.sleep(POLL_S)


async def begin(here: Replica) -> str:
    """Create a job whose site goes away."""
    job = await create(here)
    await (await next_run(here)).site.close()
    await waits(here, job.id, 1)
    return job.id


def test_a_jobs_wait_for_a_site_goes_on_when_its_gateway_is_restarted(url: str) -> None:
    async def main() -> None:
        async with replica(url, sites=("a",), trains=TRAINS, tuning_limits=LIMITS) as first:
            job_id = await begin(first)
        async with replica(url, name="r2", sites=(), tuning_limits=LIMITS) as second:
            second.pass_time(DAY_S + HOUR_S)
            failed = await reached(second, job_id, "failed")
            assert failed.error is not None and failed.error.code == "no_site"
            await waits(second, job_id, 1)

    asyncio.run(main())


def test_a_job_that_was_paused_waits_for_a_site_anew(url: str) -> None:
    async def main() -> None:
        async with replica(url, sites=("a",), trains=TRAINS, tuning_limits=LIMITS) as here:
            job_id = await begin(here)
            jobs = here.sdk().fine_tuning.jobs
            for paused, hours in enumerate((30, 40), 1):
                await jobs.pause(job_id)
                here.pass_time(hours * HOUR_S)
                await jobs.resume(job_id)
                await waits(here, job_id, 1 + paused)
            assert (await jobs.retrieve(job_id)).status == "queued"
            here.pass_time(DAY_S + HOUR_S)
            await reached(here, job_id, "failed")

    asyncio.run(main())


def test_a_job_that_is_paused_meanwhile_is_not_said_to_wait(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with replica(url, sites=("a",), trains=TRAINS, tuning_limits=LIMITS) as here:
            job_id = await begin(here)
            read, looks = Ledger.lease, 0

            async def lease(self: Ledger, *asked: Any) -> list[Job]:
                nonlocal looks
                found = await read(self, *asked)
                looks += 1
                if looks == 1:
                    assert await self.pause("tenant-1", job_id)
                    here.pass_time(DAY_S + HOUR_S)
                return found

            monkeypatch.setattr(Ledger, "lease", lease)
            await until(lambda: looks > 3, "some looks at the job")
            await waits(here, job_id, 1)

    asyncio.run(main())


def test_the_runs_of_sites_are_read_once_for_all_jobs_that_wait(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called, read, turn = Counter[str](), Ledger.runs, Runner.turn

    async def runs(self: Ledger) -> dict[str, int]:
        called["runs"] += 1
        return await read(self)

    async def turn_once(self: Runner) -> None:
        called["turns"] += 1
        await turn(self)

    monkeypatch.setattr(Ledger, "runs", runs)
    monkeypatch.setattr(Runner, "turn", turn_once)

    async def main() -> None:
        async with replica(url, sites=("a",), trains=TRAINS, tuning_limits=LIMITS) as here:
            await create(here)
            await next_run(here)
            for _ in range(3):
                await waits(here, (await create(here)).id, 1)
            called.clear()
            await until(lambda: called["turns"] > 5, "some turns")
            assert 0 < called["runs"] <= called["turns"] + 1

    asyncio.run(main())
