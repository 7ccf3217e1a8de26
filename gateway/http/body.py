"""Reads request bodies under a size limit, decodes and encodes JSON."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from litestar import Response
from litestar.exceptions import HTTPException
from litestar.types import Receive, Scope

from gateway.errors import BadRequest
from gateway.http.exchange import header

T = TypeVar("T")


_DECODE_ERRORS = (msgspec.DecodeError, ValueError, RecursionError)
"""msgspec does not wrap the ValueError for bytes that are not UTF-8."""


class ClientGone(Exception):
    """The client disconnected; there is nobody to answer."""


async def read_json(scope: Scope, receive: Receive, limit_bytes: int) -> dict[str, object]:
    """Read one JSON object. Raises BadRequest, HTTPException (413) or ClientGone."""
    media_type = header(scope, b"content-type").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise BadRequest(
            "The Content-Type of this endpoint is application/json.", code="invalid_content_type"
        )
    return decode(await read_bytes(scope, receive, limit_bytes))


async def read_bytes(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    """Read a body. Raises HTTPException (413) for the announced length, or once the limit is passed."""
    announced = header(scope, b"content-length")
    if announced.isdecimal() and int(announced) > limit_bytes:
        raise _too_large(limit_bytes)
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        part = message["body"]
        size += len(part)
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        parts.append(part)
        more = message["more_body"]
    return b"".join(parts)


def decode_as(raw: bytes, type_: type[T], message: str) -> T:
    """Decode `raw` as `type_`. Raises BadRequest: `message`, and the reason without what was sent."""
    try:
        return msgspec.json.decode(raw, type=type_)
    except _DECODE_ERRORS as exc:
        raise BadRequest(f"{message}: {exc}") from exc


def decode(raw: bytes) -> dict[str, object]:
    """Decode one JSON object. Raises BadRequest."""
    try:
        body = msgspec.json.decode(raw)
    except _DECODE_ERRORS as exc:
        raise BadRequest(f"The body is not valid JSON: {str(exc)[:200]}.", code="invalid_json") from exc
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.", code="invalid_type")
    return body


def json_response(body: dict[str, Any]) -> Response[bytes]:
    return Response(msgspec.json.encode(body), media_type="application/json")


def _too_large(limit_bytes: int) -> HTTPException:
    return HTTPException(status_code=413, detail=f"The body is larger than the limit of {limit_bytes} bytes.")
