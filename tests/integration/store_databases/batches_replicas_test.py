"""A batch outlives replicas: another one goes on, and nothing is asked or written twice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from gateway.outcome import Status
from tests.support.batch_replica import (
    answers_by_id,
    asked_at_least,
    chat_line,
    jsonl,
    replica,
    until_two_are_held,
)
from tests.support.fakes.federation import DEADLINE_S, until


def test_another_replica_goes_on_without_repeating_what_is_done(url: str) -> None:
    """The first replica dies with half of its lines in flight; its finished lines do not run again."""

    async def main() -> None:
        async with replica(url, name="r1") as first:
            batch_id = await first.submit(jsonl(*(chat_line(number) for number in range(40))))
            await asked_at_least(first, 15)
            first.open.clear()
            finished = await until_two_are_held(first, batch_id)
            await first.die()
            async with replica(url, name="r2") as second:
                done = await second.ended(batch_id)
                lines = answers_by_id(await second.lines(done.output_file_id))
                assert sorted(lines) == sorted(f"c-{number}" for number in range(40))
                assert done.request_counts.completed == 40
                assert len(second.asked) == 40 - finished
                assert len(set(second.asked)) == len(second.asked)
            first.open.set()

    asyncio.run(main())


def test_lines_that_run_while_the_database_is_away_are_not_asked_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines that waited could not be read: those that ran were cancelled, and asked and paid for twice."""

    async def main() -> None:
        async with replica(url, sites=("a",)) as here:
            here.open.clear()
            ledger: Any = here.batches.runner._context.ledger
            unanswered, failed = ledger.unanswered, asyncio.Event()

            async def away_once(batch: str, after: int, *more: Any) -> Any:
                if after >= 0 and not failed.is_set():  # some of the first page have been started
                    await until(lambda: here.asked, "one of them runs")
                    failed.set()
                    raise OperationalError("", {}, OSError("the database is away"))
                return await unanswered(batch, after, *more)

            monkeypatch.setattr(ledger, "unanswered", away_once)
            batch_id = await here.submit(jsonl(*(chat_line(number) for number in range(300))))
            await asyncio.wait_for(failed.wait(), DEADLINE_S)
            here.open.set()
            done = await here.ended(batch_id)
            assert (done.status, done.request_counts.completed) == ("completed", 300)
            assert len(here.asked) == len(set(here.asked)) == 300

    asyncio.run(main())


def test_a_replica_that_was_only_away_writes_nothing_when_it_is_back(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica lost its lease while lines ran: their outcomes are dropped, and running ones cancelled."""

    async def main() -> None:
        async with replica(url, name="r1") as first:
            runner: Any = first.batches.runner
            batch_id = await first.submit(jsonl(*(chat_line(number) for number in range(20))))
            await asked_at_least(first, 5)
            first.open.clear()
            finished = await until_two_are_held(first, batch_id)
            ledger, lease = runner._context.ledger, runner._context.ledger.lease

            async def away(*_: object) -> None:
                raise OperationalError("", {}, OSError("the database is away"))

            monkeypatch.setattr(ledger, "lease", away)
            async with replica(url, name="r2") as second:
                done = await second.ended(batch_id)
                monkeypatch.setattr(ledger, "lease", lease)
                first.open.set()
                await until(lambda: runner.running_lines == 0, "nothing of it runs any more")
                lines = answers_by_id(await second.lines(done.output_file_id))
                assert len(lines) == 20
                assert len(second.asked) == 20 - finished
                assert await second.sdk().batches.retrieve(batch_id) == done
                for here in (first, second):
                    await here.scene.gateway.wait_settled()
                outcomes = [outcome for here in (first, second) for outcome in here.scene.outcomes]
                recorded = {outcome.query_id: outcome for outcome in outcomes}
                assert len(recorded) == len(outcomes), "usage is stored once per id: none may repeat"
                for line in lines.values():
                    outcome, usage = (
                        recorded[line["response"]["request_id"]],
                        line["response"]["body"]["usage"],
                    )
                    assert outcome.status is Status.ANSWERED
                    assert outcome.prompt_tokens + outcome.completion_tokens == usage["total_tokens"]

    asyncio.run(main())


def test_an_answer_that_was_not_written_down_yet_is_not_asked_for_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica ends while its database is coming back."""

    async def main() -> None:
        tried = asyncio.Event()
        async with replica(url, name="r1") as first:
            ledger: Any = first.batches.runner._context.ledger
            write = ledger.write

            async def away(*_: object) -> None:
                monkeypatch.setattr(ledger, "write", write)
                tried.set()
                raise OperationalError("", {}, OSError("the database is away"))

            monkeypatch.setattr(ledger, "write", away)
            batch_id = await first.submit(jsonl(chat_line(0)))
            await asyncio.wait_for(tried.wait(), DEADLINE_S)
            await first.batches.runner.close()
        async with replica(url, name="r2") as second:
            done = await second.ended(batch_id)
            assert (done.status, done.request_counts.completed) == ("completed", 1)
            assert (len(first.asked), second.asked) == (1, [])

    asyncio.run(main())


def test_a_batch_that_ended_keeps_its_files_though_nobody_here_heard_of_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with replica(url) as here:
            runner: Any = here.batches.runner
            ledger, end, told = runner._context.ledger, runner._context.ledger.end, list[bool]()

            async def unheard(*given: Any, **values: Any) -> None:
                told.append(await end(*given, **values))
                raise OperationalError("", {}, OSError("the connection broke after the commit"))

            monkeypatch.setattr(ledger, "end", unheard)
            done = await here.ended(await here.submit(jsonl(chat_line(0))))
            await until(lambda: not runner._jobs, "the batch is let go of")
            assert (done.status, told) == ("completed", [True])
            assert len(await here.lines(done.output_file_id)) == 1

    asyncio.run(main())


def test_a_replica_that_ends_hands_its_batch_on_at_once(url: str) -> None:
    async def main() -> None:
        async with replica(url, name="r1") as first:
            batch_id = await first.submit(jsonl(*(chat_line(number) for number in range(60))))
            await asked_at_least(first, 10)
        async with replica(url, name="r2") as second:
            done = await second.ended(batch_id)
            lines = answers_by_id(await second.lines(done.output_file_id))
            assert len(lines) == 60
            assert len(first.asked) + len(second.asked) == 60

    asyncio.run(main())


def test_nobody_sees_the_files_of_an_end_that_was_not_written_down(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica that takes over from one that died in between writes new files."""

    async def main() -> None:
        async with replica(url, name="r1") as first:
            ledger: Any = first.batches.runner._context.ledger
            reached = asyncio.Event()

            async def dies(*_: object, **__: object) -> None:
                reached.set()
                raise OperationalError("", {}, OSError("this process is dead"))

            monkeypatch.setattr(ledger, "end", dies)
            batch_id = await first.submit(jsonl(chat_line(0), chat_line(1, temperature=9)))
            await asyncio.wait_for(reached.wait(), DEADLINE_S)
            await first.die()
            async with replica(url, name="r2") as second:
                done = await second.ended(batch_id)
                assert done.status == "completed"
                listed = (await second.raw("GET", "/v1/files?purpose=batch_output")).json()["data"]
                assert {file["id"] for file in listed} == {done.output_file_id, done.error_file_id}

    asyncio.run(main())


def test_of_a_file_that_was_read_in_part_no_line_is_in_the_result(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica that read it dies, and the batch is cancelled before another one begins anew."""

    async def main() -> None:
        async with replica(url, name="r1") as first:
            runner: Any = first.batches.runner
            ledger, in_part = runner._context.ledger, asyncio.Event()
            add_lines = ledger.add_lines

            async def begin(batch_id: str, lines: Any) -> None:
                await add_lines(batch_id, list(lines)[:1])
                in_part.set()
                await asyncio.Event().wait()

            monkeypatch.setattr(ledger, "add_lines", begin)
            batch_id = await first.submit(jsonl(*(chat_line(number) for number in range(3))))
            await asyncio.wait_for(in_part.wait(), DEADLINE_S)
            await first.die()
            await first.raw("POST", f"/v1/batches/{batch_id}/cancel")
            async with replica(url, name="r2") as second:
                done = await second.ended(batch_id)
                assert (done.status, done.request_counts.total) == ("cancelled", 0)
                assert (done.output_file_id, done.error_file_id) == (None, None)

    asyncio.run(main())
