"""The two endpoints that generate: read → ask → relay, whole or streamed, while the client is there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from litestar import post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.domain import Opening
from gateway.http.auth import caller_of
from gateway.http.backend import Backend
from gateway.http.body import ClientGone, read_json
from gateway.http.disconnect import while_connected
from gateway.http.error_handler import is_unexpected, send_error, translate_exception
from gateway.http.exchange import Exchange, header, safe_header_value
from gateway.http.sse import EventStream
from gateway.openai import unary_response
from gateway.openai.chat_request import read_chat
from gateway.openai.completion_request import read_completion
from gateway.openai.error_body import Header
from gateway.openai.events import Pieces, stopped_short, together
from gateway.openai.fields import Fields, Problems
from gateway.openai.frames import frame
from gateway.openai.request import Asked, check_model, queries
from gateway.openai.shapes import CHAT, TEXT, Head, Shape
from gateway.openai.stream_response import Chunks

log = logging.getLogger(__name__)

DELIVERY_S = 30.0
"""After the deadline of an answer, for a slow client to take what is there."""


def generating(backend: Backend) -> dict[str, ASGIApp]:
    """By path."""
    return {
        "/v1/chat/completions": Generation(backend, CHAT, read_chat),
        "/v1/completions": Generation(backend, TEXT, read_completion),
    }


def generation_routes(apps: Mapping[str, ASGIApp]) -> list[HTTPRouteHandler]:
    """For requests that need the framework: of another origin, or by a method that is none."""
    return [_route(path, app) for path, app in apps.items()]


def _route(path: str, app: ASGIApp) -> HTTPRouteHandler:
    @post(path, status_code=200)
    async def generate() -> ASGIApp:
        return app

    return generate


@dataclass(frozen=True, slots=True)
class Generation:
    """One generating endpoint, as a plain ASGI application: nothing stands between it and the socket.

    So its failures are made responses here, not by the framework.
    """

    backend: Backend
    shape: Shape
    read: Callable[[Fields], Asked]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope)
        try:
            await self._answer(scope, receive, send, exchange)
        except Exception as exc:  # noqa: BLE001 - becomes a response, and is logged if unexpected
            await send_error(exc, exchange, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, exchange: Exchange) -> None:
        exchange.caller = caller = await caller_of(scope, self.backend)
        try:
            asked = self._asked(await read_json(scope, receive, self.backend.body_limit_bytes))
        except ClientGone:
            return
        asking = queries(
            asked,
            caller,
            query_id=exchange.query_id,
            request_id=exchange.request_id,
            received_s=exchange.started_s,
            timeout_s=self.backend.timeout_s,
            traceparent=header(scope, b"traceparent"),
        )
        relay = self._stream if asked.streaming.on else self._whole
        pieces = together(self.backend.answer, asking)
        within_s = self.backend.timeout_s + DELIVERY_S
        await while_connected(relay(asked, pieces, exchange, send), receive, within_s=within_s)

    def _asked(self, body: dict[str, object]) -> Asked:
        problems = Problems()
        fields = Fields(body, problems)
        asked = self.read(fields)
        problems.raise_any()
        check_model(asked, self.backend.models())
        if log.isEnabledFor(logging.DEBUG) and (unknown := fields.unread()):
            log.debug("ignored unknown fields: %s", ", ".join(unknown)[:200])
        return asked

    def _head(self, asked: Asked, exchange: Exchange, opening: Opening) -> Head:
        created_s = int(self.backend.unix_time())
        return Head(self.shape.id_prefix + exchange.query_id, created_s, asked.model, opening.fingerprint)

    async def _whole(self, asked: Asked, pieces: Pieces, exchange: Exchange, send: Send) -> None:
        async with aclosing(pieces):
            answer = await unary_response.gather(pieces, asked.choices)
        head = self._head(asked, exchange, answer.opening)
        body = answer.body(self.shape, head, asked.sampling.logprobs is not None)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *provenance(answer.opening),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _stream(self, asked: Asked, pieces: Pieces, exchange: Exchange, send: Send) -> None:
        """A failure before the first frame gets a status of its own, a later one becomes an event."""
        last = b""
        async with self._events(send) as events, aclosing(pieces):
            try:
                await self._relay(asked, pieces, exchange, events)
            except Exception as exc:
                await events.hush()
                if not events.started:
                    raise
                if is_unexpected(exc):
                    log.exception("request %s failed in its stream", exchange.request_id)
                last = frame(translate_exception(exc, exchange.request_id).body())
            await events.end(last)

    async def _relay(self, asked: Asked, pieces: Pieces, exchange: Exchange, events: EventStream) -> None:
        chunks: Chunks | None = None
        async for piece in pieces:
            if isinstance(piece, Opening):
                head = self._head(asked, exchange, piece)
                chunks = Chunks(self.shape, head, asked.choices, asked.streaming, piece.prompt_tokens)
                await events.start(provenance(piece))
            assert chunks is not None, "an answer begins with its opening"
            frames = chunks.of(piece)
            if frames:
                await events.write(frames)
        if chunks is None or not chunks.complete:
            raise stopped_short()

    def _events(self, send: Send) -> EventStream:
        backend = self.backend
        return EventStream(
            send, backend.clock, keep_alive_s=backend.keep_alive_s, first_byte_s=backend.first_byte_s
        )


def provenance(opening: Opening) -> tuple[Header, ...]:
    """Where the answer comes from and how long it waited."""
    return (
        (b"x-mico-site", safe_header_value(opening.site)),
        (b"x-mico-attempts", b"%d" % opening.attempts),
        (b"x-mico-queue-ms", b"%d" % round(1000 * opening.queue_s)),
    )
