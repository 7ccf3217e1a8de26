"""Content of jobs that share a database: of the same digest, and stored at the same time."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from gateway.batches.files import Files
from gateway.federation.bulk import CHUNK_BYTES
from gateway.tuning import storing
from gateway.tuning.values import Kind, TuningLimits
from tests.support.batch_replica import Replica, replica
from tests.support.fakes.federation import DEADLINE_S, until
from tests.support.training_site import TRAINS, next_run
from tests.support.tuning_jobs import create, rows
from wire import federation_pb2 as pb


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


def test_an_upload_is_whole_though_many_others_come_meanwhile(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storing, "MAX_UPLOADS", 1)

    async def scenario(here: Replica) -> None:
        jobs = [await create(here) for _ in range(2)]
        one, other = [await next_run(here) for _ in jobs]
        data = bytes(3 * CHUNK_BYTES)
        content = pb.Content(sha256=hashlib.sha256(data).digest(), bytes=len(data))
        call = one.site.bulk.Store(metadata=one.site.metadata)
        begin = pb.StoreBegin(
            job_id=one.order.job_id, run=one.order.run, kind=pb.StoreBegin.SNAPSHOT, step=1, content=content
        )
        await call.write(pb.StoreRequest(begin=begin))
        await call.read()
        half = 2 * CHUNK_BYTES
        for part in (data[:half], data[half : half + 1]):
            await call.write(pb.StoreRequest(data=part))
        bulk: Any = here.scene.gateway.federation.bulk
        (upload,) = bulk._uploads.values()
        await until(lambda: upload.offset > half, "more is in the database than one buffer")
        await other.store(pb.StoreBegin.SNAPSHOT, 1, b"of another")
        await call.write(pb.StoreRequest(data=data[half + 1 :]))
        await call.done_writing()
        while not (await asyncio.wait_for(call.read(), DEADLINE_S)).done:
            pass
        assert await one.fetch(content) == data

    play(url, scenario)


def test_what_is_recorded_stays_where_what_it_replaces_cannot_be_removed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, real = list[str](), Files.remove

    async def remove(files: Files, file_id: str) -> None:
        if not failed:  # the first is what the content replaces
            failed.append(file_id)
            raise OperationalError("", {}, OSError("the database went away"))
        await real(files, file_id)

    async def scenario(here: Replica) -> None:
        await create(here)
        run = await next_run(here)
        await run.store(pb.StoreBegin.SNAPSHOT, 1, b"before")
        monkeypatch.setattr(Files, "remove", remove)
        newer = pb.Content(sha256=hashlib.sha256(b"newer").digest(), bytes=5)
        assert (await run.store(pb.StoreBegin.SNAPSHOT, 2, b"newer"))[-1].done
        assert await run.fetch(newer) == b"newer"
        here.pass_time(1.0)
        assert await here.batches.files.find_expired(9) == failed
        (kept,) = await here.tuning.service.contents.of_job(run.order.job_id, Kind.SNAPSHOT)
        assert await here.tuning.service.contents.remove(kept)  # and then the replica dies
        assert set(await here.batches.files.find_expired(9)) == {*failed, kept.file_id}

    play(url, scenario)
