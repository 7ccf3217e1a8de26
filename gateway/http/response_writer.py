"""Writes the common parts of a response, its head and the chunks of a stream. uvicorn writes the rest.

uvicorn searches the name and value of each header for illegal characters, and creates a coroutine for every
chunk. That is a tenth of the gateway's work in Python for a query.
"""

from __future__ import annotations

import re
import sys
from asyncio import Future
from collections.abc import Awaitable

from litestar.types import HTTPResponseStartEvent, Message
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

_NAMES = re.compile(rb"[a-z0-9\n-]+")
_CONTROL = bytes([*range(9), *range(10, 32), 127])
"""Bytes that a header value must not contain, since they could end it: all controls except the tab."""
_READ_BY_UVICORN = frozenset((b"connection", b"transfer-encoding"))
_WITHOUT_BODY = frozenset((204, 304))


class ResponseWriter:
    """Writes one response. `sent` is a completed future, returned for each message written immediately."""

    __slots__ = ("_cycle", "_in_chunks", "_sent", "_until_close")

    def __init__(self, cycle: RequestResponseCycle, sent: Future[None]) -> None:
        self._cycle = cycle
        self._sent = sent
        self._in_chunks = False  # the response has no content-length
        self._until_close = False  # nor chunks, which HTTP/1.0 lacks: it ends when the connection closes

    def send(self, message: Message) -> Awaitable[None]:
        """Send a message of the application. Raises the errors of uvicorn's `send`."""
        cycle = self._cycle
        if cycle.scope["http_version"] == "1.0":
            self._frame_for_http_1_0(message)
        if cycle.disconnected or cycle.flow.write_paused:
            return cycle.send(message)  # type: ignore[arg-type]
        if self._in_chunks and message["type"] == "http.response.body":
            body = message["body"]
            if body and message["more_body"] and not cycle.response_complete:
                cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
                return self._sent
        elif message["type"] == "http.response.start" and (head := self._head(message)):
            cycle.transport.write(head)
            return self._sent
        return cycle.send(message)  # type: ignore[arg-type]

    def _frame_for_http_1_0(self, message: Message) -> None:
        """Make uvicorn send a body of unknown length without chunks and close the connection after it."""
        cycle = self._cycle
        if message["type"] == "http.response.start":
            self._until_close = b"content-length" not in dict(message["headers"])
            if self._until_close:
                cycle.chunked_encoding, cycle.expected_content_length = False, sys.maxsize
        elif message["type"] == "http.response.body" and self._until_close and not message["more_body"]:
            cycle.expected_content_length = len(message["body"])

    def _head(self, message: HTTPResponseStartEvent) -> bytes:
        """Begin a response and return its head; empty if the response is left to uvicorn."""
        cycle, status = self._cycle, message["status"]
        headers = [*cycle.default_headers, *message["headers"]]
        fields = dict(headers)
        values = b"".join([value for _, value in headers])
        if (
            cycle.response_started
            or len(fields) != len(headers)
            or not fields.keys().isdisjoint(_READ_BY_UVICORN)
            or not _NAMES.fullmatch(b"\n".join(fields))
            or len(values.translate(None, _CONTROL)) != len(values)
            or cycle.scope["method"] == "HEAD"
            or status in _WITHOUT_BODY
            or self._until_close
        ):
            return b""
        lines = [STATUS_LINE[status], *[b"%b: %b\r\n" % each for each in headers]]
        if not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        length = fields.get(b"content-length")
        self._in_chunks = cycle.chunked_encoding = length is None
        if length is None:
            lines.append(b"transfer-encoding: chunked\r\n")
        else:
            cycle.expected_content_length = int(length)
        lines.append(b"\r\n")
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        return b"".join(lines)
