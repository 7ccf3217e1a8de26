"""Jobs of fine-tuning beside a database of which statements fail: each ends once, with all it has made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import grpc
import pytest
from sqlalchemy import event, select
from sqlalchemy.exc import OperationalError

from gateway.quotas.limits import Kind as QuotaKind
from gateway.quotas.limits import LimitId, Scope
from gateway.store.tables import usage
from gateway.tuning import runner
from gateway.tuning.values import Kind
from tests.support.batch_replica import Replica, replica
from tests.support.fakes.federation import DEADLINE_S, until
from tests.support.training_site import TRAINS, next_run
from tests.support.tuning_jobs import create, reached
from wire import federation_pb2 as pb


@contextmanager
def failing(here: Replica, share: float, seed: int) -> Iterator[None]:
    """Let a share of the statements of fine-tuning fail, in the middle of transactions too."""
    draw, engine = Random(seed), here.tuning.service.ledger._engine.sync_engine

    def fail(*_: Any) -> None:
        if draw.random() < share:
            raise OperationalError("", {}, OSError("the database is away"))

    event.listen(engine, "before_cursor_execute", fail)
    try:
        yield
    finally:
        event.remove(engine, "before_cursor_execute", fail)


async def again_until_done(call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Repeat a call of a site while the gateway says that it is unavailable."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as refused:
                assert refused.code() is grpc.StatusCode.UNAVAILABLE, refused
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(("share", "seed"), [(0.1, 0), (0.3, 2)])
def test_a_job_ends_once_beside_a_database_that_comes_and_goes(url: str, share: float, seed: int) -> None:
    """The run is never moved, its content arrives whole, and it is charged once."""

    async def scenario(here: Replica) -> None:
        job = await create(here)
        run = await next_run(here)
        service = here.tuning.service
        with failing(here, share, seed):
            for step in range(1, 6):
                await run.report(step)
                await again_until_done(
                    lambda step=step: run.store(pb.StoreBegin.SNAPSHOT, step, b"moments" * step)
                )
            await again_until_done(lambda: run.store(pb.StoreBegin.ADAPTER, 6, b"adapter" * 500))
            await run.serve()
            for _ in range(10):  # as a site does until its end is acknowledged
                await run.report(6, end=pb.Training.SUCCEEDED)
                await asyncio.sleep(0.05)
        done = await reached(here, job.id, "succeeded")
        found = await service.ledger.get("tenant-1", job.id)
        assert found is not None
        assert (done.trained_tokens, found.runs) == (600, 1)
        listed = (await here.sdk().fine_tuning.jobs.list_events(job.id, limit=100)).data
        assert sum("succeeded" in each.message for each in listed) == 1
        (adapter,) = await service.contents.of_job(job.id, Kind.ADAPTER)
        content = pb.Content(sha256=bytes.fromhex(adapter.sha256), bytes=adapter.bytes)
        assert await run.fetch(content) == b"adapter" * 500
        async with service.ledger._engine.connect() as connection:
            rows = (await connection.execute(select(usage).where(usage.c.query_id == job.id))).all()
        assert [row.prompt_tokens for row in rows] == [600]

    async def main() -> None:
        async with replica(url, sites=("a",), trains=TRAINS) as here:
            await scenario(here)

    asyncio.run(main())


def test_steps_are_recorded_and_charged_once_though_a_read_after_them_failed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "RECORD_S", 0.0)
    month = LimitId(Scope.TENANT, "tenant-1", QuotaKind.MONTH)

    async def scenario(here: Replica) -> None:
        quotas, ledger = here.scene.gateway.quotas, here.tuning.service.ledger
        quotas.set_limits({month: 10_000})
        job = await create(here)
        run = await next_run(here)
        here.tuning.runner._poll_s = float("inf")  # no poll reads the job meanwhile
        failed = asyncio.Event()

        async def fail(*_: Any) -> None:
            failed.set()
            raise OperationalError("", {}, OSError("the database is away"))

        with monkeypatch.context() as patch:
            patch.setattr(ledger, "get", fail)
            await run.report(2)
            await asyncio.wait_for(failed.wait(), DEADLINE_S)
        await run.report(4)
        await until(lambda: quotas.in_use(month) > 200, "the steps after the failure are charged")
        assert quotas.in_use(month) == 400
        listed = (await here.sdk().fine_tuning.jobs.list_events(job.id, limit=100)).data
        steps = [each.data["step"] for each in listed if each.type == "metrics"]  # type: ignore[index]
        assert steps == [4, 3, 2, 1]

    async def main() -> None:
        async with replica(url, sites=("a",), trains=TRAINS) as here:
            await scenario(here)

    asyncio.run(main())
