"""The API's promises about files and batches, with OpenAI's SDK and with raw requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.batch_usage import BatchUsage

from gateway.store.audit import Act
from gateway.store.store import open_store
from tests.support.batch_replica import Replica, asked_at_least, chat_line, jsonl, replica
from tests.support.fakes.edge import error_of

ONE = jsonl(chat_line(0))
BATCH = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}

CHAT = "/v1/chat/completions"


def run(url: str, scenario: Callable[[Replica], Awaitable[None]], **limits: Any) -> None:
    async def main() -> None:
        async with replica(url, **limits) as here:
            await scenario(here)

    asyncio.run(main())


def test_an_upload_is_processed_or_refused_by_name(url: str) -> None:
    async def scenario(here: Replica) -> None:
        file = await here.sdk().files.create(file=("in.jsonl", ONE), purpose="batch")
        assert (file.status, file.bytes, file.purpose) == ("processed", len(ONE), "batch")
        sent = {"file": ("in.jsonl", ONE)}
        for form, param in (
            ({"data": {"purpose": "batch"}}, "file"),
            ({"files": sent}, "purpose"),
            ({"files": sent, "data": {"purpose": "assistants"}}, "purpose"),
        ):
            missing = await here.raw("POST", "/v1/files", **({"files": {"other": ("x", b"1")}} | form))
            assert error_of(missing, 400)["param"] == param
        large = await here.raw(
            "POST", "/v1/files", files={"file": ("in.jsonl", b"x" * 5000)}, data={"purpose": "batch"}
        )
        error_of(large, 413)

    run(url, scenario, file_bytes=4000)


def test_files_are_listed_read_and_deleted(url: str) -> None:
    async def scenario(here: Replica) -> None:
        ids = [await here.upload(jsonl(chat_line(number))) for number in range(3)]
        listed = (await here.raw("GET", "/v1/files?limit=2&order=asc")).json()
        assert [file["id"] for file in listed["data"]] == ids[:2]
        assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (ids[0], ids[1], True)
        rest = (await here.raw("GET", f"/v1/files?order=asc&after={ids[1]}")).json()
        assert ([file["id"] for file in rest["data"]], rest["has_more"]) == (ids[2:], False)
        newest = [file.id async for file in here.sdk().files.list()]
        assert newest == ids[::-1]
        content = await here.raw("GET", f"/v1/files/{ids[0]}/content")
        assert content.content == ONE
        deleted = (await here.raw("DELETE", f"/v1/files/{ids[0]}")).json()
        assert deleted == {"id": ids[0], "object": "file", "deleted": True}
        error_of(await here.raw("GET", f"/v1/files/{ids[0]}"), 404)

    run(url, scenario)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
    ],
)
def test_a_batch_of_an_unknown_file_or_endpoint_is_refused(
    url: str, change: dict[str, str], param: str
) -> None:
    async def scenario(here: Replica) -> None:
        file_id = await here.upload(ONE)
        asked = BATCH | {"input_file_id": file_id} | change
        assert error_of(await here.raw("POST", "/v1/batches", json=asked), 400)["param"] == param
        if param == "endpoint":
            batch = (await here.raw("POST", "/v1/batches", json=BATCH | {"input_file_id": file_id})).json()
            assert (batch["status"], batch["object"]) == ("validating", "batch")

    run(url, scenario)


def test_a_batch_has_states_times_and_lines(url: str) -> None:
    async def scenario(here: Replica) -> None:
        wrong = chat_line(1, messages=[])
        done = await here.ended(await here.submit(jsonl(chat_line(0), wrong)))
        assert (done.status, done.request_counts.model_dump()) == (
            "completed",
            {"total": 2, "completed": 1, "failed": 1},
        )
        assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
        (good,) = await here.lines(done.output_file_id)
        assert good.keys() == {"id", "custom_id", "response", "error"}
        assert good["response"].keys() == {"status_code", "request_id", "body"}
        (bad,) = await here.lines(done.error_file_id)
        assert (bad["custom_id"], bad["response"]["status_code"]) == ("c-1", 400)
        assert bad["response"]["body"]["error"]["param"] == "messages"
        twice = await here.ended(await here.submit(jsonl(chat_line(0), chat_line(0), b"{")))
        assert (twice.status, twice.failed_at is not None) == ("failed", True)
        assert sorted({error.line for error in twice.errors.data}) == [2, 3]

    run(url, scenario)


def test_cancelling_keeps_finished_results_and_lists_are_paged(url: str) -> None:
    async def scenario(here: Replica) -> None:
        done = await here.submit(ONE)
        await here.ended(done)
        here.open.clear()
        held = await here.submit(jsonl(*(chat_line(number) for number in range(3))))
        await asked_at_least(here, 2)
        cancelling = await here.sdk().batches.cancel(held)
        assert cancelling.status in {"cancelling", "cancelled"}
        here.open.set()
        assert (await here.ended(held)).cancelled_at is not None
        page = (await here.raw("GET", "/v1/batches?limit=1")).json()
        assert ([batch["id"] for batch in page["data"]], page["has_more"]) == ([held], True)
        assert [batch.id async for batch in here.sdk().batches.list(limit=1)] == [held, done]

    run(url, scenario)


def test_a_file_of_too_many_lines_fails(url: str) -> None:
    async def scenario(here: Replica) -> None:
        batch = await here.ended(await here.submit(jsonl(*(chat_line(number) for number in range(4)))))
        assert batch.status == "failed"
        assert not here.asked
        with pytest.raises(openai.BadRequestError):
            await here.sdk().batches.cancel(batch.id)

    run(url, scenario, lines=3)


def test_uploads_side_by_side_keep_to_the_room_that_their_tenant_has(url: str, tmp_path: Path) -> None:
    """Two replicas get five files each, all begun before the first is complete."""

    async def main() -> None:
        async with open_store(url, tmp_path) as store:
            await store.quotas.set_tenant("tenant-1", best_priority=0, act=Act())
        limits = {"sites": (), "tenant_bytes": 5_000}
        async with replica(url, name="r1", **limits) as one, replica(url, name="r2", **limits) as two:
            form: Any = {"files": {"file": ("in.jsonl", b"x" * 1_000)}, "data": {"purpose": "batch"}}
            sent = [here.raw("POST", "/v1/files", **form) for here in (one, two) for _ in range(5)]
            answers = await asyncio.gather(*sent)
            stored = (await one.raw("GET", "/v1/files")).json()["data"]
            assert 1_000 < sum(file["bytes"] for file in stored) <= 5_000
            assert len(stored) == sum(answer.status_code == 200 for answer in answers)
            refused = [error_of(answer, 400) for answer in answers if answer.status_code != 200]
            assert {error["code"] for error in refused} == {"storage_full"}
            await one.raw("DELETE", f"/v1/files/{stored[0]['id']}")
            await two.upload(b"x" * 1_000)

    asyncio.run(main())


def test_batches_side_by_side_keep_to_how_many_their_tenant_may_have(url: str, tmp_path: Path) -> None:
    """Two replicas get five batches each at the same time."""

    async def main() -> None:
        async with open_store(url, tmp_path) as store:
            await store.quotas.set_tenant("tenant-1", best_priority=0, act=Act())
        limits = {"sites": (), "tenant_batches": 3}
        async with replica(url, name="r1", **limits) as one, replica(url, name="r2", **limits) as two:
            file_id = await one.upload(jsonl(chat_line(0)))
            body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
            sent = [here.raw("POST", "/v1/batches", json=body) for here in (one, two) for _ in range(5)]
            answers = await asyncio.gather(*sent)
            refused = [error_of(answer, 429) for answer in answers if answer.status_code != 200]
            assert len(refused) == 7, [answer.status_code for answer in answers]
            made = (await one.raw("GET", "/v1/batches")).json()["data"]
            assert len(made) == 3
            await one.raw("POST", f"/v1/batches/{made[0]['id']}/cancel")
            await one.ended(made[0]["id"])
            assert (await two.raw("POST", "/v1/batches", json=body)).status_code == 200

    asyncio.run(main())


def test_a_file_is_deleted_or_read_by_a_batch_and_never_both(url: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with open_store(url, tmp_path) as store:
            await store.quotas.set_tenant("tenant-1", best_priority=0, act=Act())
        async with replica(url, name="r1", sites=()) as one, replica(url, name="r2", sites=()) as two:
            for _ in range(10):
                file_id = await one.upload(jsonl(chat_line(0)))
                body = {
                    "input_file_id": file_id,
                    "endpoint": "/v1/chat/completions",
                    "completion_window": "24h",
                }
                made, deleted = await asyncio.gather(
                    one.raw("POST", "/v1/batches", json=body), two.raw("DELETE", f"/v1/files/{file_id}")
                )
                assert {made.status_code, deleted.status_code} == {200, 400}, (made.text, deleted.text)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "prompt"}]}),
        ("/v1/completions", {"prompt": "prompt"}),
        ("/v1/responses", {"input": "prompt"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "prompt"}], "max_tokens": 8}),
        ("/v1/embeddings", {"input": "prompt"}),
    ],
)
def test_a_batch_that_has_ended_says_what_its_answers_took(
    url: str, endpoint: str, body: dict[str, Any]
) -> None:
    async def scenario(here: Replica) -> None:
        pooled = endpoint == "/v1/embeddings"
        here.cached_tokens, here.reasoning_tokens = (0, 0) if pooled else (5, 2)
        ask = {"method": "POST", "url": endpoint}
        lines = [{"custom_id": f"c-{number}", "body": {"model": "m", **body}, **ask} for number in range(3)]
        lines[2]["body"] = {"model": "m"}  # it fails, and takes nothing
        batch_id = await here.submit(jsonl(*lines), endpoint=endpoint)
        done = await here.ended(batch_id)
        assert done.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
        raw = (await here.raw("GET", f"/v1/batches/{batch_id}")).json()
        assert BatchUsage.model_validate(raw["usage"], strict=True) == done.usage
        answered = 0 if pooled else 6
        assert raw["usage"] == {
            "input_tokens": 14,
            "input_tokens_details": {"cached_tokens": 2 * here.cached_tokens},
            "output_tokens": answered,
            "output_tokens_details": {"reasoning_tokens": 2 * here.reasoning_tokens},
            "total_tokens": 14 + answered,
        }

    run(url, scenario, features=("embed",) if endpoint == "/v1/embeddings" else ("chat", "resume"))


def test_only_a_batch_that_has_ended_says_what_it_took(url: str) -> None:
    async def scenario(here: Replica) -> None:
        here.open.clear()
        batch_id = await here.submit(ONE)
        await asked_at_least(here, 1)
        assert (await here.reached(batch_id, "in_progress")).usage is None
        await here.sdk().batches.cancel(batch_id)
        cancelled = await here.ended(batch_id)
        assert (cancelled.status, cancelled.usage.total_tokens) == ("cancelled", 0)
        invalid = await here.ended(await here.submit(b"no request\n"))
        assert (invalid.status, invalid.usage) == ("failed", None)

    run(url, scenario)
