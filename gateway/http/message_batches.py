"""Serves /v1/messages/batches: Anthropic's Message Batches, run like the batches of /v1/batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from litestar import Request, Response, delete, get, post
from litestar.datastructures import State
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.anthropic.message_batch import read_batch_requests, result_line
from gateway.anthropic.messages_format import MESSAGES
from gateway.batches.files import FileInUse, Files
from gateway.batches.ledger import Ledger, new_id
from gateway.batches.reading import split_lines
from gateway.batches.values import WINDOW_S, Batch, BatchLimits, BatchStatus, File, Purpose
from gateway.domain import Caller
from gateway.errors import BadRequest, MicoError, NotFound
from gateway.http.auth import authenticate
from gateway.http.backend import Backend
from gateway.http.batches import get_batch, submit
from gateway.http.body import ClientGone, json_response
from gateway.http.disconnect import while_connected
from gateway.http.error_handler import database_errors, error_response
from gateway.http.exchange import AnyRequest
from gateway.http.files import reserve_file
from gateway.http.pagination import cursor_page, read_cursor_page
from gateway.http.upload import UPLOAD_WITHIN_S
from gateway.openai.fields import Fields, Problems, echo

PATH: Final = "/v1/messages/batches"
ID_PREFIX: Final = "msgbatch_"
"""Prefix that distinguishes these batches from those of /v1/batches, which lists both kinds."""
MAX_RESULT_BYTES: Final = 2**30
_UNANSWERED: Final = {BatchStatus.CANCELLED: "canceled", BatchStatus.EXPIRED: "expired"}


def _render_error(request: Request[Any, Any, State], exc: Exception) -> Response[bytes]:
    return error_response(request, exc, MESSAGES.error_response)


_ERRORS: Final[Any] = {Exception: _render_error}


class NewBatch(NamedTuple):
    """A batch and the content of its input file."""

    batch: Batch
    content: bytes


def message_batch_routes(
    backend: Backend, files: Files, ledger: Ledger, limits: BatchLimits, changed: Callable[[], None]
) -> list[HTTPRouteHandler]:
    """`changed` is called after a batch was submitted or cancelled, to wake the runner of this replica."""

    @post(PATH, status_code=200, exception_handlers=_ERRORS)
    async def create_message_batch(request: AnyRequest) -> Response[bytes]:
        caller = await authenticate(request.scope, backend)

        def read(body: dict[str, object]) -> NewBatch:
            return read_new_batch(body, caller, backend.unix_time(), limits)

        try:
            new = await backend.read_json(request.scope, request.receive, caller, read)
        except ClientGone:
            return json_response({})
        with database_errors():
            batch = await _submit(new, files, ledger, limits)
        changed()
        return json_response(message_batch_json(batch))

    @post(PATH + "/{batch_id:str}/cancel", status_code=200, exception_handlers=_ERRORS)
    async def cancel_message_batch(request: AnyRequest) -> Response[bytes]:
        caller = await authenticate(request.scope, backend)
        with database_errors():
            batch = await _find(request, caller, ledger)
            await ledger.cancel(caller.tenant, batch.id)
            batch = await get_batch(ledger, caller.tenant, batch.id)
        changed()
        return json_response(message_batch_json(batch))

    @delete(PATH + "/{batch_id:str}", status_code=200, exception_handlers=_ERRORS)
    async def delete_message_batch(request: AnyRequest) -> Response[bytes]:
        caller = await authenticate(request.scope, backend)
        with database_errors():
            batch = await _find(request, caller, ledger)
            if not batch.ended:
                raise BadRequest(f"The batch {batch.id} has not ended: cancel it first.")
            await _delete(batch, files, ledger)
        return json_response({"id": batch.id, "type": "message_batch_deleted"})

    reading = _reading_routes(backend, files, ledger)
    return [create_message_batch, cancel_message_batch, delete_message_batch, *reading]


def _reading_routes(backend: Backend, files: Files, ledger: Ledger) -> list[HTTPRouteHandler]:
    results = _Results(backend, files, ledger)

    @get(PATH, exception_handlers=_ERRORS)
    async def list_message_batches(request: AnyRequest) -> Response[bytes]:
        caller = await authenticate(request.scope, backend)
        page = read_cursor_page(request)
        with database_errors(page):
            rows = await ledger.list_page(caller.tenant, page, ID_PREFIX)
        return json_response(cursor_page([message_batch_json(batch) for batch in rows], page))

    @get(PATH + "/{batch_id:str}", exception_handlers=_ERRORS)
    async def retrieve_message_batch(request: AnyRequest) -> Response[bytes]:
        caller = await authenticate(request.scope, backend)
        with database_errors():
            return json_response(message_batch_json(await _find(request, caller, ledger)))

    @get(PATH + "/{batch_id:str}/results", exception_handlers=_ERRORS)
    async def message_batch_results() -> ASGIApp:
        return results

    return [list_message_batches, retrieve_message_batch, message_batch_results]


def read_new_batch(body: dict[str, object], caller: Caller, now: float, limits: BatchLimits) -> NewBatch:
    """Read the body of a new batch. Raises BadRequest."""
    problems = Problems()
    lines = read_batch_requests(Fields(body, problems), "/v1/messages")
    for number, line in enumerate(lines):
        if len(line) > limits.line_bytes:
            problems.add(f"requests.{number}", f"is longer than {limits.line_bytes} bytes")
    problems.raise_any()
    batch = Batch(
        id=new_id(now, ID_PREFIX),
        tenant=caller.tenant,
        key_id=caller.key_id,
        endpoint="/v1/messages",
        input_file_id="",
        created_at=now,
        expires_at=now + WINDOW_S,
        output_kept_s=limits.kept_s,
        total=len(lines),
    )
    return NewBatch(batch, b"".join(lines))


async def _submit(new: NewBatch, files: Files, ledger: Ledger, limits: BatchLimits) -> Batch:
    """Store the input file, then the batch. Raises BadRequest or TooMany, after which neither is kept. If
    the database fails, the stored part of the file stays invisible and expires.
    """
    writer = await reserve_file(files, new.batch.tenant, len(new.content), limits)
    await writer.write(new.content)
    file = await writer.complete(f"{new.batch.id}_input.jsonl", Purpose.BATCH, limits.kept_s)
    batch = replace(new.batch, input_file_id=writer.id)
    try:
        await submit(batch, ledger, limits, file)
    except MicoError:
        await writer.discard()
        raise
    return batch


async def _find(request: AnyRequest, caller: Caller, ledger: Ledger) -> Batch:
    """Return the batch that the path names. Raises NotFound, also for a batch of /v1/batches."""
    batch_id: str = request.path_params["batch_id"]
    if not batch_id.startswith(ID_PREFIX):
        raise NotFound(f"No message batch found with id {echo(batch_id)}.")
    return await get_batch(ledger, caller.tenant, batch_id)


async def _delete(batch: Batch, files: Files, ledger: Ledger) -> None:
    """Delete the files of an ended batch, except one that another batch reads, and then the batch. If the
    database fails in between, the client can repeat the request.
    """
    for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
        if file_id is not None:
            with suppress(FileInUse):
                await files.delete(batch.tenant, file_id)
    await ledger.remove(batch.id)


def message_batch_json(batch: Batch) -> dict[str, Any]:
    """Render Anthropic's batch object. Until a batch has ended, all its requests count as processing."""
    ended_at = batch.completed_at or batch.failed_at or batch.expired_at or batch.cancelled_at
    counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
    if not batch.ended:
        counts["processing"] = batch.total
    else:
        counts |= {"succeeded": batch.completed, "errored": batch.failed}
        counts[_UNANSWERED.get(batch.status, "canceled")] += batch.total - batch.completed - batch.failed
    canceling = batch.status is BatchStatus.CANCELLING
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "ended" if batch.ended else "canceling" if canceling else "in_progress",
        "request_counts": counts,
        "created_at": _time(batch.created_at),
        "expires_at": _time(batch.expires_at),
        "ended_at": _time(ended_at) if batch.ended else None,
        "cancel_initiated_at": _time(batch.cancelling_at),
        "archived_at": None,
        "results_url": f"{PATH}/{batch.id}/results" if batch.ended else None,
    }


def _time(at: float | None) -> datetime | None:
    return None if at is None else datetime.fromtimestamp(at, UTC)


@dataclass(frozen=True, slots=True)
class _Results:
    """ASGI application that sends the results of a batch: a line for each request, failed ones last."""

    backend: Backend
    files: Files
    ledger: Ledger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request: AnyRequest = Request(scope)
        caller = await authenticate(scope, self.backend)
        with database_errors():
            batch = await _find(request, caller, self.ledger)
            if not batch.ended:
                raise BadRequest("The results are there once 'processing_status' is 'ended'.")
            found = [await self.files.get(batch.tenant, file_id) for file_id in _result_files(batch)]
        files = [file for file in found if file is not None]
        if len(files) < len(found):
            raise NotFound(f"The results of {batch.id} were deleted.")
        await while_connected(self._send(batch, files, send), receive, within_s=UPLOAD_WITHIN_S)

    async def _send(self, batch: Batch, files: list[File], send: Send) -> None:
        unanswered = _UNANSWERED.get(batch.status, "canceled")
        headers = [(b"content-type", b"application/x-jsonl")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for file in files:
            async for line in split_lines(self.files.parts(file), MAX_RESULT_BYTES):
                body = result_line(line.data, unanswered)
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _result_files(batch: Batch) -> list[str]:
    """Return the ids of the result files, or of the input file if the batch ended before it was read."""
    results = [file_id for file_id in (batch.output_file_id, batch.error_file_id) if file_id is not None]
    return results or [batch.input_file_id]
