"""Serves POST /v1/messages/count_tokens: returns the number of prompt tokens of a message request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from litestar.types import Receive, Scope, Send
from msgspec.structs import replace

from gateway.anthropic.messages_format import MESSAGES
from gateway.anthropic.messages_request import read_message_request
from gateway.domain import Model, Query, Sampling
from gateway.errors import BadRequest
from gateway.http.auth import authenticate
from gateway.http.backend import Backend
from gateway.http.body import ClientGone
from gateway.http.disconnect import while_connected
from gateway.http.error_handler import send_error
from gateway.http.exchange import Exchange
from gateway.openai.fields import UNSUPPORTED, Fields, Problems
from gateway.openai.request import GenerationRequest, build_queries, check_model

COUNT_TOKENS: Final = "/v1/messages/count_tokens"
WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class CountEndpoint:
    """A plain ASGI application, like those of the generating endpoints."""

    backend: Backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope)
        try:
            await self._handle(scope, receive, send, exchange)
        except Exception as exc:  # noqa: BLE001 - becomes a response, and is logged if unexpected
            await send_error(exc, exchange, send, MESSAGES.error_response)

    async def _handle(self, scope: Scope, receive: Receive, send: Send, exchange: Exchange) -> None:
        exchange.caller = caller = await authenticate(scope, self.backend)
        try:
            request = await self.backend.read_json(scope, receive, caller, _read_request)
            if self.backend.fleet_complete():
                _check_model(request, self.backend.known_models(), caller.tenant)
        except ClientGone:
            return
        (query,) = build_queries(
            request,
            caller,
            query_id=exchange.query_id,
            request_id=exchange.request_id,
            received_s=exchange.started_s,
            timeout_s=WITHIN_S,
            traceparent="",
        )
        await while_connected(self._send_count(query, send), receive, within_s=WITHIN_S)

    async def _send_count(self, query: Query, send: Send) -> None:
        body = msgspec.json.encode({"input_tokens": await self.backend.count(query)})
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


def _read_request(body: dict[str, object]) -> GenerationRequest:
    problems = Problems()
    request = read_message_request(Fields(body, problems), counted=True)
    problems.raise_any()
    return replace(request, sampling=Sampling())  # nothing is generated


def _check_model(request: GenerationRequest, models: Sequence[Model], tenant: str) -> None:
    model = next((each for each in models if each.id == request.model and each.tenant in ("", tenant)), None)
    if model is not None and "count" not in model.features:
        raise BadRequest(
            f"No site that serves {model.id} can count the tokens of a prompt."
            " /v1/models lists what models can do.",
            param="model",
            code=UNSUPPORTED,
        )
    check_model(request, models, tenant)
