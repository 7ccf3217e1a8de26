"""POST /v1/files: a multipart form whose file streams into the database as it arrives."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

from litestar.exceptions import HTTPException
from litestar.types import Receive, Scope
from multipart import (  # type: ignore[import-untyped]
    MultipartError,
    MultipartSegment,
    PushMultipartParser,
    parse_options_header,
)

from gateway.batches.files import FileWriter
from gateway.errors import BadRequest, DeadlinePassed
from gateway.http.body import ClientGone
from gateway.http.exchange import header

FIELD_BYTES: Final = 1_024
FIELDS: Final = 16
FRAME_BYTES: Final = 64 * 2**10
"""What a form may be larger than its file."""
FILENAME_CHARS: Final = 255
UPLOAD_WITHIN_S: Final = 1_800.0
MISSING: Final = "missing_required_parameter"

Begin = Callable[[], Coroutine[Any, Any, FileWriter]]


@dataclass(slots=True)
class Form:
    """What came. `writer` has the bytes of the file, if there was one; whoever reads the form ends it."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str = ""
    writer: FileWriter | None = None


async def read_form(scope: Scope, receive: Receive, form: Form, begin: Begin, limit_bytes: int) -> None:
    """Fills `form`. Raises BadRequest, HTTPException (413), DeadlinePassed or ClientGone."""
    parser = PushMultipartParser(_boundary(scope), max_segment_count=FIELDS, strict=False)
    try:
        async with asyncio.timeout(UPLOAD_WITHIN_S):
            with parser:
                await _Reading(form, begin, limit_bytes).read(parser, _body(scope, receive, limit_bytes))
    except MultipartError as exc:
        raise BadRequest(f"The multipart form is broken: {exc}.", code="invalid_multipart") from exc
    except TimeoutError as exc:
        raise DeadlinePassed(f"the file was not complete after {UPLOAD_WITHIN_S:.0f} s") from exc


class _Reading:
    """`segment` is the part of the form that is being read."""

    def __init__(self, form: Form, begin: Begin, limit_bytes: int) -> None:
        self._form = form
        self._begin = begin
        self._limit_bytes = limit_bytes
        self._segment: MultipartSegment | None = None
        self._text = bytearray()

    async def read(self, parser: PushMultipartParser, body: AsyncIterator[bytes]) -> None:
        async for chunk in body:
            for found in parser.parse(chunk):
                await self._take(found)
        parser.close()

    async def _take(self, found: MultipartSegment | bytearray | None) -> None:
        if isinstance(found, MultipartSegment):
            await self._open(found)
        elif found is None:
            self._end()
        elif self._is_file:
            assert self._form.writer is not None
            if self._form.writer.bytes + len(found) > self._limit_bytes:
                raise _too_large(self._limit_bytes)
            await self._form.writer.write(found)
        else:
            self._text += found
            if len(self._text) > FIELD_BYTES:
                raise BadRequest("A field of the form is too long.", param=self._name)

    @property
    def _is_file(self) -> bool:
        return self._name == "file"

    @property
    def _name(self) -> str:
        return "" if self._segment is None else str(self._segment.name)

    async def _open(self, segment: MultipartSegment) -> None:
        self._segment = segment
        self._text.clear()
        if self._is_file:
            if self._form.writer is not None:
                raise BadRequest("A form uploads one file.", param="file")
            self._form.filename = _safe(segment.filename or "")
            self._form.writer = await self._begin()

    def _end(self) -> None:
        if self._segment is not None and not self._is_file:
            self._form.fields[self._name] = self._text.decode(errors="replace")
        self._segment = None


def announced_bytes(scope: Scope) -> int:
    """Of the whole form; 0 if it comes in pieces that nobody counted."""
    announced = header(scope, b"content-length")
    return int(announced) if announced.isdecimal() else 0


async def _body(scope: Scope, receive: Receive, limit_bytes: int) -> AsyncIterator[bytes]:
    if announced_bytes(scope) > limit_bytes + FRAME_BYTES:
        raise _too_large(limit_bytes)
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        size += len(message["body"])
        if size > limit_bytes + FRAME_BYTES:
            raise _too_large(limit_bytes)
        if message["body"]:  # to the parser an empty one is the end
            yield message["body"]
        more = message["more_body"]


def _boundary(scope: Scope) -> str:
    kind, options = parse_options_header(header(scope, b"content-type"))
    boundary = options.get("boundary", "")
    if kind != "multipart/form-data" or not 0 < len(boundary) <= 200:
        raise BadRequest(
            "The Content-Type of this endpoint is multipart/form-data, with a boundary.",
            code="invalid_content_type",
        )
    return str(boundary)


def _safe(filename: str) -> str:
    """A name to show, never a path to open."""
    return re.sub(r"[\x00-\x1f\x7f]", "", filename.replace("\\", "/").rpartition("/")[2])[:FILENAME_CHARS]


def _too_large(limit_bytes: int) -> HTTPException:
    return HTTPException(status_code=413, detail=f"The file is larger than the limit of {limit_bytes} bytes.")
