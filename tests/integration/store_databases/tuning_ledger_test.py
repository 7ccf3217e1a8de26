"""The ledger of fine-tuning: leases, fences, one end, events, what is kept of snapshots and checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.batches.files import FileInUse, Files, Page
from gateway.store.database import open_engine
from gateway.store.tables import tuning_jobs, usage
from gateway.tuning.contents import Contents
from gateway.tuning.events import Events, event_id
from gateway.tuning.ledger import Ledger, Progress, TooManyJobs, UnknownFile, new_run
from gateway.tuning.values import (
    Content,
    Job,
    JobError,
    JobStatus,
    Kind,
    Plan,
    StepFigures,
    TuningLimits,
)

LIMITS = TuningLimits(tenant_jobs=2, events=6, checkpoints=2)
PAGE = Page(50, newest_first=False)


@dataclass
class Books:
    """Ledgers of two replicas over one database, whose clock a test moves."""

    engine: AsyncEngine
    files: Files
    one: Ledger
    two: Ledger
    now: list[float]

    @property
    def contents(self) -> Contents:
        return Contents(self.engine, LIMITS.checkpoints)

    async def upload(self, tenant: str = "t", purpose: str = "fine-tune") -> str:
        writer = await self.files.begin(tenant)
        await writer.write(b"{}\n")
        return (await writer.finish("rows.jsonl", purpose, 1_000.0)).id

    async def create(self, name: str = "ftjob-1", tenant: str = "t") -> Job:
        job = Job(name, tenant, "key", "m", await self.upload(tenant), self.now[0], Plan(seed=7))
        await self.one.create(job)
        return job

    async def get(self, job: Job) -> Job:
        found = await self.one.get(job.tenant, job.id)
        assert found is not None
        return found

    async def running(self, name: str = "ftjob-1") -> Job:
        """Return a job that runs at site "a" and is held by `one`."""
        job = await self.create(name)
        await self.one.lease(9)
        data = Content(job.id, Kind.DATA, 0, "d" * 64, 3, job.training_file_id, 0.0)
        assert await self.one.validated(job, 32, [data])
        assert await self.one.start(await self.get(job), new_run(), "a")
        return await self.get(job)

    async def lapse(self) -> None:
        """Let every lease run out. Of Postgres it is the database's own clock that says so."""
        async with self.engine.begin() as connection:
            await connection.execute(update(tuning_jobs).values(leased_until=1.0))

    async def messages(self, job: Job) -> list[str]:
        events = Events(self.engine, lambda: 0.0, LIMITS.events)
        return [each.message for each in await events.list_page(job.id, PAGE)]

    async def usage(self) -> list[Any]:
        async with self.engine.connect() as connection:
            return list(await connection.execute(select(usage)))


@asynccontextmanager
async def books(url: str) -> AsyncIterator[Books]:
    engine, now = open_engine(url), [1_000.0]

    def ledger(owner: str) -> Ledger:
        return Ledger(engine, owner, lambda: now[0], LIMITS, lease_s=10.0)

    try:
        yield Books(engine, Files(engine, lambda: now[0]), ledger("one"), ledger("two"), now)
    finally:
        await engine.dispose()


def play(url: str, scenario: Callable[[Books], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with books(url) as here:
            await scenario(here)

    asyncio.run(main())


def progress(step: int, tokens: int = 0, *figures: StepFigures) -> Progress:
    return Progress(step, 6, tokens, 2 * tokens, 50.0, "r1", figures)


def test_a_job_is_stored_as_it_was_made(url: str) -> None:
    async def scenario(here: Books) -> None:
        job = await here.create()
        assert await here.get(job) == job
        assert await here.one.get("another", job.id) is None
        with pytest.raises(UnknownFile) as unknown:
            await here.one.create(replace(job, id="ftjob-2", training_file_id=await here.upload("u")))
        assert unknown.value.param == "training_file"
        with pytest.raises(UnknownFile) as unknown:
            await here.one.create(
                replace(job, id="ftjob-2", validation_file_id=await here.upload(purpose="batch"))
            )
        assert unknown.value.param == "validation_file"
        await here.create("ftjob-2")
        with pytest.raises(TooManyJobs):
            await here.create("ftjob-3")
        await here.create("ftjob-4", "another")
        assert await here.one.runs() == {}
        assert [each.id for each in await here.one.list_page("t", PAGE)] == ["ftjob-1", "ftjob-2"]

    play(url, scenario)


def test_jobs_that_may_get_models_count_as_those_that_have_them(url: str) -> None:
    """Jobs that were created together passed the limit of models."""

    async def scenario(here: Books) -> None:
        few = replace(LIMITS, tenant_jobs=9, tenant_models=2)
        here.one = Ledger(here.engine, "few", lambda: here.now[0], few)
        job = await here.running()
        assert job.run is not None
        assert await here.contents.add(content(job, Kind.ADAPTER, 3, "a3"), job.run) == []
        second = await here.create("ftjob-2")
        with pytest.raises(TooManyJobs, match="2 jobs have models"):
            await here.create("ftjob-3")
        assert await here.one.cancel("t", second.id)
        assert await here.one.end(job, JobStatus.SUCCEEDED, "done")
        await here.create("ftjob-3")
        with pytest.raises(TooManyJobs, match="2 jobs have models"):
            await here.create("ftjob-4")

    play(url, scenario)


def test_only_the_holder_of_the_lease_and_the_current_run_count(url: str) -> None:
    async def scenario(here: Books) -> None:
        job = await here.running()
        assert await here.two.lease(9) == []
        assert not await here.two.advance(job, progress(1))
        assert not await here.one.advance(replace(job, run="another"), progress(1))
        assert await here.one.advance(job, progress(1, 10))
        await here.lapse()
        assert [each.id for each in await here.two.lease(9)] == [job.id]
        assert not await here.one.advance(job, progress(2))
        assert not await here.one.end(job, JobStatus.SUCCEEDED, "done")
        taken = await here.get(job)
        assert (taken.step, taken.trained_tokens, taken.revision, taken.run) == (1, 10, "r1", job.run)
        assert await here.two.leave_run(taken, "the site was lost")
        assert not await here.two.advance(taken, progress(3))
        left = await here.get(job)
        assert (left.status, left.run, left.site) == (JobStatus.QUEUED, None, "a")
        assert await here.two.start(left, "second", "b")
        assert not await here.two.start(left, "third", "c")
        assert await here.two.current_run(job.id) == "second"

    play(url, scenario)


def test_a_job_ends_once_whatever_comes_first(url: str) -> None:
    async def scenario(here: Books) -> None:
        for number, order in enumerate(permutations(("succeed", "fail", "cancel"))):
            job = await here.running(f"ftjob-{number}")
            await here.one.advance(job, progress(6, 100))

            def turn(what: str, job: Job = job) -> Coroutine[Any, Any, bool]:
                if what == "cancel":
                    return here.two.cancel(job.tenant, job.id)
                if what == "fail":
                    return here.one.end(
                        job, JobStatus.FAILED, "it broke", error=JobError("diverged", "it broke")
                    )
                return here.one.end(job, JobStatus.SUCCEEDED, "done")

            assert [await turn(what) for what in order] == [True, False, False]
            ended = await here.get(job)
            statuses = {"succeed": "succeeded", "fail": "failed", "cancel": "cancelled"}
            assert (ended.status, ended.finished_at) == (statuses[order[0]], 1_000.0)
            assert (ended.error is not None) is (order[0] == "fail")
            assert await here.one.current_run(job.id) is None
            rows = [row for row in await here.usage() if row.query_id == job.id]
            assert [(row.model, row.prompt_tokens, row.nano_usd) for row in rows] == [
                ("m (training)", 100, 200)
            ]

    play(url, scenario)


def test_ends_at_the_same_time_are_one(url: str) -> None:
    async def scenario(here: Books) -> None:
        job = await here.running()
        ends = [here.one.end(job, JobStatus.SUCCEEDED, "done") for _ in range(3)]
        cancels = [here.two.cancel(job.tenant, job.id) for _ in range(3)]
        assert sum(await asyncio.gather(*ends, *cancels)) == 1
        assert await here.usage() == []  # nothing was trained

    play(url, scenario)


def test_a_job_pauses_keeps_its_run_until_that_stopped_and_goes_on(url: str) -> None:
    async def scenario(here: Books) -> None:
        job = await here.running()
        assert not await here.one.resume(job.tenant, job.id)
        assert await here.two.pause(job.tenant, job.id)
        assert not await here.two.pause(job.tenant, job.id)
        assert await here.one.current_run(job.id) == job.run  # its last snapshot counts
        assert await here.one.leave_run(job)
        paused = await here.get(job)
        assert (paused.status, paused.run) == (JobStatus.PAUSED, None)
        assert await here.two.resume(job.tenant, job.id)
        assert (await here.get(job)).status is JobStatus.QUEUED

    play(url, scenario)


def test_a_job_that_pauses_while_its_files_are_checked_has_them_checked_when_it_is_resumed(url: str) -> None:
    async def scenario(here: Books) -> None:
        job = await here.create()
        data = Content(job.id, Kind.DATA, 0, "d" * 64, 3, job.training_file_id, 0.0)
        await here.one.lease(9)
        assert await here.two.pause(job.tenant, job.id)
        assert not await here.one.validated(job, 32, [data])
        assert await here.two.resume(job.tenant, job.id)
        assert (await here.get(job)).status is JobStatus.VALIDATING
        assert await here.one.validated(job, 32, [data])
        assert await here.two.pause(job.tenant, job.id)
        assert await here.two.resume(job.tenant, job.id)
        assert (await here.get(job)).status is JobStatus.QUEUED

    play(url, scenario)


def test_events_are_numbered_and_the_newest_are_kept(url: str) -> None:
    async def scenario(here: Books) -> None:
        job = await here.running()
        steps = [StepFigures(step, 2.0 / step, 0.5) for step in range(1, 6)]
        assert await here.one.advance(job, progress(5, 9, *steps, StepFigures(6, 0.25, 0.75, 0.5)))
        events = Events(here.engine, lambda: 0.0, LIMITS.events)
        listed = await events.list_page(job.id, PAGE)
        assert [each.number for each in listed] == [4, 5, 6, 7, 8, 9]
        assert listed[-1].data == {
            "step": 6,
            "total_steps": 6,
            "train_loss": 0.25,
            "train_mean_token_accuracy": 0.75,
            "valid_loss": 0.5,
        }
        page = await events.list_page(job.id, Page(2, True, event_id(job.id, 6)))
        assert [each.number for each in page] == [5, 4]
        with pytest.raises(LookupError):
            await events.list_page(job.id, Page(2, True, "ftevent-2-1"))

    play(url, scenario)


def content(job: Job, kind: Kind, step: int, file_id: str) -> Content:
    return Content(job.id, kind, step, f"{kind}{step}", 3, file_id, 0.0)


def test_a_newer_snapshot_replaces_the_older_and_checkpoints_are_bounded(url: str) -> None:
    async def scenario(here: Books) -> None:
        job = await here.running()
        assert job.run is not None
        add = here.contents.add
        assert await add(content(job, Kind.SNAPSHOT, 1, "s1"), job.run) == []
        assert await add(content(job, Kind.SNAPSHOT, 2, "s2"), "a stale run") is None
        assert await add(content(job, Kind.SNAPSHOT, 2, "s2"), job.run) == ["s1"]
        assert await add(content(job, Kind.SNAPSHOT, 2, "again"), job.run) == ["s2"]
        gone = [await add(content(job, Kind.CHECKPOINT, step, f"c{step}"), job.run) for step in (1, 2, 3)]
        assert gone == [[], [], ["c1"]]
        assert await add(content(job, Kind.ADAPTER, 3, "a3"), job.run) == []
        models = await here.contents.models("t")
        assert [each.file_id for _, each in models] == ["c2", "c3"]  # not what may still change
        assert (await here.contents.tuned(), await here.contents.unfinished()) == ([], [job.tuned_model])
        assert await here.one.end(job, JobStatus.SUCCEEDED, "done")
        assert await add(content(job, Kind.ADAPTER, 3, "late"), job.run) is None
        models = await here.contents.models("t")
        assert {each.file_id for _, each in models} == {"c2", "c3", "a3"}
        assert await here.contents.unfinished() == []
        names = [job.tuned_model + f":ckpt-step-{step}" for step in (2, 3)] + [job.tuned_model]
        tuned = await here.contents.tuned()
        assert sorted(each.name for each in tuned) == sorted(names)
        by_digest = {each.sha256: (each.name, each.tenant, each.base, each.bytes) for each in tuned}
        assert by_digest["adapter3"] == (job.tuned_model, "t", "m", 3)
        leftovers = await here.contents.find_leftovers(9, checkpoints_before=0.0)
        assert {each.kind for each in leftovers} == {Kind.DATA, Kind.SNAPSHOT}
        leftovers = await here.contents.find_leftovers(9, checkpoints_before=here.now[0] + 1.0)
        assert {each.kind for each in leftovers} == {Kind.DATA, Kind.SNAPSHOT, Kind.CHECKPOINT}

    play(url, scenario)


def test_a_file_stays_while_a_job_reads_it(url: str) -> None:
    async def scenario(here: Books) -> None:
        job = await here.create()
        with pytest.raises(FileInUse):
            await here.files.delete("t", job.training_file_id)
        here.now[0] += 2_000.0
        assert await here.files.find_expired(9) == []
        await here.one.cancel("t", job.id)
        assert await here.files.find_expired(9) == [job.training_file_id]
        assert await here.files.delete("t", job.training_file_id)

    play(url, scenario)


def test_jobs_that_ended_long_ago_are_removed_with_their_events(url: str) -> None:
    async def scenario(here: Books) -> None:
        job = await here.create()
        here.now[0] += 10 * LIMITS.kept_s
        assert await here.one.remove_expired(9) == 0
        await here.one.cancel("t", job.id)
        assert await here.one.remove_expired(9) == 1
        assert await here.one.get("t", job.id) is None
        assert await here.messages(job) == []

    play(url, scenario)
