"""The HTTP server: uvicorn, with limits on how slowly, how much and how often one connection may send.

Limits the sending only: what an answer may take is limited where it is made.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

import uvicorn
from litestar.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.config import ConfigError
from gateway.openai.error_body import ErrorResponse
from gateway.security.tls import CertificateFiles

log = logging.getLogger(__name__)

HELD_BYTES = 64 * 1024
"""What one connection may hold back; beyond, a client that does not read is to be noticed at once."""


@dataclass(frozen=True, slots=True)
class Limits:
    """A request has `slow_s`, and a second more for every `bytes_per_s` of it, to arrive in full.

    `header_bytes` bounds what comes before a body, `unread_bytes` what is still sent after the answer.
    """

    connections: int = 20_000
    slow_s: float = 20.0
    bytes_per_s: int = 32 * 1024
    header_bytes: int = 64 * 1024
    unread_bytes: int = 16 * 2**20


class Outgoing:
    """What the responses of one connection write to. What is written in one turn of the event loop is sent at
    its end, or at the end of the response: a short answer is one packet and one system call, and of streams
    that come on together all are encoded before the first is sent, so that code stays in its cache.
    """

    __slots__ = ("_held", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held = b""

    def write(self, data: bytes) -> None:
        if data and not self._held:
            self._loop.call_soon(self.flush)
        self._held += data
        if len(self._held) > HELD_BYTES:
            self.flush()

    def flush(self) -> None:
        held, self._held = self._held, b""
        if held and not self._transport.is_closing():
            self._transport.write(held)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class GuardedProtocol(HttpToolsProtocol):
    """One connection. What breaks a limit is cut off: whoever sends like that does not wait for an answer."""

    def __init__(self, *args: Any, limits: Limits, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._limits = limits
        self._outgoing: Outgoing
        self._late: asyncio.TimerHandle | None = None
        self._began_s = 0.0
        self._received = 0
        self._in_head = True
        self._unread = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._outgoing = Outgoing(transport, self.loop)
        if len(self.connections) > self._limits.connections:
            transport.abort()
        else:
            self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)
        if self._in_head and self._received > self._limits.header_bytes:
            self.transport.abort()
        elif self._late is None and self._at_rest():
            self._expect()  # it sent something that begins no request, and so lost its time of rest

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._received, self._unread = True, 0, 0
        self._expect()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()
        self.cycle.transport = self._outgoing  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self.cycle.response_complete:
            self._unread += len(body)
            if self._unread > self._limits.unread_bytes:
                self.transport.abort()

    def on_message_complete(self) -> None:
        self._arrived()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._outgoing.flush()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is told so in the shape of every error, but never within the answer before it."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_no_http())
        self.transport.close()

    def _at_rest(self) -> bool:
        """Nothing is being answered, and no timer of uvicorn's runs."""
        answered = self.cycle is None or self.cycle.response_complete
        return answered and self.timeout_keep_alive_task is None and not self.transport.is_closing()

    def _expect(self) -> None:
        """A request is due from now on."""
        self._arrived()
        self._began_s = self.loop.time()
        self._late = self.loop.call_later(self._limits.slow_s, self._look)

    def _arrived(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _look(self) -> None:
        """Cut the connection, unless what came meanwhile earns it more time or nobody reads it here."""
        allowed_s = self._limits.slow_s + self._received / self._limits.bytes_per_s
        rest_s = self._began_s + allowed_s - self.loop.time()
        if self.flow is not None and self.flow.read_paused:
            rest_s = max(rest_s, self._limits.slow_s)  # it is us who do not read
        if rest_s <= 0:
            self.transport.abort()
        else:
            self._late = self.loop.call_later(rest_s, self._look)


def _no_http() -> bytes:
    message = "This is no HTTP request that can be read: its method, URL or headers are malformed."
    body = ErrorResponse(400, message, "invalid_request_error", "invalid_http").body()
    head = (
        "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nx-content-type-options: nosniff\r\n"
        f"x-request-id: {uuid4().hex}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


class HttpServer(uvicorn.Server):
    """Signals are the process's, not the server's. Raises ConfigError where it can't listen."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit as exc:  # so uvicorn ends a process in which it is the only thing that runs
            where = f"{self.config.host}:{self.config.port}"
            raise ConfigError(f"clients can't ask at {where}: taken, or not of this machine") from exc
        for listening in (each for server in self.servers for each in server.sockets):
            log.info("clients ask at %s:%d", *listening.getsockname()[:2])

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(
    app: ASGIApp,
    *,
    host: str,
    port: int,
    end_within_s: float,
    certificate: CertificateFiles | None = None,
    limits: Limits = Limits(),
) -> HttpServer:
    """`end_within_s`: how long answers may go on once the server is told to end."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=partial(GuardedProtocol, limits=limits),  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=False,  # who asks is who connects: anybody can write a header
        timeout_keep_alive=75,  # longer than what balancers and pooled clients keep open
        timeout_graceful_shutdown=max(1, round(end_within_s)),
        ssl_context_factory=None if certificate is None else lambda *_: certificate.context(),
    )
    return HttpServer(config)
