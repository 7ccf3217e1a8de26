"""Tests /v1/files and /v1/batches: refusals, visibility per tenant, lists and pages, large files."""

from __future__ import annotations

import asyncio
import shutil
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import anthropic
import pytest
from openai.types import Batch, FileObject

from migrations import upgrade
from tests.support.batch_replica import Replica, chat_line, jsonl, replica
from tests.support.fakes.edge import error_of

Scenario = Callable[[Replica], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("batches") / "mico.db"
    upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture
def play(template: Path, tmp_path: Path) -> Callable[..., None]:
    def run(scenario: Scenario, **limits: Any) -> None:
        shutil.copy(template, tmp_path / "mico.db")

        async def main() -> None:
            async with replica(f"sqlite:///{tmp_path}/mico.db", sites=("a",), **limits) as here:
                await scenario(here)

        asyncio.run(main())

    return run


def upload(content: bytes = b"{}\n", **fields: str) -> dict[str, Any]:
    return {"files": {"file": ("in.jsonl", content)}, "data": fields}


REFUSED_UPLOADS: list[tuple[str, dict[str, Any], int, str | None]] = [
    ("no purpose", upload(), 400, "purpose"),
    ("another purpose", upload(purpose="assistants"), 400, "purpose"),
    ("no file", {"files": {"else": ("x", b"1")}, "data": {"purpose": "batch"}}, 400, "file"),
    ("empty", upload(b"", purpose="batch"), 400, "file"),
    ("too large", upload(b"x" * 5000, purpose="batch"), 413, None),
    ("far too large", upload(b"x" * 100_000, purpose="batch"), 413, None),
    ("not a form", {"json": {"purpose": "batch"}}, 400, None),
    (
        "broken",
        {"content": b"--b\r\nnonsense", "headers": {"content-type": "multipart/form-data; boundary=b"}},
        400,
        None,
    ),
    ("too many fields", upload(purpose="batch", **{f"x{number}": "1" for number in range(20)}), 400, None),
    ("a name without end", upload(purpose="batch", **{"x" * 9000: "1"}), 400, None),
    ("compressed", upload(purpose="batch") | {"headers": {"content-encoding": "gzip"}}, 400, None),
    (
        "an impossible time to keep it",
        upload(purpose="batch", **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "1"}),
        400,
        "expires_after.seconds",
    ),
]


def test_an_upload_is_refused_with_the_field_and_leaves_nothing(play: Callable[..., None]) -> None:
    async def scenario(here: Replica) -> None:
        for name, form, status, param in REFUSED_UPLOADS:
            error = error_of(await here.raw("POST", "/v1/files", **form), status)
            assert error["param"] == param, (name, error)
        listed = (await here.raw("GET", "/v1/files")).json()
        assert (listed["object"], listed["data"], listed["has_more"]) == ("list", [], False)
        assert await left_over(here) == 0

    play(scenario, file_bytes=4096)


async def left_over(here: Replica) -> int:
    from sqlalchemy import func, select

    from gateway.store.tables import file_parts, files

    ledger: Any = here.batches.runner._context.ledger
    async with ledger._engine.connect() as connection:
        counts = [await connection.scalar(select(func.count()).select_from(t)) for t in (files, file_parts)]
    return sum(counts)


@pytest.mark.parametrize(
    ("disposition", "name", "charset"),
    [
        ("filename=\"plain.jsonl\"; filename*=UTF-8''%E2%82%AC%20rates.jsonl", "€ rates.jsonl", "ascii"),
        ("filename*=iso-8859-1'en'%A3.jsonl", "£.jsonl", "ascii"),
        ("filename*=utf-8''..%2Fup%2Fx.jsonl", "x.jsonl", "ascii"),
        ("filename=\"plain.jsonl\"; filename*=UTF-8''%FF", "plain.jsonl", "ascii"),
        ("filename=\"a; filename*=utf-8''b\"", "a; filename*=utf-8''b", "ascii"),
        ('filename="größe.jsonl"', "größe.jsonl", "utf-8"),
        ('filename="größe.jsonl"', "größe.jsonl", "iso-8859-1"),
    ],
)
def test_a_file_may_be_named_in_any_script(
    play: Callable[..., None], disposition: str, name: str, charset: str
) -> None:
    """RFC 5987: `filename*` goes before `filename`, which clients send beside it for old servers.

    curl sends a name in the charset of its terminal, on Windows not UTF-8.
    """

    async def scenario(here: Replica) -> None:
        body = (
            b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
            + b'Content-Disposition: form-data; name="file"; %b\r\n\r\n' % disposition.encode(charset)
            + b"{}\r\n--b--\r\n"
        )
        kind = {"content-type": "multipart/form-data; boundary=b"}
        file = (await here.raw("POST", "/v1/files", content=body, headers=kind)).json()
        assert file.get("filename") == name, file

    play(scenario)


def test_anthropics_files_are_refused_and_no_file_of_openais_passes_for_one(
    play: Callable[..., None],
) -> None:
    async def scenario(here: Replica) -> None:
        kept = await here.sdk().files.create(file=("a.jsonl", b"{}"), purpose="batch")
        files = anthropic.AsyncAnthropic(
            api_key="one", base_url="http://edge", http_client=here.http, max_retries=0
        ).beta.files
        for asked in (
            files.list(),
            files.retrieve_metadata(kept.id),
            files.download(kept.id),
            files.delete(kept.id),
            files.upload(file=("a.txt", b"a")),
        ):
            with pytest.raises(anthropic.NotFoundError, match="Anthropic's files"):
                await asked
        assert [file.id async for file in here.sdk().files.list()] == [kept.id]

    play(scenario)


def test_a_file_keeps_the_time_that_was_asked_for(play: Callable[..., None]) -> None:
    async def scenario(here: Replica) -> None:
        fields = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        raw = await here.raw("POST", "/v1/files", **upload(b"12345", **fields))
        file = FileObject.model_validate_json(raw.content, strict=True)
        assert file.expires_at == file.created_at + 3600

    play(scenario)


def test_a_tenant_sees_its_own_alone(play: Callable[..., None]) -> None:
    async def scenario(here: Replica) -> None:
        batch_id = await here.submit(jsonl(chat_line(0)))
        file_id = (await here.sdk().batches.retrieve(batch_id)).input_file_id
        await here.ended(batch_id)
        for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content", f"/v1/batches/{batch_id}"):
            assert error_of(await here.raw("GET", path, "two"), 404)["code"] == "not_found"
            error_of(await here.raw("GET", path, "nobody"), 401)
        error_of(await here.raw("DELETE", f"/v1/files/{file_id}", "two"), 404)
        error_of(await here.raw("POST", f"/v1/batches/{batch_id}/cancel", "two"), 404)
        assert (await here.raw("GET", "/v1/batches", "two")).json()["data"] == []
        body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        error = error_of(await here.raw("POST", "/v1/batches", "two", json=body), 400)
        assert error["param"] == "input_file_id"

    play(scenario)


def test_an_operator_sees_everyones_batches(play: Callable[..., None]) -> None:
    async def scenario(here: Replica) -> None:
        ids = [await here.submit(jsonl(chat_line(0)), key) for key in ("one", "two")]
        listed = (await here.raw("GET", "/admin/api/batches", "boss")).json()["data"]
        assert {each["id"]: each["tenant"] for each in listed} == dict(
            zip(ids, ("tenant-1", "tenant-2"), strict=True)
        )
        error_of(await here.raw("GET", "/admin/api/batches", "one"), 403)
        await here.ended(ids[0])

    play(scenario)


REFUSED_BATCHES: list[tuple[dict[str, Any], str]] = [
    ({"input_file_id": None}, "input_file_id"),
    ({"input_file_id": "file-nope"}, "input_file_id"),
    ({"endpoint": "/v1/rerank"}, "endpoint"),
    ({"completion_window": "1h"}, "completion_window"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"metadata": {"mico_order": "backwards"}}, "metadata.mico_order"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, "output_expires_after.seconds"),
    (
        {"output_expires_after": {"anchor": "created_at", "seconds": "9" * 5000}},
        "output_expires_after.seconds",
    ),
    ({"output_expires_after": {"anchor": "created_at", "seconds": "3600"}}, "output_expires_after.seconds"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 3600.5}}, "output_expires_after.seconds"),
]


def test_a_batch_is_refused_with_the_field(play: Callable[..., None]) -> None:
    async def scenario(here: Replica) -> None:
        file_id = await here.upload(jsonl(chat_line(0)))
        body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        for change, param in REFUSED_BATCHES:
            error = error_of(await here.raw("POST", "/v1/batches", json=body | change), 400)
            assert error["param"] == param, change
        kept = {"output_expires_after": {"anchor": "created_at", "seconds": 3600.0}}
        assert (await here.raw("POST", "/v1/batches", json=body | kept)).status_code == 200

    play(scenario)


GOOD = chat_line(0)
FAULTS: list[tuple[str, list[Any], list[tuple[str, int | None]]]] = [
    ("same id twice", [GOOD, chat_line(1), GOOD], [("duplicate_custom_id", 3)]),
    ("another url", [GOOD, chat_line(1) | {"url": "/v1/completions"}], [("invalid_url", 2)]),
    ("another method", [GOOD | {"method": "GET"}], [("invalid_method", 1)]),
    ("no id", [{k: v for k, v in GOOD.items() if k != "custom_id"}], [("missing_required_parameter", 1)]),
    ("no body", [GOOD | {"body": []}], [("missing_required_parameter", 1)]),
    ("NUL in its id", [GOOD | {"custom_id": "a\0"}], [("missing_required_parameter", 1)]),
    ("streamed", [chat_line(0, stream=True)], [("unsupported_parameter", 1)]),
    ("two models", [GOOD, chat_line(1, model="other")], [("mismatched_model", 2)]),
    ("no JSON", [b"{", GOOD, b"7"], [("invalid_json_line", 1), ("invalid_json_line", 3)]),
    ("blank", [b"", b"  "], [("empty_file", None)]),
    ("too many", [chat_line(number) for number in range(6)], [("too_many_lines", None)]),
    ("too long", [GOOD, b"x" * 2000], [("line_too_long", 2)]),
]


def test_a_file_that_is_no_batch_is_told_why_line_by_line(play: Callable[..., None]) -> None:
    async def scenario(here: Replica) -> None:
        for name, lines, faults in FAULTS:
            batch_id = await here.submit(jsonl(*lines))
            await here.ended(batch_id)
            raw = await here.raw("GET", f"/v1/batches/{batch_id}")
            batch = Batch.model_validate_json(raw.content, strict=True)
            assert batch.status == "failed" and batch.failed_at and batch.errors and batch.errors.data, name
            assert [(error.code, error.line) for error in batch.errors.data] == faults, name
        assert here.asked == []

    play(scenario, lines=5, line_bytes=1000)


def test_a_batch_of_which_every_line_is_refused_ends(play: Callable[..., None]) -> None:
    async def scenario(here: Replica) -> None:
        ended = await here.ended(await here.submit(jsonl(chat_line(0, temperature="hot"))))
        assert (ended.status, ended.request_counts.failed) == ("completed", 1)
        (line,) = await here.lines(ended.error_file_id)
        assert line["response"]["body"]["error"]["param"] == "temperature"

    play(scenario)


def test_blank_lines_are_passed_over_and_counted(play: Callable[..., None]) -> None:
    async def scenario(here: Replica) -> None:
        content = b"\r\n" + jsonl(chat_line(0)).replace(b"\n", b"\r\n") + b"\n" + jsonl(chat_line(1)).rstrip()
        done = await here.ended(await here.submit(content))
        assert (done.status, done.request_counts.completed) == ("completed", 2)
        ids = [line["id"].split("-")[1] for line in await here.lines(done.output_file_id)]
        assert ids == ["2", "4"]

    play(scenario)


def test_a_byte_order_mark_is_no_part_of_the_first_line(play: Callable[..., None]) -> None:
    async def scenario(here: Replica) -> None:
        content = b"\xef\xbb\xbf" + jsonl(chat_line(0), chat_line(1))
        done = await here.ended(await here.submit(content))
        assert (done.status, done.request_counts.completed) == ("completed", 2)

    play(scenario)


def test_lists_page_in_both_orders(play: Callable[..., None]) -> None:
    async def scenario(here: Replica) -> None:
        made = [await here.upload(b"%d" % number) for number in range(5)]
        newest = [file.id async for file in here.sdk().files.list(limit=2)]
        assert newest == made[::-1]
        oldest = [file.id async for file in here.sdk().files.list(limit=2, order="asc")]
        assert oldest == made
        page = (await here.raw("GET", f"/v1/files?limit=2&after={made[3]}")).json()
        assert (page["first_id"], page["last_id"], page["has_more"]) == (made[2], made[1], True)
        for limit in ("0", "10001", "000000001" + "0" * 20, "9" * 5000):
            assert error_of(await here.raw("GET", f"/v1/files?limit={limit}"), 400)["param"] == "limit"
        assert error_of(await here.raw("GET", "/v1/files?order=up"), 400)["param"] == "order"
        assert error_of(await here.raw("GET", "/v1/files?after=file-x"), 400)["param"] == "after"
        assert (await here.raw("GET", "/v1/files?purpose=batch_output")).json()["data"] == []

    play(scenario)


def test_the_input_of_a_batch_that_runs_stays(play: Callable[..., None]) -> None:
    async def scenario(here: Replica) -> None:
        here.open.clear()
        batch_id = await here.submit(jsonl(chat_line(0)))
        file_id = (await here.sdk().batches.retrieve(batch_id)).input_file_id
        error = error_of(await here.raw("DELETE", f"/v1/files/{file_id}"), 400)
        assert error["code"] == "file_in_use" and batch_id in error["message"]
        error = error_of(await here.raw("DELETE", f"/v1/files/{file_id}", "two"), 404)
        assert batch_id not in error["message"], "it is nobody else's business"
        here.open.set()
        await here.ended(batch_id)
        assert (await here.raw("DELETE", f"/v1/files/{file_id}")).status_code == 200

    play(scenario)


def test_a_tenant_has_so_much_room_and_so_many_batches(play: Callable[..., None]) -> None:
    async def scenario(here: Replica) -> None:
        here.open.clear()
        await here.submit(jsonl(chat_line(0)))
        file_id = await here.upload(b"x" * 2000)
        error = error_of(await here.raw("POST", "/v1/files", **upload(b"x" * 1000, purpose="batch")), 400)
        assert error["code"] == "storage_full"
        await here.upload(b"1", "two")
        body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        error_of(await here.raw("POST", "/v1/batches", json=body), 429)
        here.open.set()

    play(scenario, tenant_bytes=3000, tenant_batches=1)


def test_any_client_finds_the_lines_of_an_output_file(play: Callable[..., None]) -> None:
    """Many clients also end a line at U+0085, U+2028 and U+2029."""

    async def scenario(here: Replica) -> None:
        said = "one\x85two\u2028three\u2029four"
        lines = [chat_line(0, messages=[{"role": "user", "content": said}]), chat_line(1, temperature=said)]
        lines[1]["custom_id"] = said
        done = await here.ended(await here.submit(jsonl(*lines)))
        (answered,) = await here.lines(done.output_file_id)
        assert answered["response"]["body"]["choices"][0]["message"]["content"] == f"re: {said}"
        (refused,) = await here.lines(done.error_file_id)
        assert refused["custom_id"] == said

    play(scenario)


def test_a_large_file_streams_in_and_out(play: Callable[..., None]) -> None:
    """The process never holds more than a small part of the file."""
    size, piece = 24 * 2**20, bytes(range(256)) * 1024

    async def body() -> AsyncIterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="big"\r\n\r\n'
        for _ in range(size // len(piece)):
            yield piece
        yield b"\r\n--b--\r\n"

    async def scenario(here: Replica) -> None:
        tracemalloc.start()
        kind = {"content-type": "multipart/form-data; boundary=b"}
        file = (await here.raw("POST", "/v1/files", content=body(), headers=kind)).json()
        assert file["bytes"] == size, file
        files: Any = here.batches.runner._context.files
        stored = await files.get("tenant-1", file["id"])
        pieces = 0
        async for part in files.parts(stored):
            assert part == piece[:65536]
            pieces += 1
        assert pieces * 65536 == size
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 8 * 2**20

    play(scenario)
