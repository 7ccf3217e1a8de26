"""Reads request bodies within limits for each and for all of them, and decodes and encodes JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from litestar import Response
from litestar.exceptions import HTTPException
from litestar.types import Receive, Scope

from gateway.bounded_json import DECODE_ERRORS, decode
from gateway.errors import BadRequest, Overloaded
from gateway.http.disconnect import while_connected
from gateway.http.exchange import header
from gateway.memory_budget import Hold, MemoryBudget
from gateway.openai.fields import echo
from gateway.side_work import INLINE_BYTES, SideWork

T = TypeVar("T")

MAX_BODIES_BYTES = 2**29
"""Maximum bytes of all bodies that have not become queries yet: 50 kB each for 10,000 of them."""
DECODE_WITHIN_S = 60.0
RETRY_AFTER_S = 1.0


class ClientGone(Exception):
    """The client disconnected; there is nobody to answer."""


class BodyReader:
    """Reads the JSON bodies of all tenants. Large bodies are decoded one at a time; tenants take turns."""

    def __init__(self, side_work: SideWork | None = None, max_bytes: int = MAX_BODIES_BYTES) -> None:
        self.memory = MemoryBudget(max_bytes)
        self._side_work = side_work or SideWork()

    async def read_json(
        self,
        scope: Scope,
        receive: Receive,
        tenant: str,
        limit_bytes: int,
        read: Callable[[dict[str, object]], T],
    ) -> T:
        """Return the result of `read` for the body's JSON object.

        Raises what `read` raises, BadRequest, HTTPException (413), Overloaded or ClientGone.
        """
        media_type = header(scope, b"content-type").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise BadRequest(
                "The Content-Type of this endpoint is application/json.", code="invalid_content_type"
            )
        refuse_encoding(scope)
        with self.memory.hold(tenant) as hold:
            raw = await _read_bytes(scope, receive, limit_bytes, hold)
            if len(raw) <= INLINE_BYTES:
                return _read(raw, read)
            work = self._side_work.run(tenant, lambda: (_read(raw, read),))
            found = await while_connected(work, receive, within_s=DECODE_WITHIN_S)
        if found is None:
            raise ClientGone
        return found[0]


def refuse_encoding(scope: Scope) -> None:
    """Raise BadRequest for a compressed body, whose decompressed size could not be bounded in advance."""
    encoding = header(scope, b"content-encoding").strip()
    if encoding.lower() not in ("", "identity"):
        raise BadRequest(
            f"The body is sent with the Content-Encoding {echo(encoding)}: send it as it is.",
            code="invalid_content_encoding",
        )


def _read(raw: bytes, read: Callable[[dict[str, object]], T]) -> T:
    """Return the result of `read` for a body. Raises BadRequest for a body that nests too deeply.

    `read` may encode parts of the body again, deeper in the call stack than they were decoded.
    """
    try:
        return read(decode(raw))
    except RecursionError as exc:
        raise BadRequest("The body nests objects and lists too deeply.", code="invalid_json") from exc


async def _read_bytes(scope: Scope, receive: Receive, limit_bytes: int, hold: Hold) -> bytes:
    """Read a body. Raises HTTPException (413) if its announced or received length exceeds the limit,
    Overloaded if `hold` has no room for the next part, and ClientGone.
    """
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
        if not hold.take(len(part)):
            raise Overloaded("the bodies being read fill the memory for them", retry_after_s=RETRY_AFTER_S)
        parts.append(part)
        more = message["more_body"]
    return b"".join(parts)


def decode_as(raw: bytes, type_: type[T], message: str) -> T:
    """Decode `raw` as `type_`. Raises BadRequest with `message` and the reason, but not the content sent."""
    try:
        return msgspec.json.decode(raw, type=type_)
    except DECODE_ERRORS as exc:
        raise BadRequest(f"{message}: {exc}") from exc


def json_response(body: dict[str, Any]) -> Response[bytes]:
    return Response(msgspec.json.encode(body), media_type="application/json")


def _too_large(limit_bytes: int) -> HTTPException:
    return HTTPException(status_code=413, detail=f"The body is larger than the limit of {limit_bytes} bytes.")
