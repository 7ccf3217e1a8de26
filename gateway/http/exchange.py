"""Tracks each HTTP request and its response: ids, time, the headers of every response, the log line.

Wraps the framework's outermost layer: unknown paths and wrong methods never reach ordinary middleware.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from litestar import Request
from litestar.datastructures import State
from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from gateway.domain import Caller
from gateway.http.rate_headers import QuotaLookup, no_quota, rate_headers
from gateway.telemetry.logs import REQUEST_ID, REQUEST_LINE, RequestLine

AnyRequest = Request[Any, Any, State]
log = logging.getLogger(__name__)

MAX_REQUEST_ID_CHARS = 128
_LOGGED_HEADERS = (b"openai-organization", b"openai-project", b"user-agent")
_LOGGED_PREFIX = b"x-stainless-"
_MAX_LOGGED_CHARS = 200
_ALWAYS = [(b"x-content-type-options", b"nosniff")]
_ALWAYS_OVER_TLS = [*_ALWAYS, (b"strict-transport-security", b"max-age=31536000")]


@dataclass(slots=True)
class Exchange:
    """One request and its response. `request_id` is the client's own if it sent a valid one; `query_id` is
    generated here and unique.

    `caller` is set once a generating request is authenticated; the response headers show its quotas.
    `complete` is True once the whole response was sent. `line` collects the fields of the log line, including
    those of the query.
    """

    request_id: str
    query_id: str
    started_s: float
    status: int = 0
    complete: bool = False
    caller: Caller | None = None
    line: RequestLine = field(default_factory=RequestLine)

    @classmethod
    def of(cls, scope: Scope) -> Exchange:
        exchange = scope["state"]["exchange"]
        assert isinstance(exchange, cls)
        return exchange


def path_after(request: AnyRequest, prefix: str) -> str:
    """Return the decoded raw path after `prefix`. The framework's parameter would merge double slashes."""
    return unquote(request.scope["raw_path"].decode("ascii")).removeprefix(prefix)


def header(scope: Scope, name: bytes) -> str:
    """Return the first value of a header, empty if it was not sent."""
    for key, value in scope["headers"]:
        if key == name:
            return value.decode("latin-1")
    return ""


def from_anthropics(scope: Scope) -> bool:
    """Return whether the client uses Anthropic's API, that is, sends the header `anthropic-version`."""
    return bool(header(scope, b"anthropic-version"))


def safe_header_value(text: str) -> bytes:
    """Encode a name that a site or client chose, without characters that could break out of a header."""
    if text.isascii() and text.isprintable():
        return text.encode()
    return "".join(c for c in text if c.isascii() and c.isprintable()).encode()


class ExchangeMiddleware:
    """Runs the application that serves a request, adds the headers of every response, writes the log line.

    `direct` maps paths to applications that serve a POST in place of `app`, the framework's application.
    """

    def __init__(
        self,
        app: ASGIApp,
        direct: Mapping[str, ASGIApp],
        clock: Callable[[], float],
        new_id: Callable[[], str],
        quota_status: QuotaLookup = no_quota,
    ) -> None:
        self._app = app
        self._direct = direct
        self._quota_status = quota_status
        self._clock = clock
        self._new_id = new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        exchange = self._start(scope)
        scope["state"]["exchange"] = exchange
        REQUEST_ID.set(exchange.request_id)
        REQUEST_LINE.set(exchange.line)
        always = _ALWAYS_OVER_TLS if scope["scheme"] == "https" else _ALWAYS
        served = scope
        if scope["method"] == "HEAD":
            served, send = {**scope, "method": "GET"}, _head_only(send)

        def send_with_headers(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                exchange.complete = scope["method"] == "HEAD"  # nothing follows
                message["headers"] = [
                    *_allowing_head(message["headers"]),
                    *self._headers(scope, exchange),
                    *always,
                ]
            elif message["type"] == "http.response.body" and not message.get("more_body"):
                exchange.complete = True
            return send(message)

        try:
            await self._select_app(served)(served, receive, send_with_headers)
        finally:
            self._log(scope, exchange)

    def _select_app(self, scope: Scope) -> ASGIApp:
        """Return the application for a request. One with an `origin` gets the framework's, for CORS."""
        is_post = scope["method"] == "POST"  # type: ignore[typeddict-item]
        app = self._direct.get(scope["path"]) if is_post else None
        return self._app if app is None or header(scope, b"origin") else app

    def _start(self, scope: Scope) -> Exchange:
        query_id = self._new_id()
        sent = header(scope, b"x-request-id")
        valid = 0 < len(sent) <= MAX_REQUEST_ID_CHARS and sent.isascii() and sent.isprintable()
        return Exchange(sent if valid else query_id, query_id, self._clock())

    def _headers(self, scope: Scope, exchange: Exchange) -> list[tuple[bytes, bytes]]:
        elapsed_ms = round(1000 * (self._clock() - exchange.started_s))
        limits = rate_headers(exchange.caller, self._quota_status) if exchange.caller else []
        request_id = exchange.request_id.encode()
        ids = [(b"x-request-id", request_id)]
        if from_anthropics(scope):
            ids.append((b"request-id", request_id))
        return [*ids, (b"openai-processing-ms", b"%d" % elapsed_ms), *limits]

    def _log(self, scope: Scope, exchange: Exchange) -> None:
        """Write the log line. Status 499: the client disconnected before a status was sent."""
        exchange.line.is_written = True
        if not log.isEnabledFor(logging.INFO):
            return
        fields = {
            "request_id": exchange.request_id,
            "query_id": exchange.query_id,
            "status": exchange.status or 499,
            "complete": exchange.complete,
            "duration_ms": round(1000 * (self._clock() - exchange.started_s)),
            "client": _client_headers(scope),
            **exchange.line.fields,
        }
        log.info("%s %s", scope["method"], scope["path"], extra={"fields": fields})  # type: ignore[typeddict-item]


def _allowing_head(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers, with HEAD in `allow` wherever GET is: HEAD is served as GET."""
    return [
        (name, value + b", HEAD" if name == b"allow" and b"GET" in value and b"HEAD" not in value else value)
        for name, value in headers
    ]


def _head_only(send: Send) -> Send:
    """Return a `send` that ends each response after its head, even if the body is an endless stream."""

    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return send_head


def _client_headers(scope: Scope) -> dict[str, str]:
    return {
        name.decode("latin-1"): value.decode("latin-1")[:_MAX_LOGGED_CHARS]
        for name, value in scope["headers"]
        if name in _LOGGED_HEADERS or name.startswith(_LOGGED_PREFIX)
    }
