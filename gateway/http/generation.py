"""Serves the endpoints that sites answer: read → answer → send, whole or streamed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from litestar import post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.anthropic.messages_format import MESSAGES
from gateway.domain import Opening
from gateway.http.auth import authenticate
from gateway.http.backend import Backend
from gateway.http.body import ClientGone
from gateway.http.counting import COUNT_TOKENS, CountEndpoint
from gateway.http.disconnect import LEFT, while_connected
from gateway.http.error_handler import is_unexpected, send_error, translate_exception
from gateway.http.exchange import Exchange, header, safe_header_value
from gateway.http.placement_limits import read_limits
from gateway.http.sse import EventStream
from gateway.openai import unary_response
from gateway.openai.error_body import Header, incomplete_answer
from gateway.openai.fields import Fields, Problems
from gateway.openai.generation_format import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    GenerationFormat,
    StreamEncoder,
    UnaryFormat,
)
from gateway.openai.merge import Pieces, answer_all
from gateway.openai.pooling_format import EMBEDDINGS, RERANK
from gateway.openai.request import GenerationRequest, build_queries, check_model
from gateway.openai.response_schema import ResponseHead
from gateway.openai.responses_format import RESPONSES
from gateway.prices import decimal_usd

log = logging.getLogger(__name__)

DELIVERY_S = 30.0
"""Seconds after an answer's deadline in which a slow client may still read the rest."""


def generation_apps(backend: Backend) -> dict[str, ASGIApp]:
    """Return the applications of these endpoints, by path."""
    return {
        "/v1/chat/completions": GenerationEndpoint(backend, CHAT_COMPLETIONS),
        "/v1/completions": GenerationEndpoint(backend, COMPLETIONS),
        "/v1/responses": GenerationEndpoint(backend, RESPONSES),
        "/v1/messages": GenerationEndpoint(backend, MESSAGES),
        COUNT_TOKENS: CountEndpoint(backend),
        "/v1/embeddings": UnaryEndpoint(backend, EMBEDDINGS),
        **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), UnaryEndpoint(backend, RERANK)),
    }


def generation_routes(apps: Mapping[str, ASGIApp]) -> list[HTTPRouteHandler]:
    """Return routes for requests that need the framework: from another origin, or with a wrong method."""
    return [_route(path, app) for path, app in apps.items()]


def _route(path: str, app: ASGIApp) -> HTTPRouteHandler:
    @post(path, status_code=200)
    async def generate() -> ASGIApp:
        return app

    return generate


@dataclass(frozen=True, slots=True)
class UnaryEndpoint:
    """One endpoint, as a plain ASGI application without the framework between it and the socket.

    It therefore turns its failures into responses itself.
    """

    backend: Backend
    api_format: UnaryFormat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope)
        try:
            await self._handle(scope, receive, send, exchange)
        except Exception as exc:  # noqa: BLE001 - becomes a response, and is logged if unexpected
            await send_error(exc, exchange, send, self.api_format.error_response)

    async def _handle(self, scope: Scope, receive: Receive, send: Send, exchange: Exchange) -> None:
        exchange.caller = caller = await authenticate(scope, self.backend)
        try:
            request = await self.backend.read_json(scope, receive, caller, self._read_request)
            models, complete = self.backend.known_models(), self.backend.fleet_complete()
            check_model(request, models, caller.tenant, fleet_complete=complete)
        except ClientGone:
            return
        queries = build_queries(
            request,
            caller,
            query_id=exchange.query_id,
            request_id=exchange.request_id,
            received_s=exchange.started_s,
            timeout_s=self.backend.timeout_s,
            traceparent=header(scope, b"traceparent"),
            limits=read_limits(scope),
            session=header(scope, b"x-session-id"),
        )
        pieces = answer_all(self.backend.answer, queries)
        within_s = self.backend.timeout_s + DELIVERY_S
        sending = self._send(request, pieces, exchange, send)
        await while_connected(sending, receive, within_s=within_s, left=scope["state"].get(LEFT))

    def _read_request(self, body: dict[str, object]) -> GenerationRequest:
        problems = Problems()
        fields = Fields(body, problems)
        request = self.api_format.read(fields)
        problems.raise_any()
        if log.isEnabledFor(logging.DEBUG) and (unknown := fields.unread()):
            log.debug("ignored unknown fields: %s", ", ".join(unknown)[:200])
        return request

    def _head(self, request: GenerationRequest, exchange: Exchange, opening: Opening) -> ResponseHead:
        response_id, unix_time = self.api_format.id_prefix + exchange.query_id, self.backend.unix_time
        return ResponseHead(response_id, int(unix_time()), request.model, opening.fingerprint, unix_time)

    async def _send(self, request: GenerationRequest, pieces: Pieces, exchange: Exchange, send: Send) -> None:
        async with aclosing(pieces):
            answer = await unary_response.collect(pieces, request.choices, self.api_format.logprobs)
        head = self._head(request, exchange, answer.opening)
        body = self.api_format.body(request, head, answer)
        headers = [(b"content-type", b"application/json"), *provenance_headers(answer.opening)]
        if answer.usage.nano_usd:  # zero if the sites have no prices
            headers.append((b"x-mico-cost-usd", decimal_usd(answer.usage.nano_usd).encode()))
        if isinstance(body, bytes):
            headers.append((b"content-length", b"%d" % len(body)))
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body, "more_body": False})
            return
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in body:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)  # let other tasks run between two parts, however fast this client reads
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@dataclass(frozen=True, slots=True)
class GenerationEndpoint(UnaryEndpoint):
    """One endpoint whose answers may be streamed."""

    api_format: GenerationFormat

    def _send(
        self, request: GenerationRequest, pieces: Pieces, exchange: Exchange, send: Send
    ) -> Coroutine[object, object, None]:
        if request.stream_options.stream:
            return self._send_stream(request, pieces, exchange, send)
        return UnaryEndpoint._send(self, request, pieces, exchange, send)

    async def _send_stream(
        self, request: GenerationRequest, pieces: Pieces, exchange: Exchange, send: Send
    ) -> None:
        """Stream an answer. A failure before its start gets its own status, a later one is an event."""
        backend = self.backend
        events = EventStream(
            send, backend.clock, keep_alive_s=backend.keep_alive_s, first_byte_s=backend.first_byte_s
        )
        last_frames = b""
        encoder: StreamEncoder | None = None
        async with events, aclosing(pieces):
            try:
                async for piece in pieces:
                    if isinstance(piece, Opening):
                        head = self._head(request, exchange, piece)
                        encoder = self.api_format.encoder(request, head, piece.prompt_tokens)
                        await events.start(provenance_headers(piece))
                    assert encoder is not None, "an answer begins with its opening"
                    if frames := encoder.encode(piece):
                        await events.write(frames)
                if encoder is None or not encoder.complete:
                    raise incomplete_answer()
            except Exception as exc:
                await events.stop_comments()
                if not events.started:
                    raise
                if is_unexpected(exc):
                    log.exception("request %s failed in its stream", exchange.request_id)
                error = translate_exception(exc, exchange.request_id)
                if encoder is None:
                    last_frames = self.api_format.error_frames(error, exchange.request_id)
                else:
                    last_frames = encoder.encode_error(error, exchange.request_id)
            await events.end(last_frames + self.api_format.end_frames)


def provenance_headers(opening: Opening) -> tuple[Header, ...]:
    """Return the headers with the answer's site, its model, the attempts and the time in the queue in ms."""
    return (
        (b"x-mico-site", safe_header_value(opening.site)),
        (b"x-mico-model", safe_header_value(opening.model)),
        (b"x-mico-attempts", b"%d" % opening.attempts),
        (b"x-mico-queue-ms", b"%d" % round(1000 * opening.queue_s)),
    )
