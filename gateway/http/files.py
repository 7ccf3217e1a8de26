"""/v1/files: upload, list, look at, read and delete the files of one's tenant, in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.datastructures import State
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Receive, Scope, Send
from sqlalchemy.exc import DataError, SQLAlchemyError

from gateway.batches.files import Files, FileWriter, InUse, NoRoom, Page
from gateway.batches.values import DAY_S, HOUR_S, BatchLimits, File, Purpose
from gateway.errors import BadRequest, NotFound, Overloaded
from gateway.http.auth import caller_of
from gateway.http.backend import Backend
from gateway.http.body import ClientGone
from gateway.http.disconnect import while_connected
from gateway.http.upload import MISSING, UPLOAD_WITHIN_S, Form, announced_bytes, read_form

AnyRequest = Request[Any, Any, State]
LIST_MOST: Final = 10_000


def file_routes(backend: Backend, files: Files, limits: BatchLimits) -> list[HTTPRouteHandler]:
    upload, content = _Upload(backend, files, limits), _Content(backend, files)

    @post("/v1/files", status_code=200)
    async def create_file() -> ASGIApp:
        return upload

    @get("/v1/files")
    async def list_files(request: AnyRequest) -> Response[bytes]:
        caller = await caller_of(request.scope, backend)
        page = page_of(request, LIST_MOST, LIST_MOST)
        with answering(page):
            found = await files.listed(caller.tenant, request.query_params.get("purpose"), page)
        return listing([shape(file) for file in found], page)

    @get("/v1/files/{file_id:str}")
    async def retrieve_file(request: AnyRequest) -> Response[bytes]:
        caller = await caller_of(request.scope, backend)
        with answering():
            return json(shape(await existing(files, caller.tenant, request.path_params["file_id"])))

    @get("/v1/files/{file_id:str}/content")
    async def file_content() -> ASGIApp:
        return content

    @delete("/v1/files/{file_id:str}", status_code=200)
    async def delete_file(request: AnyRequest) -> Response[bytes]:
        caller, file_id = await caller_of(request.scope, backend), request.path_params["file_id"]
        with answering():
            try:
                deleted = await files.delete(caller.tenant, file_id)
            except InUse as use:
                raise BadRequest(
                    f"The file is the input of {use.batch_id}, which is not over: cancel that first.",
                    param="file_id",
                    code="file_in_use",
                ) from use
        if not deleted:
            raise missing_file(file_id)
        return json({"id": file_id, "object": "file", "deleted": True})

    return [create_file, list_files, retrieve_file, file_content, delete_file]


@dataclass(frozen=True, slots=True)
class _Upload:
    backend: Backend
    files: Files
    limits: BatchLimits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = await caller_of(scope, self.backend)
        form = Form()
        try:
            with answering():
                file = await self._read(scope, receive, form, caller.tenant)
        except ClientGone:
            return
        finally:
            if form.writer is not None:  # nobody will finish it
                with answering():
                    await form.writer.discard()
        await json(shape(file)).to_asgi_response(None, Request(scope))(scope, receive, send)

    async def _read(self, scope: Scope, receive: Receive, form: Form, tenant: str) -> File:
        limit = self.limits.file_bytes
        size = min(announced_bytes(scope) or limit, limit)
        await read_form(scope, receive, form, lambda: self._begin(tenant, size), limit)
        purpose = form.fields.get("purpose")
        if form.writer is None or purpose is None:
            name = "file" if form.writer is None else "purpose"
            raise BadRequest(f"'{name}' is required.", param=name, code=MISSING)
        if purpose != Purpose.BATCH:
            raise BadRequest("'purpose' can only be 'batch'.", param="purpose", code="invalid_value")
        if form.writer.bytes == 0:
            raise BadRequest("The file is empty.", param="file", code="empty_file")
        kept_s = kept_for(
            form.fields.get("expires_after[anchor]"),
            form.fields.get("expires_after[seconds]"),
            self.limits.kept_s,
            "expires_after",
        )
        file = await form.writer.finish(form.filename or "upload.jsonl", purpose, kept_s)
        form.writer = None
        return file

    async def _begin(self, tenant: str, size: int) -> FileWriter:
        most = self.limits.tenant_bytes
        try:
            return await self.files.reserve(tenant, size, most)
        except NoRoom as full:
            raise BadRequest(
                f"Your files hold {full.stored} bytes, this one {size}, the most is {most}: delete some.",
                code="storage_full",
            ) from full


@dataclass(frozen=True, slots=True)
class _Content:
    backend: Backend
    files: Files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = await caller_of(scope, self.backend)
        with answering():
            file = await existing(self.files, caller.tenant, scope["path_params"]["file_id"])
        await while_connected(self._send(file, send), receive, within_s=UPLOAD_WITHIN_S)

    async def _send(self, file: File, send: Send) -> None:
        headers = [(b"content-type", b"application/octet-stream"), (b"content-length", b"%d" % file.bytes)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for part in self.files.parts(file):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def existing(files: Files, tenant: str, file_id: str) -> File:
    file = await files.get(tenant, file_id)
    if file is None:
        raise missing_file(file_id)
    return file


def missing_file(file_id: str) -> NotFound:
    return NotFound(f"No such File object: {file_id[:100]}", param="file_id")


def shape(file: File) -> dict[str, Any]:
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


def kept_for(anchor: str | None, seconds: str | None, default_s: float, name: str) -> float:
    """Of `expires_after` and its kin. Raises BadRequest."""
    if anchor is None and seconds is None:
        return default_s
    if anchor != "created_at":
        raise BadRequest(f"'{name}.anchor' can only be 'created_at'.", param=f"{name}.anchor")
    given = seconds or ""
    if not (given.isdecimal() and len(given) < 10 and HOUR_S <= int(given) <= 30 * DAY_S):
        raise BadRequest(f"'{name}.seconds' is from 3600 to 2592000.", param=f"{name}.seconds")
    return float(given)


# ---- what lists of files and of batches have in common


def page_of(request: AnyRequest, default: int, most: int) -> Page:
    """Raises BadRequest."""
    asked = request.query_params.get("limit", str(default))
    if not (asked.isascii() and asked.isdecimal() and len(asked) < 10 and 1 <= int(asked) <= most):
        raise BadRequest(f"'limit' is from 1 to {most}.", param="limit", code="invalid_value")
    order = request.query_params.get("order", "desc")
    if order not in {"asc", "desc"}:
        raise BadRequest("'order' is 'asc' or 'desc'.", param="order", code="invalid_value")
    return Page(int(asked), order == "desc", request.query_params.get("after"))


def listing(found: list[dict[str, Any]], page: Page) -> Response[bytes]:
    """`found` has one more than the page if there are more."""
    data = found[: page.limit]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return json({"object": "list", "data": data, **ends, "has_more": len(found) > page.limit})


def json(body: dict[str, Any]) -> Response[bytes]:
    return Response(msgspec.json.encode(body), media_type="application/json")


@contextmanager
def answering(page: Page | None = None) -> Iterator[None]:
    """What the database could not do, as an error that a client can read."""
    try:
        yield
    except LookupError as exc:
        if page is None:
            raise
        raise BadRequest(f"'after' names nothing: {page.after!r}."[:200], param="after") from exc
    except DataError as exc:  # Postgres keeps no NUL in a text
        raise BadRequest("A parameter has characters that no name here has.", code="invalid_value") from exc
    except (SQLAlchemyError, OSError) as exc:
        raise Overloaded("the database does not answer now", retry_after_s=2.0) from exc
