"""Turns exceptions into responses in OpenAI's error format, and logs the unexpected ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from litestar import Request, Response
from litestar.datastructures import State
from litestar.exceptions import HTTPException
from litestar.types import Send
from sqlalchemy.exc import DataError, SQLAlchemyError

from gateway.batches.files import Page
from gateway.errors import BadRequest, MicoError, Overloaded
from gateway.http.exchange import Exchange
from gateway.openai.error_body import INVALID_REQUEST, ErrorResponse, translate

log = logging.getLogger(__name__)

_FRAMEWORK_CODES = {404: "unknown_url", 405: "method_not_supported", 413: "request_too_large"}
_FRAMEWORK_MESSAGES = {
    "Not Found": "There is no such URL here.",
    "Method Not Allowed": "This URL exists, but not for this method; the Allow header names the right ones.",
}
"""Replacements for the framework's messages, which do not say what to do."""
CLIENT_LEFT = "client disconnected prematurely"
"""The framework's message for a client that left before the end of its body, raised as a server error."""


def translate_exception(exc: BaseException, request_id: str) -> ErrorResponse:
    """Translate any exception, including the framework's."""
    if isinstance(exc, HTTPException) and exc.detail == CLIENT_LEFT:
        exc = BadRequest("The client left before the end of its body.")
    if isinstance(exc, HTTPException) and exc.status_code < 500:
        return _translate_framework_error(exc)
    return translate(exc, request_id)


def is_unexpected(exc: BaseException) -> bool:
    """Return whether `exc` is not a MicoError, nor the framework's for a refusal or a client that left."""
    if isinstance(exc, HTTPException):
        return exc.status_code >= 500 and exc.detail != CLIENT_LEFT
    return not isinstance(exc, MicoError)


@contextmanager
def database_errors(page: Page | None = None) -> Iterator[None]:
    """Translate the database's errors to BadRequest or Overloaded.

    `page` is the requested page, if any. A LookupError then means that its `after` is unknown.
    """
    try:
        yield
    except LookupError as exc:
        if page is None:
            raise
        raise BadRequest(f"There is no {page.after!r} to go on from."[:200], param="after") from exc
    except DataError as exc:  # Postgres accepts no NUL in text
        raise BadRequest("A parameter has characters that no name here has.", code="invalid_value") from exc
    except (SQLAlchemyError, OSError) as exc:
        raise Overloaded("the database does not answer now", retry_after_s=2.0) from exc


def log_and_translate(exc: Exception, exchange: Exchange) -> ErrorResponse:
    if is_unexpected(exc):
        log.error("request %s failed", exchange.request_id, exc_info=exc)
    return translate_exception(exc, exchange.request_id)


def error_response(
    request: Request[Any, Any, State],
    exc: Exception,
    render: Callable[[ErrorResponse, str], tuple[int, bytes]],
) -> Response[bytes]:
    """Return the response for `exc`, rendered in the endpoint's format."""
    exchange = Exchange.of(request.scope)
    problem = log_and_translate(exc, exchange)
    status, body = render(problem, exchange.request_id)
    headers = {name.decode(): value.decode() for name, value in problem.headers}
    return Response(body, status_code=status, headers=headers, media_type="application/json")


async def send_error(
    exc: Exception, exchange: Exchange, send: Send, render: Callable[[ErrorResponse, str], tuple[int, bytes]]
) -> None:
    """Send the response for `exc`, rendered in the endpoint's format.

    Raises `exc` again if a status was already sent. The server then closes the connection, which is the only
    remaining way to report the failure.
    """
    problem = log_and_translate(exc, exchange)
    if exchange.status:
        raise exc
    status, body = render(problem, exchange.request_id)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *problem.headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _translate_framework_error(exc: HTTPException) -> ErrorResponse:
    """Translate Litestar's own refusals: unknown paths, wrong methods, broken parameters and forms."""
    headers = tuple((name.lower().encode(), value.encode()) for name, value in (exc.headers or {}).items())
    message = _FRAMEWORK_MESSAGES.get(exc.detail, exc.detail)
    code = _FRAMEWORK_CODES.get(exc.status_code)
    return ErrorResponse(exc.status_code, message, INVALID_REQUEST, code, _param_of(exc), headers)


def _param_of(exc: HTTPException) -> str | None:
    extra = exc.extra
    first = extra[0] if isinstance(extra, list) and extra else None
    key = first.get("key") if isinstance(first, dict) else None
    return key if isinstance(key, str) else None
