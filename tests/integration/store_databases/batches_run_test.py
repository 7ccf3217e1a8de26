"""Runs batches end to end and through failures: every line is answered once, on both databases."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from openai.types import Batch, CreateEmbeddingResponse, FileDeleted, FileObject
from openai.types.chat import ChatCompletion
from sqlalchemy.exc import OperationalError

from gateway.batches import job, validate
from gateway.batches.answer_line import MAX_LINE_INPUTS
from gateway.batches.reading import LineRequest, RawLine
from gateway.batches.values import BatchLimits
from gateway.domain import AnswerEvent, Lane, Query
from gateway.errors import BudgetSpent, TooMany
from gateway.operator_orders import Standing
from gateway.query.answer import answer
from gateway.query.context import QueryContext
from gateway.side_work import INLINE_BYTES
from gateway.store.store import open_store
from tests.support.batch_replica import (
    CALLERS,
    answers_by_id,
    asked_at_least,
    chat_line,
    jsonl,
    replica,
)
from tests.support.server_abilities import embed


def test_a_batch_is_answered_in_openais_shapes(url: str) -> None:
    async def main() -> None:
        async with replica(url) as here:
            content = jsonl(*(chat_line(number) for number in range(30)))
            form = {"files": {"file": ("in.jsonl", content)}, "data": {"purpose": "batch"}}
            raw = await here.raw("POST", "/v1/files", **form)
            assert raw.status_code == 200, raw.text
            file = FileObject.model_validate_json(raw.content, strict=True)
            assert (file.bytes, file.filename, file.purpose) == (len(content), "in.jsonl", "batch")
            assert (await here.raw("GET", f"/v1/files/{file.id}/content")).content == content

            asked = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            raw = await here.raw("POST", "/v1/batches", json=asked | {"metadata": {"job": "nightly"}})
            batch = Batch.model_validate_json(raw.content, strict=True)
            assert (batch.status, batch.metadata) == ("validating", {"job": "nightly"})
            await here.ended(batch.id)
            raw = await here.raw("GET", f"/v1/batches/{batch.id}")
            done = Batch.model_validate_json(raw.content, strict=True)
            assert done.request_counts is not None
            assert (done.status, done.model, done.error_file_id) == ("completed", "m", None)
            assert done.request_counts.model_dump() == {"total": 30, "completed": 30, "failed": 0}
            assert done.in_progress_at and done.finalizing_at and done.completed_at

            lines = answers_by_id(await here.lines(done.output_file_id))
            for number in range(30):
                line = lines[f"c-{number}"]
                assert line.keys() == {"id", "custom_id", "response", "error"} and line["error"] is None
                body = ChatCompletion.model_validate(line["response"]["body"], strict=True)
                assert body.choices[0].message.content == f"re: prompt {number}"
                assert line["response"]["status_code"] == 200
            assert sorted(lines) == sorted(f"c-{number}" for number in range(30))
            recorded = {outcome.query_id for outcome in here.scene.outcomes}
            assert recorded == {line["response"]["request_id"] for line in lines.values()}
            assert len(here.scene.outcomes) == 30
            used = {attempt.decision.site for outcome in here.scene.outcomes for attempt in outcome.attempts}
            assert used == {"a", "b"}
            reasons = [outcome.attempts[0].decision.reason for outcome in here.scene.outcomes]
            assert all(reason.startswith("assigned jointly") for reason in reasons)
            raw = await here.raw("DELETE", f"/v1/files/{file.id}")
            assert FileDeleted.model_validate_json(raw.content, strict=True).deleted
            assert (await here.raw("GET", f"/v1/files/{file.id}")).status_code == 404

    asyncio.run(main())


def test_a_name_that_no_database_keeps_is_the_clients_mistake(url: str) -> None:
    async def main() -> None:
        async with replica(url) as here:
            for path in (
                "/v1/files/a%00",
                "/v1/batches/a%00",
                "/v1/files?after=%00",
                "/v1/files?purpose=%00",
            ):
                assert (await here.raw("GET", path)).status_code in {200, 400, 404}, path

    asyncio.run(main())


def test_text_completions_with_several_prompts_are_one_line(url: str) -> None:
    async def main() -> None:
        async with replica(url) as here:
            line = {
                "custom_id": "t",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"model": "m", "prompt": ["one", "two"]},
            }
            done = await here.ended(await here.submit(jsonl(line), endpoint="/v1/completions"))
            (answered,) = await here.lines(done.output_file_id)
            texts = [choice["text"] for choice in answered["response"]["body"]["choices"]]
            assert texts == ["re: one", "re: two"]

    asyncio.run(main())


def test_lines_of_embeddings_are_answered_without_a_forecast(url: str) -> None:
    async def main() -> None:
        async with replica(url, features=("embed",)) as here:
            asked = [["one", "two"], "three", ["x"] * (MAX_LINE_INPUTS + 1)]
            lines = [
                {
                    "custom_id": f"e-{number}",
                    "method": "POST",
                    "url": "/v1/embeddings",
                    "body": {"model": "m", "input": each},
                }
                for number, each in enumerate(asked)
            ]
            done = await here.ended(await here.submit(jsonl(*lines), endpoint="/v1/embeddings"))
            answered = answers_by_id(await here.lines(done.output_file_id))
            found = {}
            for custom_id, line in answered.items():
                body = CreateEmbeddingResponse.model_validate(line["response"]["body"], strict=True)
                found[custom_id] = [each.embedding for each in body.data]
            assert found == {"e-0": [embed("one", 8), embed("two", 8)], "e-1": [embed("three", 8)]}
            assert {outcome.forecast for outcome in here.scene.outcomes} == {None}
            (refused,) = await here.lines(done.error_file_id)
            assert refused["response"]["body"]["error"]["param"] == "input"

    asyncio.run(main())


def test_a_look_that_goes_wrong_is_not_the_last(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with replica(url) as here:
            runner: Any = here.batches.runner
            ledger, lease = runner._context.ledger, runner._context.ledger.lease

            async def unforeseen(*_: object) -> None:
                monkeypatch.setattr(ledger, "lease", lease)
                raise ValueError("'paused' is not a valid BatchStatus")  # as of a newer replica

            monkeypatch.setattr(ledger, "lease", unforeseen)
            done = await here.ended(await here.submit(jsonl(chat_line(0))))
            assert done.status == "completed"

    asyncio.run(main())


def test_cancelling_keeps_what_is_finished(url: str) -> None:
    async def main() -> None:
        async with replica(url) as here:
            batch_id = await here.submit(jsonl(*(chat_line(number) for number in range(50))))
            await asked_at_least(here, 10)
            here.open.clear()
            raw = await here.raw("POST", f"/v1/batches/{batch_id}/cancel")
            assert Batch.model_validate_json(raw.content, strict=True).status == "cancelling"
            done = await here.ended(batch_id)
            assert (done.status, done.request_counts.total) == ("cancelled", 50)
            answered = answers_by_id(await here.lines(done.output_file_id))
            rest = answers_by_id(await here.lines(done.error_file_id))
            assert answered and not answered.keys() & rest.keys()
            assert len(answered) + len(rest) == 50
            assert {line["error"]["code"] for line in rest.values()} == {"batch_cancelled"}
            here.open.set()
            refused = await here.raw("POST", f"/v1/batches/{batch_id}/cancel")
            assert refused.status_code == 200 or refused.json()["error"]["param"] == "batch_id"

    asyncio.run(main())


def test_a_batch_that_is_cancelled_while_it_is_read_counts_its_lines(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with replica(url) as here:
            runner: Any = here.batches.runner
            ledger = runner._context.ledger
            add_lines = ledger.add_lines

            async def meanwhile(batch_id: str, lines: Any) -> None:
                await here.raw("POST", f"/v1/batches/{batch_id}/cancel")
                await add_lines(batch_id, lines)

            monkeypatch.setattr(ledger, "add_lines", meanwhile)
            done = await here.ended(await here.submit(jsonl(chat_line(0), chat_line(1))))
            counts = done.request_counts
            assert (done.status, counts.total, counts.completed, counts.failed) == ("cancelled", 2, 0, 0)
            assert len(await here.lines(done.error_file_id)) == 2

    asyncio.run(main())


def test_a_line_whose_site_breaks_runs_again_then_is_in_the_error_file(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.job.BACKOFF_S", 0.01)

    async def main() -> None:
        async with replica(url) as here:
            here.fails = lambda prompt: (
                prompt == "prompt 3" or (prompt == "prompt 5" and here.asked.count(prompt) < 3)
            )
            done = await here.ended(await here.submit(jsonl(*(chat_line(number) for number in range(8)))))
            (failed,) = await here.lines(done.error_file_id)
            assert (failed["custom_id"], failed["response"]["status_code"]) == ("c-3", 502)
            assert failed["response"]["body"]["error"]["code"] == "upstream_error"
            assert (done.status, done.request_counts.failed, done.request_counts.completed) == (
                "completed",
                1,
                7,
            )
            assert here.asked.count("prompt 3") == 6  # three runs, each on both sites
            assert here.asked.count("prompt 5") == 3
            assert here.asked.count("prompt 4") == 1

    asyncio.run(main())


def test_a_batch_outlives_the_time_of_its_key_and_ends_when_that_is_revoked(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with open_store(url, tmp_path) as store, replica(url, caller=store.keys.unrevoked) as here:

            async def held(key: str) -> str:
                """Submit a batch of 30 lines, of which some run until they are released."""
                caller = store.keys.authenticate(key)
                assert caller is not None
                monkeypatch.setitem(CALLERS, key, caller)
                here.open.clear()
                here.asked.clear()
                batch_id = await here.submit(jsonl(*(chat_line(number) for number in range(30))), key)
                await asked_at_least(here, 2)
                return batch_id

            old, secret = await store.keys.create_key("app", "tenant-1", models=["m"])
            rotated = await held(secret)
            replaced = await store.keys.rotate_key(old.id, 0.0)
            assert replaced is not None and store.keys.still_valid(old.id) is None
            here.open.set()
            done = await here.ended(rotated)
            assert (done.status, done.request_counts.completed) == ("completed", 30)
            assert {outcome.key_id for outcome in here.scene.outcomes} == {old.id}

            new, secret = replaced
            revoked = await held(secret)
            await store.keys.revoke_key(new.id)
            here.open.set()
            done = await here.ended(revoked)
            assert (done.status, done.request_counts.completed) == ("completed", len(here.asked))
            refused = await here.lines(done.error_file_id)
            assert len(refused) == 30 - len(here.asked) > 0
            assert {each["response"]["body"]["error"]["code"] for each in refused} == {"invalid_api_key"}

    asyncio.run(main())


def test_a_body_that_is_refused_costs_nothing_and_is_told(url: str) -> None:
    async def main() -> None:
        async with replica(url) as here:
            content = jsonl(chat_line(0), chat_line(1, temperature=9))
            done = await here.ended(await here.submit(content))
            (refused,) = await here.lines(done.error_file_id)
            assert refused["response"]["status_code"] == 400
            assert refused["response"]["body"]["error"]["param"] == "temperature"
            assert here.asked == ["prompt 0"]

    asyncio.run(main())


def test_a_line_that_no_site_can_serve_holds_up_no_other(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.batches.job.BACKOFF_S", 0.01)

    async def main() -> None:
        async with replica(url, features=("chat", "resume")) as here:
            await here.scene.site("c")  # the only one that tells logprobs
            here.scene.gateway.directory.apply_standings({"c": Standing(pinned_off=frozenset({"m"}))})
            content = jsonl(chat_line(0, logprobs=True), *(chat_line(number) for number in range(1, 9)))
            done = await here.ended(await here.submit(content))
            (refused,) = await here.lines(done.error_file_id)
            assert refused["response"]["body"]["error"]["code"] == "no_site"
            assert (done.request_counts.completed, len(here.asked)) == (8, 8)

    asyncio.run(main())


@pytest.mark.parametrize(
    "refusal",
    [TooMany("30 requests a minute", retry_after_s=0.02), BudgetSpent("as far as is known here")],
    ids=["slice", "month"],
)
def test_a_quota_or_a_database_that_is_away_costs_time_and_no_line(
    url: str, monkeypatch: pytest.MonkeyPatch, refusal: TooMany
) -> None:
    monkeypatch.setattr("gateway.batches.job.BACKOFF_S", 0.01)
    seen: set[str] = set()

    async def limited(gateway: QueryContext, query: Query) -> AsyncGenerator[AnswerEvent, None]:
        """Refuse the first run of every line because of a quota."""
        if query.text not in seen:
            seen.add(query.text)
            raise refusal
        async for piece in answer(gateway, query):
            yield piece

    monkeypatch.setattr("gateway.batches.lifecycle.answer", limited)

    async def main() -> None:
        async with replica(url) as here:
            runner: Any = here.batches.runner
            ledger, away = runner._context.ledger, iter([True, False, True, True, False, False, True])
            write = ledger.write

            async def sometimes(*given: Any) -> None:
                if next(away, False):
                    raise OperationalError("", {}, OSError("the database is away"))
                await write(*given)

            monkeypatch.setattr(ledger, "write", sometimes)
            done = await here.ended(await here.submit(jsonl(*(chat_line(number) for number in range(12)))))
            lines = answers_by_id(await here.lines(done.output_file_id))
            assert (len(lines), len(here.asked), next(away, None)) == (12, 12, None)
            assert all(line["id"].endswith("-1") for line in lines.values())  # each ran once before

    asyncio.run(main())


def test_lines_for_a_model_that_nobody_serves_are_told_so(url: str) -> None:
    async def main() -> None:
        async with replica(url) as here:
            done = await here.ended(await here.submit(jsonl(chat_line(0, model="nope"))))
            (refused,) = await here.lines(done.error_file_id)
            assert refused["response"]["body"]["error"]["code"] == "model_not_found"

    asyncio.run(main())


def test_a_batch_waits_while_no_site_is_there_and_expires(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with replica(url, sites=()) as here:
            batch_id = await here.submit(jsonl(chat_line(0), chat_line(1)))
            await here.reached(batch_id, "in_progress")
            here.pass_time(86_400.0)
            done = await here.ended(batch_id)
            assert (done.status, done.output_file_id) == ("expired", None)
            rest = answers_by_id(await here.lines(done.error_file_id))
            assert {line["error"]["code"] for line in rest.values()} == {"batch_expired"}
            assert len(rest) == 2 and here.asked == []
            monkeypatch.setattr("gateway.http.batches.WINDOW_S", -1.0)
            late = await here.ended(await here.submit(jsonl(chat_line(0))))
            assert (late.status, late.error_file_id, late.request_counts.total) == ("expired", None, 0)

    asyncio.run(main())


def test_a_batch_that_waits_for_its_sites_holds_up_no_other(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.batches.job.IDLE_S", 0.05)

    async def main() -> None:
        async with replica(url, replica_batches=1) as here:
            await here.scene.site("c", model="w")
            here.scene.gateway.directory.apply_standings({"c": Standing(pinned_off=frozenset({"w"}))})
            waiting = await here.submit(jsonl(chat_line(0, model="w")))
            await here.reached(waiting, "in_progress")
            done = await here.ended(await here.submit(jsonl(chat_line(1))))
            assert done.status == "completed"
            assert (await here.reached(waiting, "in_progress")).request_counts.completed == 0

    asyncio.run(main())


def test_lines_run_in_the_batch_lane_and_leave_no_counter_and_no_text_behind(url: str) -> None:
    lanes: list[int] = []

    async def main() -> None:
        async with replica(url) as here:
            answer = here._answer

            async def noted(site: Any, assign: Any) -> None:
                lanes.append(assign.lane)
                await answer(site, assign)

            here._answer = noted  # type: ignore[method-assign]
            await here.ended(await here.submit(jsonl(*(chat_line(number) for number in range(5)))))
            assert here.scene.nothing_is_left()
            assert here.batches.runner.running_lines == 0
            forecasts: Any = here.scene.gateway.forecasts
            for outcome in here.scene.outcomes:
                forecasts.observe(outcome)
            assert not forecasts._awaited

    asyncio.run(main())
    assert lanes == [Lane.BATCH] * 5


def test_few_lines_are_on_their_way_to_a_site_however_many_have_room_there(url: str) -> None:
    """Each takes time of the event loop, of the forecasts and of the database, which others need, too."""
    starting: list[int] = []
    given: set[str] = set()

    async def main() -> None:
        async with replica(url, slots=1_000) as here:
            runner: Any = here.batches.runner

            def dispatching(query: Query, _: str) -> Query:
                starting.append(len(runner._in_flight.keys() - given))
                given.update((query.id, query.id.removesuffix("-0")))  # a query of one choice, or its first
                return query

            here.scene.gateway.trace_query = dispatching
            done = await here.ended(await here.submit(jsonl(*(chat_line(number) for number in range(200)))))
            assert done.request_counts.completed == 200

    asyncio.run(main())
    assert len(starting) == 200
    assert 1 < max(starting) <= BatchLimits().starting


def test_a_large_line_is_read_beside_the_event_loop(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, beside = job.read_line, list[tuple[bool, bool]]()

    def seen(raw: RawLine, endpoint: str, limits: BatchLimits) -> LineRequest:
        on_the_loop = threading.current_thread() is threading.main_thread()
        beside.append((len(raw.data) > INLINE_BYTES, not on_the_loop))
        return real(raw, endpoint, limits)

    monkeypatch.setattr(validate, "read_line", seen)
    monkeypatch.setattr(job, "read_line", seen)

    async def main() -> None:
        async with replica(url) as here:
            done = await here.ended(
                await here.submit(jsonl(chat_line(1), chat_line(2, user="x" * INLINE_BYTES)))
            )
            assert done.status == "completed"

    asyncio.run(main())
    assert sorted(beside) == [(False, False), (False, False), (True, True), (True, True)]
