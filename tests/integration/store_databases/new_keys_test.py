"""Batches and jobs of keys that another replica has made a moment ago: unknown is not revoked."""

from __future__ import annotations

import asyncio
import logging

import pytest

from gateway.domain import Caller
from gateway.store.errors import StoreUnavailable
from tests.support.batch_replica import CALLERS_BY_ID, chat_line, jsonl, replica
from tests.support.training_site import TRAINS, next_run
from tests.support.tuning_jobs import create


class Keys:
    """The keys of a replica, which knows none before it has read them anew: that fails `failures` times."""

    def __init__(self, failures: int = 0) -> None:
        self._known: dict[str, Caller] = {}
        self._failures = failures

    def caller(self, key_id: str) -> Caller | None:
        return self._known.get(key_id)

    async def refresh(self) -> None:
        if self._failures:
            self._failures -= 1
            raise StoreUnavailable("no answer within 2 s")
        self._known = dict(CALLERS_BY_ID)


def test_a_batch_of_a_new_key_runs_where_the_key_was_not_known_yet(url: str) -> None:
    async def main() -> None:
        keys = Keys()
        async with replica(url, caller=keys.caller, refresh_keys=keys.refresh) as here:
            done = await here.ended(await here.submit(jsonl(chat_line(0), chat_line(1))))
            assert (done.status, done.request_counts.completed) == ("completed", 2)

    asyncio.run(main())


def test_a_job_of_a_new_key_trains_where_the_key_was_not_known_yet(url: str) -> None:
    async def main() -> None:
        keys = Keys()
        async with replica(
            url,
            sites=("a",),
            trains=TRAINS,
            caller=keys.caller,
            refresh_keys=keys.refresh,
        ) as here:
            job = await create(here)
            assert (await next_run(here)).order.job_id == job.id

    asyncio.run(main())


@pytest.mark.parametrize("work", ["batch", "job"])
def test_work_of_a_new_key_waits_for_a_database_that_does_not_answer(
    url: str, caplog: pytest.LogCaptureFixture, work: str
) -> None:
    """As for any statement that fails: no error is logged."""

    async def main() -> None:
        keys = Keys(failures=2)
        async with replica(
            url, sites=("a",), trains=TRAINS, caller=keys.caller, refresh_keys=keys.refresh
        ) as here:
            if work == "batch":
                done = await here.ended(await here.submit(jsonl(chat_line(0), chat_line(1))))
                assert (done.status, done.request_counts.completed) == ("completed", 2)
            else:
                job = await create(here)
                assert (await next_run(here)).order.job_id == job.id
        runners = "gateway.batches.runner", "gateway.tuning.runner"
        logged = {each.levelno for each in caplog.records if each.name in runners}
        assert logging.WARNING in logged
        assert logging.ERROR not in logged

    asyncio.run(main())
