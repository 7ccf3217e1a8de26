"""Translates the error tree to what a client gets: the HTTP status, OpenAI's error object, the headers.

Does not know the framework's own errors (`http.error_handler` adds them), and does not log: the caller logs
an unexpected exception under the request's id.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from gateway import errors

MAX_RETRY_AFTER_S = 120.0
"""OpenAI's SDK does not retry if Retry-After is longer."""

Header = tuple[bytes, bytes]


class ErrorResponse(NamedTuple):
    """One failure as a client sees it."""

    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    headers: tuple[Header, ...] = ()

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


class ErrorKind(NamedTuple):
    """Response fields of one class of the error tree. `wait_s` is Retry-After if the error has none."""

    status: int
    type: str
    code: str | None
    wait_s: float | None = None
    headers: tuple[Header, ...] = ()


INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
_REPEATS_PAID_WORK = _USELESS_AGAIN = ((b"x-should-retry", b"false"),)
_ERROR_KINDS: dict[type[errors.MicoError], ErrorKind] = {
    errors.BadRequest: ErrorKind(400, INVALID_REQUEST, None),
    errors.Unauthenticated: ErrorKind(
        401, INVALID_REQUEST, "invalid_api_key", headers=((b"www-authenticate", b"Bearer"),)
    ),
    errors.Forbidden: ErrorKind(403, INVALID_REQUEST, "permission_denied"),
    errors.ModelNotFound: ErrorKind(404, INVALID_REQUEST, "model_not_found"),
    errors.NotFound: ErrorKind(404, INVALID_REQUEST, "not_found"),
    errors.TooMany: ErrorKind(429, "rate_limit_error", "rate_limit_exceeded", wait_s=1.0),
    errors.BudgetSpent: ErrorKind(
        429, "insufficient_quota", "insufficient_quota", wait_s=MAX_RETRY_AFTER_S, headers=_USELESS_AGAIN
    ),
    errors.AboveQuota: ErrorKind(
        429, "rate_limit_error", "rate_limit_exceeded", wait_s=MAX_RETRY_AFTER_S, headers=_USELESS_AGAIN
    ),
    errors.ClientMistake: ErrorKind(400, INVALID_REQUEST, None),
    errors.Overloaded: ErrorKind(503, SERVER_ERROR, "overloaded", wait_s=1.0),
    errors.NoSite: ErrorKind(503, SERVER_ERROR, "no_site", wait_s=2.0),
    errors.UpstreamFailed: ErrorKind(502, SERVER_ERROR, "upstream_error"),
    errors.UpstreamLost: ErrorKind(502, SERVER_ERROR, "upstream_lost", headers=_REPEATS_PAID_WORK),
    errors.ShuttingDown: ErrorKind(503, SERVER_ERROR, "shutting_down", wait_s=1.0),
    errors.DeadlinePassed: ErrorKind(504, SERVER_ERROR, "timeout", headers=_REPEATS_PAID_WORK),
}


def translate(exc: BaseException, request_id: str) -> ErrorResponse:
    """Translate any exception. An unexpected one becomes a 500 that discloses nothing internal."""
    if isinstance(exc, errors.MicoError):
        return _translate_tree(exc)
    return ErrorResponse(
        500,
        f"The gateway failed unexpectedly; its log has the cause under request id {request_id}.",
        SERVER_ERROR,
        SERVER_ERROR,
    )


def incomplete_answer() -> errors.UpstreamLost:
    """Return the error for an answer without a finish reason, which OpenAI's SDK would treat as complete."""
    return errors.UpstreamLost(
        "The site stopped before the answer was finished. What was sent is incomplete."
    )


def _translate_tree(exc: errors.MicoError) -> ErrorResponse:
    kind = next(
        (_ERROR_KINDS[c] for c in type(exc).__mro__ if c in _ERROR_KINDS),
        ErrorKind(500, SERVER_ERROR, SERVER_ERROR),
    )
    code = getattr(exc, "code", None) or kind.code
    param = exc.param or ("model" if isinstance(exc, errors.ModelNotFound) else None)
    wait_s = kind.wait_s if exc.retry_after_s is None else exc.retry_after_s
    headers = kind.headers if wait_s is None else (*kind.headers, *retry_after(wait_s))
    return ErrorResponse(kind.status, exc.message, kind.type, code, param, headers)


def retry_after(wait_s: float) -> tuple[Header, ...]:
    """Return `retry-after` in whole seconds and `retry-after-ms`, which OpenAI's SDK prefers."""
    capped_s = min(max(wait_s, 0.001), MAX_RETRY_AFTER_S)
    return (
        (b"retry-after", b"%d" % math.ceil(capped_s)),
        (b"retry-after-ms", b"%d" % math.ceil(capped_s * 1000)),
    )
