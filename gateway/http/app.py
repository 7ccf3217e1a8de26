"""Composes the HTTP application: the routes, one translator of errors, one middleware around all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from litestar import Litestar, Request, Response
from litestar.config.cors import CORSConfig
from litestar.datastructures import State
from litestar.exceptions import NotFoundException
from litestar.types import ControllerRouterHandler

from gateway.anthropic.messages_format import MESSAGES
from gateway.http.backend import Backend
from gateway.http.error_handler import error_response
from gateway.http.exchange import ExchangeMiddleware, from_anthropics
from gateway.http.generation import generation_apps, generation_routes
from gateway.http.health import health_routes
from gateway.http.models import model_routes
from gateway.http.rate_headers import RATE_HEADERS
from gateway.http.unsupported import unsupported_endpoint
from gateway.openai.generation_format import CHAT_COMPLETIONS

_EXPOSED_HEADERS = [
    "x-request-id",
    "request-id",
    "openai-processing-ms",
    "x-mico-site",
    "x-mico-model",
    "x-mico-attempts",
    "x-mico-queue-ms",
    "x-mico-cost-usd",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    *RATE_HEADERS,
]


def create_http(backend: Backend, handlers: Sequence[ControllerRouterHandler] = ()) -> Litestar:
    """Build the application. `handlers` are further endpoints, such as metrics or files."""
    generation = generation_apps(backend)
    app = Litestar(
        [
            *generation_routes(generation),
            *model_routes(backend),
            *health_routes(backend),
            *handlers,
        ],
        exception_handlers={Exception: _render_error, NotFoundException: _render_unknown_path},
        cors_config=CORSConfig(allow_origins=["*"], expose_headers=_EXPOSED_HEADERS),
        openapi_config=None,
        logging_config=None,
        request_max_body_size=backend.body_limit_bytes,
    )
    app.asgi_handler = ExchangeMiddleware(
        app.asgi_handler, generation, backend.clock, backend.new_id, backend.quota_status
    )
    return app


def create_operators_http(backend: Backend, handlers: Sequence[ControllerRouterHandler]) -> Litestar:
    """Build the application of the operators' port, which requires no key."""
    app = Litestar(
        [*health_routes(backend, details=True), *handlers],
        exception_handlers={Exception: _render_error},
        openapi_config=None,
        logging_config=None,
    )
    app.asgi_handler = ExchangeMiddleware(app.asgi_handler, {}, backend.clock, backend.new_id)
    return app


def _render_error(request: Request[Any, Any, State], exc: Exception) -> Response[bytes]:
    api_format = MESSAGES if from_anthropics(request.scope) else CHAT_COMPLETIONS
    return error_response(request, exc, api_format.error_response)


def _render_unknown_path(request: Request[Any, Any, State], exc: Exception) -> Response[bytes]:
    return _render_error(request, unsupported_endpoint(request.scope["path"]) or exc)
