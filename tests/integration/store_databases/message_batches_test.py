"""Tests /v1/messages/batches and messages in /v1/batches, with Anthropic's SDK and its types."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types import Message
from anthropic.types.messages import MessageBatch, MessageBatchIndividualResponse
from sqlalchemy import text

from gateway.anthropic.message_batch import MAX_REQUESTS
from gateway.store.database import open_engine
from tests.support.batch_replica import (
    POLL_S,
    Replica,
    answers_by_id,
    asked_at_least,
    chat_line,
    jsonl,
    replica,
)

PATH = "/v1/messages/batches"


def client(here: Replica, key: str = "one") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(api_key=key, base_url="http://edge", http_client=here.http, max_retries=0)


def message(said: str, **params: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": said}], **params}


def request(number: int, **params: Any) -> Any:
    return {"custom_id": f"c-{number}", "params": message(f"prompt {number}", **params)}


async def submitted(here: Replica, *requests: Any, key: str = "one") -> str:
    return (await client(here, key).messages.batches.create(requests=requests)).id


async def ended(here: Replica, batch_id: str, key: str = "one") -> MessageBatch:
    async with asyncio.timeout(60):
        while True:
            raw = await here.raw("GET", f"{PATH}/{batch_id}", key)
            batch = MessageBatch.model_validate_json(raw.content, strict=True)
            assert sum(batch.request_counts.model_dump().values()) > 0
            if batch.processing_status == "ended":
                return batch
            counts = batch.request_counts.model_dump()
            assert counts.pop("processing") and not any(counts.values()), "they count once all has ended"
            assert (batch.results_url, batch.ended_at) == (None, None)
            await asyncio.sleep(POLL_S)


async def results(here: Replica, batch_id: str) -> dict[str, Any]:
    """Return the results by custom id, read by the SDK and again from the raw lines."""
    found = {
        each.custom_id: each.result async for each in await client(here).messages.batches.results(batch_id)
    }
    raw = (await here.raw("GET", f"{PATH}/{batch_id}/results")).text.splitlines()
    for line in raw:
        MessageBatchIndividualResponse.model_validate_json(line, strict=True)
    assert len(raw) == len(found), "a request has two results"
    return found


def error_of(response: httpx2.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    whole = response.json()
    assert whole.keys() == {"type", "error", "request_id"} and whole["type"] == "error"
    error: dict[str, Any] = whole["error"]
    return error


def test_every_request_of_a_message_batch_has_one_result(url: str) -> None:
    async def main() -> None:
        async with replica(url) as here:
            batch_id = await submitted(here, *(request(number) for number in range(20)), request(20, top_p=7))
            done = await ended(here, batch_id)
            counts = {"processing": 0, "succeeded": 20, "errored": 1, "canceled": 0, "expired": 0}
            assert done.request_counts.model_dump() == counts
            assert done.ended_at and done.created_at <= done.ended_at < done.expires_at
            found = await results(here, batch_id)
            assert found.keys() == {f"c-{number}" for number in range(21)}
            for number in range(20):
                answer = found[f"c-{number}"].message
                assert (answer.content[0].text, answer.stop_reason) == (f"re: prompt {number}", "end_turn")
                assert answer.id.startswith("msg_msgbatch_")
            refused = found["c-20"]
            assert (refused.type, refused.error.error.type) == ("errored", "invalid_request_error")
            assert "'top_p'" in refused.error.error.message
            assert len(here.asked) == len(set(here.asked)) == len(here.scene.outcomes) == 20

    asyncio.run(main())


@asynccontextmanager
async def without(url: str, table: str) -> AsyncIterator[None]:
    """Have the database fail whoever asks for a table."""
    engine = open_engine(url)
    for before, after in ((table, f"{table}_away"), (f"{table}_away", table)):
        async with engine.begin() as connection:
            await connection.execute(text(f"ALTER TABLE {before} RENAME TO {after}"))
        if before == table:
            yield
    await engine.dispose()


def test_a_database_that_fails_while_a_batch_is_deleted_keeps_it_for_the_next_try(url: str) -> None:
    async def main() -> None:
        async with replica(url) as here:
            batch_id = await submitted(here, request(1))
            await ended(here, batch_id)
            async with without(url, "files"):
                error_of(await here.raw("DELETE", f"{PATH}/{batch_id}"), 529)
            await client(here).messages.batches.delete(batch_id)
            assert (await here.raw("GET", "/v1/files")).json()["data"] == []

    asyncio.run(main())


def test_a_database_that_fails_before_the_batch_is_written_leaves_no_file(url: str) -> None:
    """Clients try again: each try would leave a file of the tenant's for 30 days."""

    async def main() -> None:
        async with replica(url) as here:
            async with without(url, "batches"):
                with pytest.raises(anthropic.InternalServerError):
                    await submitted(here, request(1))
            assert (await here.raw("GET", "/v1/files")).json()["data"] == []
            batch_id = await submitted(here, request(1))
            listed = (await here.raw("GET", "/v1/files?purpose=batch")).json()["data"]
            assert [each["filename"] for each in listed] == [f"{batch_id}_input.jsonl"]
            assert (await ended(here, batch_id)).request_counts.succeeded == 1

    asyncio.run(main())


def test_a_cancelled_message_batch_says_what_ran(url: str) -> None:
    async def main() -> None:
        async with replica(url) as here:
            batch_id = await submitted(here, *(request(number) for number in range(50)), request(50, top_p=7))
            await asked_at_least(here, 10)
            here.open.clear()
            cancelled = await client(here).messages.batches.cancel(batch_id)
            assert cancelled.processing_status in {"canceling", "ended"} and cancelled.cancel_initiated_at
            done = await ended(here, batch_id)
            kinds = [result.type for result in (await results(here, batch_id)).values()]
            counts = done.request_counts.model_dump()
            assert {kind: kinds.count(kind) for kind in counts} == counts
            assert counts["canceled"] and counts["succeeded"] and sum(counts.values()) == 51
            again = await client(here).messages.batches.cancel(batch_id)
            assert again == done, "there is nothing left to cancel"
            here.open.set()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["canceled", "expired"])
def test_a_message_batch_that_ended_unread_has_results(
    url: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    async def main() -> None:
        async with replica(url) as here:
            runner: Any = here.batches.runner
            ledger, lease = runner._context.ledger, runner._context.ledger.lease
            submitted_and_over = asyncio.Event()

            async def late(*told: Any) -> Any:
                return await lease(*told) if submitted_and_over.is_set() else []

            monkeypatch.setattr(ledger, "lease", late)
            batch_id = await submitted(here, request(0), request(1))
            if kind == "canceled":
                await client(here).messages.batches.cancel(batch_id)
            else:
                here.pass_time(86_400.0)
            submitted_and_over.set()
            done = await ended(here, batch_id)
            assert done.request_counts.model_dump()[kind] == 2
            found = await results(here, batch_id)
            assert {custom_id: result.type for custom_id, result in found.items()} == {
                "c-0": kind,
                "c-1": kind,
            }
            assert here.asked == []

    asyncio.run(main())


def test_message_batches_are_listed_in_both_directions_and_deleted(url: str) -> None:
    async def main() -> None:
        async with replica(url) as here:
            batches = client(here).messages.batches
            await here.ended(await here.submit(jsonl(chat_line(0))))
            made = [await submitted(here, request(number)) for number in range(5)]
            for batch_id in made:
                await ended(here, batch_id)
            assert [batch.id async for batch in batches.list(limit=2)] == made[::-1]
            before = await batches.list(limit=2, before_id=made[1])
            assert ([batch.id for batch in before.data], before.has_more) == (made[3:1:-1], True)
            assert [batch.id async for batch in batches.list(limit=3, before_id=made[0])] == [
                *made[3:0:-1],
                made[4],
            ]
            assert len((await here.raw("GET", "/v1/batches")).json()["data"]) == 6, (
                "an API shows its own: both"
            )
            assert (await client(here, "two").messages.batches.list()).data == []
            for path in ("", "/results"):
                error = error_of(await here.raw("GET", f"{PATH}/{made[0]}{path}", "two"), 404)
                assert error["type"] == "not_found_error"
            error_of(await here.raw("DELETE", f"{PATH}/{made[0]}", "two"), 404)
            deleted = await batches.delete(made[0])
            assert (deleted.id, deleted.type) == (made[0], "message_batch_deleted")
            with pytest.raises(anthropic.NotFoundError):
                await batches.retrieve(made[0])
            names = [file["filename"] for file in (await here.raw("GET", "/v1/files")).json()["data"]]
            assert len(names) == 10 and not any(made[0] in name for name in names)

    asyncio.run(main())


def test_batches_are_deleted_while_they_are_listed(url: str) -> None:
    async def main() -> None:
        async with replica(url) as here:
            batches = client(here).messages.batches
            for backwards in (False, True):
                made = [await submitted(here, request(number)) for number in range(5)]
                for batch_id in made:
                    await ended(here, batch_id)
                first = {"before_id": made[0]} if backwards else {}
                async for batch in batches.list(limit=2, **first):
                    await batches.delete(batch.id)
                left = [batch.id async for batch in batches.list()]
                assert left == (made[:1] if backwards else [])
            older = "msgbatch_" + "6" + 23 * "0"  # of a random id, as before ids told when they were made
            assert older in error_of(await here.raw("GET", f"{PATH}?after_id={older}"), 400)["message"]

    asyncio.run(main())


def test_a_message_batch_that_runs_has_no_results_and_stays(url: str) -> None:
    async def main() -> None:
        async with replica(url) as here:
            here.open.clear()
            batch_id = await submitted(here, request(0))
            error = error_of(await here.raw("GET", f"{PATH}/{batch_id}/results"), 400)
            assert "'processing_status'" in error["message"]
            assert (
                "cancel it first" in error_of(await here.raw("DELETE", f"{PATH}/{batch_id}"), 400)["message"]
            )
            here.open.set()
            await ended(here, batch_id)
            other = await here.submit(jsonl(chat_line(0)))
            error_of(await here.raw("GET", f"{PATH}/{other}"), 404)

    asyncio.run(main())


REFUSED: list[tuple[Any, str]] = [
    ({}, "'requests' is required"),
    ({"requests": []}, "'requests' holds 1 to"),
    ({"requests": [request(0)] * (MAX_REQUESTS + 1)}, "'requests' holds 1 to"),
    ({"requests": {}}, "'requests' must be a list"),
    ({"requests": [7]}, "'requests.0' must be an object"),
    ({"requests": [{"params": message("Hi")}]}, "'requests.0.custom_id' is required"),
    ({"requests": [request(0) | {"custom_id": "a b"}]}, "'requests.0.custom_id' has 1 to 64"),
    ({"requests": [request(0) | {"custom_id": "a" * 65}]}, "'requests.0.custom_id' has 1 to 64"),
    ({"requests": [request(0), request(1), request(0)]}, "'requests.2.custom_id' is 'c-0', as that of an"),
    ({"requests": [{"custom_id": "a"}]}, "'requests.0.params' is required"),
    ({"requests": [{"custom_id": "a", "params": []}]}, "'requests.0.params' must be an object"),
    ({"requests": [{"custom_id": "a", "params": {}}]}, "'requests.0.params.model' is required"),
    ({"requests": [request(0, model="m" * 513)]}, "'requests.0.params.model' has at most 512"),
    ({"requests": [request(0, model="m\0")]}, "'requests.0.params.model' has at most 512"),
    ({"requests": [request(0), request(1, model="other")]}, "'requests.1.params.model' is 'other', not that"),
    ({"requests": [request(0, stream=True)]}, "'requests.0.params.stream' can't be true"),
    ({"requests": [request(0, user="x" * 3000)]}, "'requests.0' is longer than 2000 bytes"),
]


def test_a_message_batch_is_refused_with_the_field_and_leaves_nothing(url: str) -> None:
    async def main() -> None:
        async with replica(url, line_bytes=2000, tenant_batches=1, tenant_bytes=4000) as here:
            for body, reason in REFUSED:
                error = error_of(await here.raw("POST", PATH, json=body), 400)
                assert error["type"] == "invalid_request_error"
                assert reason in error["message"], (reason, error)
            full = error_of(
                await here.raw("POST", PATH, json={"requests": [request(n) for n in range(40)]}), 400
            )
            assert "delete some" in full["message"]
            error_of(await here.raw("POST", PATH, "nobody", json={"requests": [request(0)]}), 401)
            for query in ("limit=0", "limit=1001", "after_id=a&before_id=b", "after_id=msgbatch_x"):
                wrong = error_of(await here.raw("GET", f"{PATH}?{query}"), 400)
                assert "'after'" not in wrong["message"], "a parameter that Anthropic has not"
            assert (await here.raw("GET", "/v1/files")).json()["data"] == []
            here.open.clear()
            await submitted(here, request(0))
            many = error_of(await here.raw("POST", PATH, json={"requests": [request(0)]}), 429)
            assert many["type"] == "rate_limit_error"
            assert len((await here.raw("GET", "/v1/files")).json()["data"]) == 1
            here.open.set()

    asyncio.run(main())


def test_lines_of_messages_are_answered_and_refused_in_anthropics_shapes(url: str) -> None:
    async def main() -> None:
        async with replica(url) as here:
            lines = [
                {"custom_id": f"c-{number}", "method": "POST", "url": "/v1/messages", "body": body}
                for number, body in enumerate([message("one"), message("two", top_p=7)])
            ]
            done = await here.ended(await here.submit(jsonl(*lines), endpoint="/v1/messages"))
            answered = answers_by_id(await here.lines(done.output_file_id))["c-0"]["response"]
            answer = Message.model_validate_json(json.dumps(answered["body"]), strict=True)
            assert [block.text for block in answer.content if block.type == "text"] == ["re: one"]
            (refused,) = await here.lines(done.error_file_id)
            assert refused["response"]["status_code"] == 400
            assert refused["response"]["body"]["error"]["type"] == "invalid_request_error"

    asyncio.run(main())
