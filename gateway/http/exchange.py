"""One HTTP request and its response: ids, clock, the headers that every response carries, the log line.

Wraps the framework's outermost layer: unknown paths and wrong methods never reach ordinary middleware.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from gateway.domain import Caller
from gateway.http.rate_headers import ShownQuota, no_quota, rate_headers
from gateway.telemetry.logs import LINE, REQUEST_ID, Line

log = logging.getLogger(__name__)

REQUEST_ID_LIMIT_CHARS = 128
_LOGGED = (b"openai-organization", b"openai-project", b"user-agent")
_LOGGED_PREFIX = b"x-stainless-"
_LOGGED_LIMIT_CHARS = 200
_ALWAYS = [(b"x-content-type-options", b"nosniff")]
_ALWAYS_OVER_TLS = [*_ALWAYS, (b"strict-transport-security", b"max-age=31536000")]


@dataclass(slots=True)
class Exchange:
    """`request_id` is the client's own if it sent a proper one; `query_id` is always ours and unique.

    `caller` is known once a generating request has shown its key: its quotas are told in the headers.
    `complete` tells a response that was sent to its end from one whose client left or that was cut. `line` is
    what the log will say of both, with what is known of the query by then.
    """

    request_id: str
    query_id: str
    started_s: float
    status: int = 0
    complete: bool = False
    caller: Caller | None = None
    line: Line = field(default_factory=Line)

    @classmethod
    def of(cls, scope: Scope) -> Exchange:
        exchange = scope["state"]["exchange"]
        assert isinstance(exchange, cls)
        return exchange


def header(scope: Scope, name: bytes) -> str:
    """The first value of a header, empty if it was not sent."""
    for key, value in scope["headers"]:
        if key == name:
            return value.decode("latin-1")
    return ""


def safe_header_value(text: str) -> bytes:
    """Nothing a site or a client named can break out of its header."""
    return "".join(c for c in text if c.isascii() and c.isprintable()).encode()


class Envelope:
    """`direct`: applications by the path of a POST, which need nothing of the framework that `app` is."""

    def __init__(
        self,
        app: ASGIApp,
        direct: Mapping[str, ASGIApp],
        clock: Callable[[], float],
        new_id: Callable[[], str],
        shown_quota: ShownQuota = no_quota,
    ) -> None:
        self._app = app
        self._direct = direct
        self._shown_quota = shown_quota
        self._clock = clock
        self._new_id = new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        exchange = self._open(scope)
        scope["state"]["exchange"] = exchange
        REQUEST_ID.set(exchange.request_id)
        LINE.set(exchange.line)
        always = _ALWAYS_OVER_TLS if scope["scheme"] == "https" else _ALWAYS

        async def stamp(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [*message["headers"], *self._headers(exchange), *always]
            elif message["type"] == "http.response.body" and not message.get("more_body"):
                exchange.complete = True
            await send(message)

        try:
            await self._app_for(scope)(scope, receive, stamp)
        finally:
            self._log(scope, exchange)

    def _app_for(self, scope: Scope) -> ASGIApp:
        """A page of another origin needs the framework's headers for it, too."""
        posted = scope["method"] == "POST"  # type: ignore[typeddict-item]
        app = self._direct.get(scope["path"]) if posted else None
        return self._app if app is None or header(scope, b"origin") else app

    def _open(self, scope: Scope) -> Exchange:
        query_id = self._new_id()
        sent = header(scope, b"x-request-id")
        proper = 0 < len(sent) <= REQUEST_ID_LIMIT_CHARS and sent.isascii() and sent.isprintable()
        return Exchange(sent if proper else query_id, query_id, self._clock())

    def _headers(self, exchange: Exchange) -> list[tuple[bytes, bytes]]:
        elapsed_ms = round(1000 * (self._clock() - exchange.started_s))
        told = rate_headers(exchange.caller, self._shown_quota) if exchange.caller else []
        return [
            (b"x-request-id", exchange.request_id.encode()),
            (b"openai-processing-ms", b"%d" % elapsed_ms),
            *told,
        ]

    def _log(self, scope: Scope, exchange: Exchange) -> None:
        """Status 499 means that the client went away before a status was sent."""
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
        log.info("%s %s", scope["method"], scope["path"], extra=fields)  # type: ignore[typeddict-item]


def _client_headers(scope: Scope) -> dict[str, str]:
    return {
        name.decode("latin-1"): value.decode("latin-1")[:_LOGGED_LIMIT_CHARS]
        for name, value in scope["headers"]
        if name in _LOGGED or name.startswith(_LOGGED_PREFIX)
    }
