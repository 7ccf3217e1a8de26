"""Reads the multipart form of POST /v1/files; its file streams into the database as it arrives."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote

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
from gateway.http.body import ClientGone, refuse_encoding
from gateway.http.exchange import header

MAX_FIELD_BYTES: Final = 1_024
MAX_FIELDS: Final = 16
FORM_OVERHEAD_BYTES: Final = 64 * 2**10
"""Maximum size of a form in excess of its file."""
MAX_FILENAME_CHARS: Final = 255
UPLOAD_WITHIN_S: Final = 1_800.0
_QUOTED: Final = re.compile(r'"(?:\\.|[^"\\])*"')
_EXTENDED_NAME: Final = re.compile(
    r"; *filename\* *= *(?P<charset>utf-8|iso-8859-1)'[^']*'(?P<encoded>[^;\s]+)", re.IGNORECASE
)
HEADER_CHARSET: Final = "iso-8859-1"
"""A charset that decodes any bytes: file names arrive in the charset of the sender's terminal."""
MISSING: Final = "missing_required_parameter"

BeginFile = Callable[[], Coroutine[Any, Any, FileWriter]]


@dataclass(slots=True)
class UploadForm:
    """The form as read so far. The caller finishes or discards `writer`, which is set if there is a file."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str = ""
    writer: FileWriter | None = None


async def read_form(
    scope: Scope, receive: Receive, form: UploadForm, begin: BeginFile, limit_bytes: int
) -> None:
    """Fill `form`. Raises BadRequest, HTTPException (413), DeadlinePassed or ClientGone."""
    refuse_encoding(scope)
    parser = PushMultipartParser(
        _boundary(scope), max_segment_count=MAX_FIELDS, header_charset=HEADER_CHARSET, strict=False
    )
    try:
        async with asyncio.timeout(UPLOAD_WITHIN_S):
            with parser:
                await _FormReader(form, begin, limit_bytes).read(
                    parser, _read_body(scope, receive, limit_bytes)
                )
    except MultipartError as exc:
        raise BadRequest(f"The multipart form is broken: {exc}.", code="invalid_multipart") from exc
    except TimeoutError as exc:
        raise DeadlinePassed(f"the file was not complete after {UPLOAD_WITHIN_S:.0f} s") from exc


class _FormReader:
    """Fills an UploadForm from the parser's events. `_segment` is the part being read."""

    def __init__(self, form: UploadForm, begin: BeginFile, limit_bytes: int) -> None:
        self._form = form
        self._begin = begin
        self._limit_bytes = limit_bytes
        self._segment: MultipartSegment | None = None
        self._text = bytearray()

    async def read(self, parser: PushMultipartParser, body: AsyncIterator[bytes]) -> None:
        async for chunk in body:
            for event in parser.parse(chunk):
                await self._on_event(event)
        parser.close()

    async def _on_event(self, event: MultipartSegment | bytearray | None) -> None:
        if isinstance(event, MultipartSegment):
            await self._begin_segment(event)
        elif event is None:
            self._end_segment()
        elif self._is_file:
            assert self._form.writer is not None
            if self._form.writer.bytes + len(event) > self._limit_bytes:
                raise _too_large(self._limit_bytes)
            await self._form.writer.write(event)
        else:
            self._text += event
            if len(self._text) > MAX_FIELD_BYTES:
                raise BadRequest("A field of the form is too long.", param=self._name)

    @property
    def _is_file(self) -> bool:
        return self._name == "file"

    @property
    def _name(self) -> str:
        return "" if self._segment is None else str(self._segment.name)

    async def _begin_segment(self, segment: MultipartSegment) -> None:
        self._segment = segment
        self._text.clear()
        if self._is_file:
            if self._form.writer is not None:
                raise BadRequest("A form uploads one file.", param="file")
            self._form.filename = _safe_filename(_filename(segment))
            self._form.writer = await self._begin()

    def _end_segment(self) -> None:
        if self._segment is not None and not self._is_file:
            self._form.fields[self._name] = self._text.decode(errors="replace")
        self._segment = None


def announced_bytes(scope: Scope) -> int:
    """Return the length of the whole form, 0 if it is sent in chunks without a length."""
    announced = header(scope, b"content-length")
    return int(announced) if announced.isdecimal() else 0


async def _read_body(scope: Scope, receive: Receive, limit_bytes: int) -> AsyncIterator[bytes]:
    if announced_bytes(scope) > limit_bytes + FORM_OVERHEAD_BYTES:
        raise _too_large(limit_bytes)
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        size += len(message["body"])
        if size > limit_bytes + FORM_OVERHEAD_BYTES:
            raise _too_large(limit_bytes)
        if message["body"]:  # the parser treats an empty chunk as the end
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


def _filename(segment: MultipartSegment) -> str:
    """Return a file's name: `filename*` (RFC 5987) if decodable, else `filename` in UTF-8 or Latin-1."""
    unquoted = _QUOTED.sub("", segment.header("Content-Disposition", ""))
    if found := _EXTENDED_NAME.search(unquoted):
        with suppress(UnicodeDecodeError):
            return unquote(found["encoded"], found["charset"], "strict")
    name: str = segment.filename or ""
    with suppress(UnicodeDecodeError):
        return name.encode(HEADER_CHARSET).decode()
    return name


def _safe_filename(filename: str) -> str:
    """Return a name to display, never a path to open."""
    return re.sub(r"[\x00-\x1f\x7f]", "", filename.replace("\\", "/").rpartition("/")[2])[:MAX_FILENAME_CHARS]


def _too_large(limit_bytes: int) -> HTTPException:
    return HTTPException(status_code=413, detail=f"The file is larger than the limit of {limit_bytes} bytes.")
