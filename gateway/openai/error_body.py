"""The only translator of failures to HTTP: from the error tree to status, OpenAI's error object and headers.

Does not log: whoever turns an unexpected exception into a response logs it under the request's id.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec
from litestar.exceptions import HTTPException

from gateway import errors

RETRY_AFTER_LIMIT_S = 120.0
"""OpenAI's SDK does not retry at all when it is told to wait longer."""

Header = tuple[bytes, bytes]


class Problem(NamedTuple):
    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    headers: tuple[Header, ...] = ()

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


class Kind(NamedTuple):
    """How one class of the error tree looks from outside. `wait_s`: Retry-After when the error names none."""

    status: int
    type: str
    code: str | None
    wait_s: float | None = None
    headers: tuple[Header, ...] = ()


_INVALID = "invalid_request_error"
_SERVER = "server_error"
_REPEATS_PAID_WORK = _USELESS_AGAIN = ((b"x-should-retry", b"false"),)
_KINDS: dict[type[errors.MicoError], Kind] = {
    errors.BadRequest: Kind(400, _INVALID, None),
    errors.Unauthenticated: Kind(
        401, _INVALID, "invalid_api_key", headers=((b"www-authenticate", b"Bearer"),)
    ),
    errors.Forbidden: Kind(403, _INVALID, "permission_denied"),
    errors.ModelNotFound: Kind(404, _INVALID, "model_not_found"),
    errors.NotFound: Kind(404, _INVALID, "not_found"),
    errors.TooMany: Kind(429, "rate_limit_error", "rate_limit_exceeded", wait_s=1.0),
    errors.BudgetSpent: Kind(
        429, "insufficient_quota", "insufficient_quota", wait_s=RETRY_AFTER_LIMIT_S, headers=_USELESS_AGAIN
    ),
    errors.AboveQuota: Kind(
        429, "rate_limit_error", "rate_limit_exceeded", wait_s=RETRY_AFTER_LIMIT_S, headers=_USELESS_AGAIN
    ),
    errors.ClientMistake: Kind(400, _INVALID, None),
    errors.Overloaded: Kind(503, _SERVER, "overloaded", wait_s=1.0),
    errors.NoSite: Kind(503, _SERVER, "no_site", wait_s=2.0),
    errors.UpstreamFailed: Kind(502, _SERVER, "upstream_error"),
    errors.UpstreamLost: Kind(502, _SERVER, "upstream_lost", headers=_REPEATS_PAID_WORK),
    errors.Ending: Kind(503, _SERVER, "shutting_down", wait_s=1.0),
    errors.DeadlinePassed: Kind(504, _SERVER, "timeout", headers=_REPEATS_PAID_WORK),
}
_HTTP_CODES = {404: "unknown_url", 405: "method_not_supported", 413: "request_too_large"}
_HTTP_MESSAGES = {
    "Not Found": "There is no such URL here.",
    "Method Not Allowed": "This URL exists, but not for this method; the Allow header names the right ones.",
}
"""For the framework's own phrases, which do not say what to do."""


def translate(exc: BaseException, request_id: str) -> Problem:
    """Every exception has an answer; what nobody expected becomes a 500 that tells nothing of our insides."""
    if isinstance(exc, errors.MicoError):
        return _of_tree(exc)
    if isinstance(exc, HTTPException) and exc.status_code < 500:
        return _of_framework(exc)
    return Problem(
        500,
        f"The gateway failed unexpectedly; its log has the cause under request id {request_id}.",
        _SERVER,
        _SERVER,
    )


def is_unexpected(exc: BaseException) -> bool:
    return not isinstance(exc, errors.MicoError) and not (
        isinstance(exc, HTTPException) and exc.status_code < 500
    )


def _of_tree(exc: errors.MicoError) -> Problem:
    kind = next((_KINDS[c] for c in type(exc).__mro__ if c in _KINDS), Kind(500, _SERVER, _SERVER))
    code = getattr(exc, "code", None) or kind.code
    param = exc.param or ("model" if isinstance(exc, errors.ModelNotFound) else None)
    wait_s = kind.wait_s if exc.retry_after_s is None else exc.retry_after_s
    headers = kind.headers if wait_s is None else (*kind.headers, *retry_after(wait_s))
    return Problem(kind.status, exc.message, kind.type, code, param, headers)


def retry_after(wait_s: float) -> tuple[Header, ...]:
    """Both spellings: whole seconds for everyone, milliseconds for OpenAI's SDK, which prefers them."""
    capped_s = min(max(wait_s, 0.001), RETRY_AFTER_LIMIT_S)
    return (
        (b"retry-after", b"%d" % math.ceil(capped_s)),
        (b"retry-after-ms", b"%d" % math.ceil(capped_s * 1000)),
    )


def _of_framework(exc: HTTPException) -> Problem:
    """Litestar's own refusals: unknown paths, wrong methods, broken parameters and forms."""
    headers = tuple((name.lower().encode(), value.encode()) for name, value in (exc.headers or {}).items())
    message = _HTTP_MESSAGES.get(exc.detail, exc.detail)
    code = _HTTP_CODES.get(exc.status_code)
    return Problem(exc.status_code, message, _INVALID, code, _param_of(exc), headers)


def _param_of(exc: HTTPException) -> str | None:
    extra = exc.extra
    first = extra[0] if isinstance(extra, list) and extra else None
    key = first.get("key") if isinstance(first, dict) else None
    return key if isinstance(key, str) else None
