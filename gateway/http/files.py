"""Serves /v1/files: upload, list, retrieve, read and delete the files of the caller's tenant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from litestar import Request, Response, delete, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.batches.files import FileInUse, Files, FileWriter, StorageFull
from gateway.batches.values import DAY_S, HOUR_S, BatchLimits, File, Purpose
from gateway.errors import BadRequest, NotFound
from gateway.http.auth import authenticate
from gateway.http.backend import Backend
from gateway.http.body import ClientGone, json_response
from gateway.http.disconnect import while_connected
from gateway.http.error_handler import database_errors
from gateway.http.exchange import AnyRequest, from_anthropics
from gateway.http.pagination import list_response, read_page
from gateway.http.upload import MISSING, UPLOAD_WITHIN_S, UploadForm, announced_bytes, read_form

MAX_PAGE: Final = 10_000


def file_routes(backend: Backend, files: Files, limits: BatchLimits) -> list[HTTPRouteHandler]:
    upload, content = _Upload(backend, files, limits), _Content(backend, files)

    @post("/v1/files", status_code=200, before_request=_refuse_anthropics)
    async def create_file() -> ASGIApp:
        return upload

    @get("/v1/files", before_request=_refuse_anthropics)
    async def list_files(request: AnyRequest) -> Response[bytes]:
        caller = await authenticate(request.scope, backend)
        page = read_page(request, MAX_PAGE, MAX_PAGE)
        with database_errors(page):
            rows = await files.list_page(caller.tenant, request.query_params.get("purpose"), page)
        return list_response([file_json(file) for file in rows], page)

    @get("/v1/files/{file_id:str}", before_request=_refuse_anthropics)
    async def retrieve_file(request: AnyRequest) -> Response[bytes]:
        caller = await authenticate(request.scope, backend)
        with database_errors():
            return json_response(
                file_json(await get_file(files, caller.tenant, request.path_params["file_id"]))
            )

    @get("/v1/files/{file_id:str}/content", before_request=_refuse_anthropics)
    async def file_content() -> ASGIApp:
        return content

    @delete("/v1/files/{file_id:str}", status_code=200, before_request=_refuse_anthropics)
    async def delete_file(request: AnyRequest) -> Response[bytes]:
        caller, file_id = await authenticate(request.scope, backend), request.path_params["file_id"]
        with database_errors():
            try:
                deleted = await files.delete(caller.tenant, file_id)
            except FileInUse as use:
                raise BadRequest(
                    f"The file is the input of {use.reader}, which is not over: cancel that first.",
                    param="file_id",
                    code="file_in_use",
                ) from use
        if not deleted:
            raise file_not_found(file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    return [create_file, list_files, retrieve_file, file_content, delete_file]


async def _refuse_anthropics(request: AnyRequest) -> None:
    """Raise NotFound for a client of Anthropic's API, whose SDK would misread OpenAI's file objects."""
    if from_anthropics(request.scope):
        raise NotFound("Anthropic's files are not served here; these are OpenAI's, for batches and training.")


@dataclass(frozen=True, slots=True)
class _Upload:
    """ASGI application that receives a file."""

    backend: Backend
    files: Files
    limits: BatchLimits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = await authenticate(scope, self.backend)
        form = UploadForm()
        try:
            with database_errors():
                file = await self._read(scope, receive, form, caller.tenant)
        except ClientGone:
            return
        finally:
            if form.writer is not None:  # the upload failed
                with database_errors():
                    await form.writer.discard()
        await json_response(file_json(file)).to_asgi_response(None, Request(scope))(scope, receive, send)

    async def _read(self, scope: Scope, receive: Receive, form: UploadForm, tenant: str) -> File:
        max_bytes = self.limits.file_bytes
        size = min(announced_bytes(scope) or max_bytes, max_bytes)
        await read_form(
            scope, receive, form, lambda: reserve_file(self.files, tenant, size, self.limits), max_bytes
        )
        purpose = form.fields.get("purpose")
        if form.writer is None or purpose is None:
            name = "file" if form.writer is None else "purpose"
            raise BadRequest(f"'{name}' is required.", param=name, code=MISSING)
        if purpose not in (Purpose.BATCH, Purpose.FINE_TUNE):
            text = "'purpose' can be 'batch' or 'fine-tune'."
            raise BadRequest(text, param="purpose", code="invalid_value")
        if form.writer.bytes == 0:
            raise BadRequest("The file is empty.", param="file", code="empty_file")
        kept_s = read_expires_after(
            form.fields.get("expires_after[anchor]"),
            form.fields.get("expires_after[seconds]"),
            self.limits.kept_s,
            "expires_after",
        )
        file = await form.writer.finish(form.filename or "upload.jsonl", purpose, kept_s)
        form.writer = None
        return file


@dataclass(frozen=True, slots=True)
class _Content:
    """ASGI application that sends the content of a file."""

    backend: Backend
    files: Files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = await authenticate(scope, self.backend)
        with database_errors():
            file = await get_file(self.files, caller.tenant, scope["path_params"]["file_id"])
        await while_connected(self._send(file, send), receive, within_s=UPLOAD_WITHIN_S)

    async def _send(self, file: File, send: Send) -> None:
        headers = [(b"content-type", b"application/octet-stream"), (b"content-length", b"%d" % file.bytes)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for part in self.files.parts(file):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def reserve_file(files: Files, tenant: str, size: int, limits: BatchLimits) -> FileWriter:
    """Begin a file of `size` bytes. Raises BadRequest if the tenant has no room for it."""
    try:
        return await files.reserve(tenant, size, limits.tenant_bytes)
    except StorageFull as full:
        raise BadRequest(
            f"Your files hold {full.stored} bytes, this one {size},"
            f" the most is {limits.tenant_bytes}: delete some.",
            code="storage_full",
        ) from full


async def get_file(files: Files, tenant: str, file_id: str) -> File:
    """Return a file of the tenant. Raises NotFound."""
    file = await files.get(tenant, file_id)
    if file is None:
        raise file_not_found(file_id)
    return file


def file_not_found(file_id: str) -> NotFound:
    return NotFound(f"No such File object: {file_id[:100]}", param="file_id")


def file_json(file: File) -> dict[str, Any]:
    """Render OpenAI's file object."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": int(file.created_at),
        "expires_at": int(file.expires_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


def read_expires_after(anchor: str | None, seconds: str | None, default_s: float, name: str) -> float:
    """Return the seconds for which a file is kept, read from the field `name`.

    Without the field, return `default_s`. Raises BadRequest.
    """
    if anchor is None and seconds is None:
        return default_s
    if anchor != "created_at":
        raise BadRequest(f"'{name}.anchor' can only be 'created_at'.", param=f"{name}.anchor")
    given = seconds or ""
    if not (given.isdecimal() and len(given) < 10 and HOUR_S <= int(given) <= 30 * DAY_S):
        raise BadRequest(f"'{name}.seconds' is from 3600 to 2592000.", param=f"{name}.seconds")
    return float(given)
