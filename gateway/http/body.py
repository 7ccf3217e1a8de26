"""A request's body: read under a limit, decoded as one JSON object."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from litestar.exceptions import HTTPException
from litestar.types import Receive, Scope

from gateway.errors import BadRequest
from gateway.http.exchange import header

T = TypeVar("T")


_BROKEN = (msgspec.DecodeError, ValueError, RecursionError)
"""Bytes that are no UTF-8 are a ValueError that msgspec does not wrap."""


class ClientGone(Exception):
    """The client went away; there is nobody to answer."""


async def read_json(scope: Scope, receive: Receive, limit_bytes: int) -> dict[str, object]:
    media_type = header(scope, b"content-type").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise BadRequest(
            "The Content-Type of this endpoint is application/json.", code="invalid_content_type"
        )
    return decode(await read_bytes(scope, receive, limit_bytes))


async def read_bytes(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    """Refuses by the announced length if there is one, else as soon as the limit is passed."""
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


def decode_as(raw: bytes, kind: type[T], otherwise: str) -> T:
    """Raises BadRequest that begins with `otherwise` and never repeats what was sent."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except _BROKEN as exc:
        raise BadRequest(f"{otherwise}: {exc}") from exc


def decode(raw: bytes) -> dict[str, object]:
    try:
        body = msgspec.json.decode(raw)
    except _BROKEN as exc:
        raise BadRequest(f"The body is not valid JSON: {str(exc)[:200]}.", code="invalid_json") from exc
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.", code="invalid_type")
    return body


def _too_large(limit_bytes: int) -> HTTPException:
    return HTTPException(status_code=413, detail=f"The body is larger than the limit of {limit_bytes} bytes.")
