"""Runs of training: lost sites, dead replicas, sites that give up, and content that comes in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import grpc
import httpx2
import pytest

from gateway.domain import Caller
from gateway.quotas.limits import Kind as QuotaKind
from gateway.quotas.limits import LimitId, Scope
from gateway.tuning.contents import Contents
from gateway.tuning.values import Job, JobStatus, Kind, TuningLimits
from tests.support.batch_replica import POLL_S, Replica, replica
from tests.support.fakes.edge import error_of
from tests.support.fakes.federation import until
from tests.support.training_site import TRAINS, Run, next_run, ordered, stopped
from tests.support.tuning_jobs import JOBS, create, reached, recorded
from wire import federation_pb2 as pb

LIMITS = TuningLimits(lost_s=60.0, unlinked_s=60.0, runs=3)
IMPATIENT = replace(LIMITS, unlinked_s=0.2)
TENANT = "tenant-1"


def play(
    url: str,
    scenario: Callable[[Replica], Coroutine[Any, Any, None]],
    *,
    sites: tuple[str, ...] = ("a", "b"),
    limits: TuningLimits = LIMITS,
) -> None:
    async def main() -> None:
        async with replica(url, sites=sites, trains=TRAINS, tuning_limits=limits) as here:
            await scenario(here)

    asyncio.run(main())


async def asked(here: Replica, model: str) -> httpx2.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
    return await here.raw("POST", "/v1/chat/completions", json=body)


async def job_of(here: Replica, job_id: str) -> Job:
    found = await here.tuning.service.ledger.get(TENANT, job_id)
    assert found is not None
    return found


def test_a_lost_sites_job_goes_on_elsewhere_from_its_last_snapshot(url: str) -> None:
    async def scenario(here: Replica) -> None:
        job = await create(here)
        run = await next_run(here)
        await run.store(pb.StoreBegin.SNAPSHOT, 2, b"moments" * 20)
        await run.report(3)
        await recorded(here, job.id, 3)
        await run.site.close()
        again = await next_run(here)
        assert again.site.name != run.site.name
        assert again.order.run != run.order.run
        assert await again.fetch(again.order.snapshot) == b"moments" * 20
        await again.report(3, trained_tokens=250)  # it trains steps anew that the first had done
        await again.succeed()
        done = await reached(here, job.id, "succeeded")
        assert done.trained_tokens == 600
        listed = (await here.sdk().fine_tuning.jobs.list_events(job.id, limit=100)).data
        steps = [each.data["step"] for each in listed if each.type == "metrics"]  # type: ignore[index]
        assert steps == [6, 5, 4, 3, 2, 1]  # none twice
        assert any("was lost" in each.message and each.level == "warn" for each in listed)

    play(url, scenario, limits=IMPATIENT)


def test_a_run_without_time_moves_to_an_idler_site_once_and_only_then(url: str) -> None:
    async def scenario(here: Replica) -> None:
        job = await create(here)
        run = await next_run(here)

        asked = asyncio.Event()

        async def stay_busy() -> None:
            while not asked.is_set():
                await run.site.report(running=3)
                await run.report(1)
                await asyncio.sleep(0.01)

        busy = asyncio.create_task(stay_busy())
        await stopped(here, run, snapshot=True)
        asked.set()
        await busy  # to cancel it in the middle of a message would end the link
        await run.store(pb.StoreBegin.SNAPSHOT, 1, b"one step")
        await run.report(1, end=pb.Training.STOPPED)
        again = await next_run(here)
        assert again.site.name != run.site.name
        assert await again.fetch(again.order.snapshot) == b"one step"
        listed = (await here.sdk().fine_tuning.jobs.list_events(job.id, limit=100)).data
        assert sum("has no time" in each.message for each in listed) == 1
        await again.succeed()
        await reached(here, job.id, "succeeded")

    play(url, scenario, limits=replace(LIMITS, starved_s=0.3))


def test_a_stale_run_stores_nothing_and_is_dropped_when_it_comes_back(url: str) -> None:
    async def scenario(here: Replica) -> None:
        job = await create(here)
        run = await next_run(here)
        await run.report(1)
        await run.report(1, end=pb.Training.GIVEN_UP, error="no memory now")
        again = await next_run(here)
        assert again.site.name != run.site.name
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await run.store(pb.StoreBegin.SNAPSHOT, 5, b"stale")
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        await run.report(6, end=pb.Training.SUCCEEDED)
        await stopped(here, run, snapshot=False)
        assert (await job_of(here, job.id)).step < 6
        await again.succeed()
        await reached(here, job.id, "succeeded")

    play(url, scenario)


def test_a_job_that_every_site_gives_up_fails_and_says_why(url: str) -> None:
    async def scenario(here: Replica) -> None:
        job = await create(here)
        for _ in range(LIMITS.runs):
            run = await next_run(here)
            await run.report(0, end=pb.Training.GIVEN_UP, error="no room for the adapter")
        failed = await reached(here, job.id, "failed")
        assert failed.error is not None and failed.error.code == "site_failures"
        assert "no room for the adapter" in failed.error.message
        assert here.orders.empty() or (await job_of(here, job.id)).run == run.order.run

    play(url, scenario, sites=("a",))


def test_what_a_site_calls_hopeless_fails_the_job_once(url: str) -> None:
    async def scenario(here: Replica) -> None:
        job = await create(here)
        run = await next_run(here)
        await run.report(
            2, end=pb.Training.FAILED, error_code="diverged", error="Three losses\0were not finite."
        )
        failed = await reached(here, job.id, "failed")
        assert failed.error is not None
        assert (failed.error.code, failed.error.message) == ("diverged", "Three losses were not finite.")
        assert failed.trained_tokens == 200  # what was trained is paid for
        await stopped(here, run, snapshot=False)
        await run.report(6, end=pb.Training.SUCCEEDED)
        await stopped(here, run, snapshot=False)
        assert (await job_of(here, job.id)).status is JobStatus.FAILED

    play(url, scenario, sites=("a",))


def test_success_without_an_adapter_is_none(url: str) -> None:
    async def scenario(here: Replica) -> None:
        job = await create(here)
        run = await next_run(here)
        await run.report(6, end=pb.Training.SUCCEEDED)
        again = await next_run(here)
        assert again.order.run != run.order.run
        await again.succeed()
        await reached(here, job.id, "succeeded")

    play(url, scenario, sites=("a",))


def test_another_replica_takes_over_from_one_that_died_and_the_run_goes_on(url: str) -> None:
    async def main() -> None:
        async with (
            replica(url, sites=("a",), trains=TRAINS, tuning_limits=LIMITS, name="r1") as first,
            replica(url, sites=("a",), trains=TRAINS, tuning_limits=LIMITS, name="r2") as second,
        ):
            job = await create(first)
            run = await first_run(first, second)
            runs = [Run(each.scene.sites[0], run.order) for each in (first, second)]
            await report_to_both(runs, 2, first, job.id)
            dead, alive = (first, second) if holds(first, await job_of(first, job.id)) else (second, first)
            running: Any = dead.tuning.runner._running
            running.cancel()  # as by kill -9: nothing is released
            await asyncio.gather(running, return_exceptions=True)
            await report_to_both(runs, 4, alive, job.id)
            taken = await job_of(alive, job.id)
            assert taken.run == run.order.run and holds(alive, taken)
            await runs[0 if alive is first else 1].succeed()
            assert (await reached(alive, job.id, "succeeded")).trained_tokens == 600

    asyncio.run(main())


async def first_run(*replicas: Replica) -> Run:
    """Return the run of whichever replica orders it."""
    waiting = [asyncio.create_task(next_run(each)) for each in replicas]
    done, others = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=30)
    for each in others:
        each.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    return next(iter(done)).result()


def holds(here: Replica, job: Job) -> bool:
    return job.leased_by == here.tuning.service.ledger.owner


async def report_to_both(runs: list[Run], step: int, here: Replica, job_id: str) -> None:
    """Report to both gateways, as sites do, until a step is recorded."""
    async with asyncio.timeout(60):
        while True:
            for run in runs:
                await run.report(step)
            if (await job_of(here, job_id)).step == step:
                return
            await asyncio.sleep(0.05)


def test_content_goes_on_where_it_was_cut_and_is_checked(url: str) -> None:
    async def scenario(here: Replica) -> None:
        job = await create(here)
        run = await next_run(here)
        data = bytes(range(256)) * 1_000  # parts of the database and pieces of the call do not line up
        (begun,) = await run.store(pb.StoreBegin.SNAPSHOT, 1, data, until=101_000)
        assert begun.offset == 0
        went_on, done = await run.store(pb.StoreBegin.SNAPSHOT, 1, data)
        assert (went_on.offset, done.offset, done.done) == (101_000, len(data), True)
        (content,) = await here.tuning.service.contents.of_job(job.id, Kind.SNAPSHOT)
        whole = pb.Content(sha256=bytes.fromhex(content.sha256), bytes=content.bytes)
        assert await run.fetch(whole) == data
        for offset in (1, 65_535, 65_536, 101_001, len(data)):
            assert await run.fetch(whole, offset) == data[offset:]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await run.store(pb.StoreBegin.SNAPSHOT, 2, data, sha256=b"\0" * 32)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert [each.step for each in await here.tuning.service.contents.of_job(job.id, Kind.SNAPSHOT)] == [1]
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await run.fetch(pb.Content(sha256=b"\1" * 32, bytes=1))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND

    play(url, scenario, sites=("a",))


def test_who_is_no_site_gets_and_stores_nothing(url: str) -> None:
    async def scenario(here: Replica) -> None:
        await create(here)
        run = await next_run(here)
        run.site.token = "another"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await run.fetch(run.order.data)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await run.store(pb.StoreBegin.SNAPSHOT, 1, b"x")
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED

    play(url, scenario, sites=("a",))


def test_a_tenant_whose_month_is_spent_trains_no_further(url: str) -> None:
    async def scenario(here: Replica) -> None:
        quotas = here.scene.gateway.quotas
        quotas.set_limits({LimitId(Scope.TENANT, TENANT, QuotaKind.MONTH): 250})
        job = await create(here)
        run = await next_run(here)
        await run.report(3)  # 300 tokens
        await stopped(here, run, snapshot=True)
        state = (await here.raw("GET", f"{JOBS}/{job.id}")).json()
        assert (state["status"], state["mico"]["paused"]) == ("queued", True)
        listed = (await here.sdk().fine_tuning.jobs.list_events(job.id, limit=100)).data
        assert any("250 tokens per month" in each.message for each in listed)
        status = quotas.status(Caller("key-1", TENANT), QuotaKind.MONTH)
        assert status is not None and status.remaining == 0

    play(url, scenario, sites=("a",))


def test_jobs_wait_for_a_place_and_no_site_gets_more_runs_than_it_takes(url: str) -> None:
    async def scenario(here: Replica) -> None:
        first, second = await create(here), await create(here, key="two")
        run = await next_run(here)
        assert run.order.job_id == first.id
        async with asyncio.timeout(60):
            while True:
                listed = await here.sdk("two").fine_tuning.jobs.list_events(second.id)
                if any("No site has room" in each.message for each in listed.data):
                    break
                await asyncio.sleep(POLL_S)
        await run.succeed()
        after = await next_run(here)
        assert after.order.job_id == second.id

    play(url, scenario, sites=("a",))


def test_a_job_for_which_no_site_comes_fails_and_does_not_hang(url: str) -> None:
    async def scenario(here: Replica) -> None:
        job = await create(here)
        run = await next_run(here)
        await run.site.close()
        failed = await reached(here, job.id, "failed")
        assert failed.error is not None and failed.error.code == "no_site"

    play(url, scenario, sites=("a",), limits=replace(IMPATIENT, queued_s=0.2))


def test_tuned_models_and_checkpoints_that_no_site_serves_are_fetched(url: str) -> None:
    async def scenario(here: Replica) -> None:
        job = await create(here, suffix="s")
        run = await next_run(here)
        await run.succeed()
        name = str((await reached(here, job.id, "succeeded")).fine_tuned_model)
        checkpoint = f"{name}:ckpt-step-3"
        site, order = await ordered(here, "order")
        assert (order.kind, order.model, order.tenant, order.parent) == ("add", checkpoint, TENANT, "m")
        assert await run.fetch(order.content) == b"checkpoint" * 50
        await run.serve(name, checkpoint)
        await site.send(ordered=pb.Ordered(order_id=order.order_id))
        directory = here.scene.gateway.directory
        await until(lambda: checkpoint in {each.id for each in directory.served.values()}, "it is served")
        answer = await here.sdk().chat.completions.create(
            model=checkpoint, messages=[{"role": "user", "content": "hello"}]
        )
        assert answer.choices[0].message.content == "re: hello"
        listed = (await here.raw("GET", "/v1/fine_tuning/models")).json()["data"]
        assert [(each["id"], each["checkpoint"], each["served"]) for each in listed] == [
            (name, False, True),
            (checkpoint, True, True),
        ]
        assert (await here.raw("GET", "/v1/fine_tuning/models", "two")).json()["data"] == []
        await run.site.send(models=pb.Models(models=[run.site.served_model]))  # it has started anew
        orders = {order.model: order for _, order in [await ordered(here, "order") for _ in range(2)]}
        assert orders.keys() == {name, checkpoint}
        assert await run.fetch(orders[name].content) == b"adapter" * 500
        await run.serve(name, checkpoint)
        for order in orders.values():
            await site.send(ordered=pb.Ordered(order_id=order.order_id))
        assert (await here.raw("DELETE", f"/v1/models/{name}")).status_code == 200
        _, removal = await ordered(here, "order")
        assert (removal.kind, removal.model) == ("remove", name)

    play(url, scenario, sites=("a",))


def test_a_deleted_model_is_unknown_though_a_site_that_is_down_served_it(url: str) -> None:
    async def scenario(here: Replica) -> None:
        job = await create(here)
        run = await next_run(here)
        await run.succeed()
        name = str((await reached(here, job.id, "succeeded")).fine_tuned_model)
        directory = here.scene.gateway.directory
        await until(lambda: name in directory.served, "it is served")
        await run.site.close()
        await until(lambda: name not in directory.served, "its site is down")
        assert (await asked(here, name)).status_code == 503  # until another has fetched it
        assert (await here.raw("DELETE", f"/v1/models/{name}")).status_code == 200
        await until(lambda: name not in directory.models, "it is known no more")
        assert error_of(await asked(here, name), 404)["code"] == "model_not_found"
        assert (await asked(here, "m")).status_code == 503

    play(url, scenario, sites=("a",))


def test_a_model_that_is_served_by_the_time_the_models_are_read_is_not_ordered_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(here: Replica) -> None:
        job = await create(here)
        run = await next_run(here)
        await run.succeed()
        name = str((await reached(here, job.id, "succeeded")).fine_tuned_model)
        checkpoint = f"{name}:ckpt-step-3"
        site, order = await ordered(here, "order")
        read, begun = Contents.tuned, asyncio.Semaphore(0)
        served, again = asyncio.Event(), asyncio.Event()

        async def tuned(self: Contents) -> Any:
            begun.release()
            await (again if served.is_set() else served).wait()
            return await read(self)

        monkeypatch.setattr(Contents, "tuned", tuned)
        await begun.acquire()
        await run.serve(name, checkpoint)
        await site.send(ordered=pb.Ordered(order_id=order.order_id))
        orders: Any = here.tuning.runner._serving._orders
        await until(lambda: not orders, "the order to be carried out")
        served.set()
        await begun.acquire()  # the next look at the models: the one before has given its orders
        assert not orders
        again.set()

    play(url, scenario, sites=("a",))


def test_replicas_together_give_a_site_no_more_runs_than_it_takes(url: str) -> None:
    async def main() -> None:
        async with (
            replica(url, sites=("a",), trains=TRAINS, tuning_limits=LIMITS, name="r1") as first,
            replica(url, sites=("a",), trains=TRAINS, tuning_limits=LIMITS, name="r2") as second,
        ):
            job = await create(first)
            run = await first_run(first, second)
            runs = [Run(each.scene.sites[0], run.order) for each in (first, second)]
            await report_to_both(runs, 1, first, job.id)
            holder, other = (first, second) if holds(first, await job_of(first, job.id)) else (second, first)
            running: Any = holder.tuning.runner._running
            later = await create(other)
            async with asyncio.timeout(60):
                while not await waits(other, later.id):
                    await runs[0].report(1)
                    await runs[1].report(1)
            assert not running.done()
            assert (await job_of(first, later.id)).runs == 0

    asyncio.run(main())


async def waits(here: Replica, job_id: str) -> bool:
    listed = await here.sdk().fine_tuning.jobs.list_events(job_id)
    return any("No site has room" in each.message for each in listed.data)


def test_a_job_whose_key_is_revoked_ends_and_its_run_is_dropped(url: str) -> None:
    async def main() -> None:
        callers = {"key-1": Caller("key-1", TENANT)}
        async with replica(
            url, sites=("a",), trains=TRAINS, tuning_limits=LIMITS, caller=callers.get
        ) as here:
            job = await create(here)
            run = await next_run(here)
            await run.report(2)
            await recorded(here, job.id, 2)
            del callers["key-1"]
            failed = await reached(here, job.id, "failed")
            assert failed.error is not None and failed.error.code == "key_revoked"
            await stopped(here, run, snapshot=False)

    asyncio.run(main())
