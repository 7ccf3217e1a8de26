"""Runs uvicorn with limits on the number of connections, and on the pace and volume that each may send.

The duration of an answer is limited by its endpoint.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

import httptools
import uvicorn
from litestar.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.config import ConfigError
from gateway.http.disconnect import LEFT
from gateway.http.response_writer import ResponseWriter
from gateway.openai.error_body import ErrorResponse
from gateway.security.tls import CertificateFiles

log = logging.getLogger(__name__)

MAX_BUFFERED_BYTES = 64 * 1024
"""Size at which a write buffer is flushed, so that the transport notices a client that does not read."""
MAX_UNSENT_BYTES = 16 * 1024
"""Unread bytes that a connection's transport buffers in addition to the kernel; above it, answers wait."""

ACCEPTS_IN_A_ROW = 16
"""Backlog given to asyncio, which accepts that many connections in a row. Without free file descriptors, it
logs as many errors and starts as many timers every second. The kernel gets uvicorn's larger backlog.
"""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The TLS handshake must complete within `slow_s` seconds. A request must arrive in full within another
    `slow_s`, plus one second for every `bytes_per_s` bytes of it.

    `header_bytes` bounds everything before the body, `unread_bytes` the bytes of a body that arrive after its
    answer.
    """

    connections: int = 20_000
    slow_s: float = 20.0
    bytes_per_s: int = 32 * 1024
    header_bytes: int = 64 * 1024
    unread_bytes: int = 16 * 2**20


class HeadTooLarge(Exception):
    """Raised for a request whose line and headers are larger than the limit."""


class WriteBuffer:
    """Buffers the output of a connection until the event loop's iteration or the response ends.

    A short answer is then one packet and one system call. When several streams advance in one iteration, all
    are encoded before the first is sent, so that the encoder's code stays in the CPU's cache.
    """

    __slots__ = ("_buffer", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._buffer = b""

    def write(self, data: bytes) -> None:
        if data and not self._buffer:
            self._loop.call_soon(self.flush)
        self._buffer += data
        if len(self._buffer) > MAX_BUFFERED_BYTES:
            self.flush()

    def flush(self) -> None:
        data, self._buffer = self._buffer, b""
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol. Aborts its connection without an answer when the client exceeds a limit."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._limits = limits
        self._write_buffer: WriteBuffer
        self._sent: asyncio.Future[None]
        self._left: asyncio.Future[None]
        self._timer: asyncio.TimerHandle | None = None
        self._started_s = 0.0
        self._received = 0
        self._in_head = True
        self._in_message = False
        self._head_bytes = 0
        self._unread = 0
        self._declined = b""  # the head of a request that offers another protocol, without the offer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        self._write_buffer = WriteBuffer(transport, self.loop)
        self._sent = self.loop.create_future()
        self._sent.set_result(None)
        self._left = self.loop.create_future()
        self.app_state = {**self.app_state, LEFT: self._left}
        if len(self.connections) > self._limits.connections:
            transport.abort()
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        self._left.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        self._unset_keepalive_if_required()
        rest = data
        while rest:
            rest = self._parse(rest)
        if self._in_head and self._received > self._limits.header_bytes:
            self.transport.abort()
        elif self._timer is None and (self._in_message or self._is_idle()):
            # A request that arrived whole needs no timer. Other bytes have stopped the keep-alive timer.
            self._start_timer()

    def _parse(self, data: bytes) -> bytes:
        """Parse `data` and return the bytes to parse next, if any. The parser reads no body of a request that
        offers another protocol, so the request is parsed again without the offer, which servers may ignore.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.send_400_response("")
        except httptools.HttpParserUpgrade as offer:
            if self._declined:
                head, self._declined = self._declined, b""
                # A new parser, configured like uvicorn's: the old one may regard the connection as closed.
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                return head + data[offer.args[0] :]
        return b""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._received, self._head_bytes, self._unread = True, 0, 0, 0
        self._in_message = True
        self._stop_timer()

    def on_url(self, url: bytes) -> None:
        """Count a part of the request's head. Raises HeadTooLarge to end parsing."""
        self._head_bytes += len(url)
        if self._head_bytes > self._limits.header_bytes:
            raise HeadTooLarge
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > self._limits.header_bytes:
            raise HeadTooLarge
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and (method := self.parser.get_method()) != b"CONNECT":
            version = self.parser.get_http_version().encode()
            kept = [b"%b: %b\r\n" % each for each in self.headers if each[0] != b"upgrade"]
            self._declined = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(kept))
            return
        self._in_head = False
        super().on_headers_complete()
        self.cycle.transport = self._write_buffer  # type: ignore[assignment]

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        writer = ResponseWriter(cycle, self._sent)
        super()._start_asgi_task(cycle, lambda scope, receive, _: app(scope, receive, writer.send))

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self.cycle.response_complete:
            self._unread += len(body)
            if self._unread > self._limits.unread_bytes:
                self.transport.abort()

    def on_message_complete(self) -> None:
        if self._declined:
            return
        self._in_message = False
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._write_buffer.flush()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer a malformed request with an error in the usual format, but never inside another answer."""
        if self.cycle is None or self.cycle.response_complete:
            too_large = self._head_bytes > self._limits.header_bytes
            self.transport.write(_head_too_large(self._limits) if too_large else _malformed_request())
        self.transport.close()

    def _is_idle(self) -> bool:
        """Return whether no answer is in progress and uvicorn's keep-alive timer is not running."""
        answered = self.cycle is None or self.cycle.response_complete
        return answered and self.timeout_keep_alive_task is None and not self.transport.is_closing()

    def _start_timer(self) -> None:
        """Start the time limit of a request, counted from now."""
        self._stop_timer()
        self._started_s = self.loop.time()
        self._timer = self.loop.call_later(self._limits.slow_s, self._check_progress)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_progress(self) -> None:
        """Abort the connection, unless the bytes received allow more time or this side has paused reading."""
        allowed_s = self._limits.slow_s + self._received / self._limits.bytes_per_s
        remaining_s = self._started_s + allowed_s - self.loop.time()
        if self.flow is not None and self.flow.read_paused:
            remaining_s = max(remaining_s, self._limits.slow_s)  # this side does not read
        if remaining_s <= 0:
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(remaining_s, self._check_progress)


def _malformed_request() -> bytes:
    message = "This is no HTTP request that can be read: its method, URL or headers are malformed."
    return _unread_response("400 Bad Request", message)


def _head_too_large(limits: ConnectionLimits) -> bytes:
    message = f"The URL and the headers are larger than the limit of {limits.header_bytes} bytes."
    return _unread_response("431 Request Header Fields Too Large", message)


def _unread_response(status: str, message: str) -> bytes:
    body = ErrorResponse(int(status[:3]), message, "invalid_request_error", "invalid_http").body()
    head = (
        f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nx-content-type-options: nosniff\r\n"
        f"x-request-id: {uuid4().hex}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


class HttpServer(uvicorn.Server):
    """uvicorn's server without its handling of signals. `startup` raises ConfigError if it cannot listen.

    `who` names the server's clients in the log.
    """

    def __init__(self, config: uvicorn.Config, who: str, limits: ConnectionLimits, reuse_port: bool) -> None:
        super().__init__(config)
        self._reuse_port = reuse_port
        self._who = who
        self._limits = limits

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. uvicorn's own startup allows a minute for a TLS handshake, before any limit applies."""
        config = self.config

        def create_protocol() -> asyncio.Protocol:
            return config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )

        listen = partial(
            asyncio.get_running_loop().create_server,
            create_protocol,
            ssl=config.ssl,
            backlog=ACCEPTS_IN_A_ROW,
            ssl_handshake_timeout=self._limits.slow_s if config.ssl else None,
        )
        try:
            if sockets is None:
                self.servers = [await listen(host=config.host, port=config.port, reuse_port=self._reuse_port)]
            else:
                self.servers = [await listen(sock=each) for each in sockets]
        except OSError as exc:
            where = f"{config.host}:{config.port}"
            raise ConfigError(f"{self._who} can't ask at {where}: taken, or not of this machine") from exc
        for listening in (each for server in self.servers for each in server.sockets):
            with socket.socket(fileno=os.dup(listening.fileno())) as same:
                same.listen(config.backlog)
            log.info("%s ask at %s:%d", self._who, *listening.getsockname()[:2])
        self.started = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(
    app: ASGIApp,
    *,
    host: str,
    port: int,
    reuse_port: bool = False,
    end_within_s: float,
    certificate: CertificateFiles | None = None,
    limits: ConnectionLimits = ConnectionLimits(),
    who: str = "clients",
) -> HttpServer:
    """Build the server. `end_within_s` is the number of seconds in which answers may finish at shutdown.
    `who` names the server's clients in the log. With `reuse_port`, several processes listen at one port, and
    the kernel distributes its connections among them.
    """
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=partial(LimitedProtocol, limits=limits),  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=False,  # the client's address is the peer's: headers can be forged
        timeout_keep_alive=75,  # longer than load balancers and pools keep connections
        timeout_graceful_shutdown=max(1, round(end_within_s)),
        ssl_context_factory=None if certificate is None else lambda *_: certificate.context(),
    )
    return HttpServer(config, who, limits, reuse_port)
