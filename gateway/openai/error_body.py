"""Translates the error tree to what a client gets: the HTTP status, OpenAI's error object, the headers.

Does not know the framework's own errors (`http.error_handler` adds them), and does not log: the caller logs
an unexpected exception under the request's id.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

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


INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
_REPEATS_PAID_WORK = _USELESS_AGAIN = ((b"x-should-retry", b"false"),)
_KINDS: dict[type[errors.MicoError], Kind] = {
    errors.BadRequest: Kind(400, INVALID_REQUEST, None),
    errors.Unauthenticated: Kind(
        401, INVALID_REQUEST, "invalid_api_key", headers=((b"www-authenticate", b"Bearer"),)
    ),
    errors.Forbidden: Kind(403, INVALID_REQUEST, "permission_denied"),
    errors.ModelNotFound: Kind(404, INVALID_REQUEST, "model_not_found"),
    errors.NotFound: Kind(404, INVALID_REQUEST, "not_found"),
    errors.TooMany: Kind(429, "rate_limit_error", "rate_limit_exceeded", wait_s=1.0),
    errors.BudgetSpent: Kind(
        429, "insufficient_quota", "insufficient_quota", wait_s=RETRY_AFTER_LIMIT_S, headers=_USELESS_AGAIN
    ),
    errors.AboveQuota: Kind(
        429, "rate_limit_error", "rate_limit_exceeded", wait_s=RETRY_AFTER_LIMIT_S, headers=_USELESS_AGAIN
    ),
    errors.ClientMistake: Kind(400, INVALID_REQUEST, None),
    errors.Overloaded: Kind(503, SERVER_ERROR, "overloaded", wait_s=1.0),
    errors.NoSite: Kind(503, SERVER_ERROR, "no_site", wait_s=2.0),
    errors.UpstreamFailed: Kind(502, SERVER_ERROR, "upstream_error"),
    errors.UpstreamLost: Kind(502, SERVER_ERROR, "upstream_lost", headers=_REPEATS_PAID_WORK),
    errors.Ending: Kind(503, SERVER_ERROR, "shutting_down", wait_s=1.0),
    errors.DeadlinePassed: Kind(504, SERVER_ERROR, "timeout", headers=_REPEATS_PAID_WORK),
}


def translate(exc: BaseException, request_id: str) -> Problem:
    """Every exception has an answer; what nobody expected becomes a 500 that tells nothing of our insides."""
    if isinstance(exc, errors.MicoError):
        return _of_tree(exc)
    return Problem(
        500,
        f"The gateway failed unexpectedly; its log has the cause under request id {request_id}.",
        SERVER_ERROR,
        SERVER_ERROR,
    )


def _of_tree(exc: errors.MicoError) -> Problem:
    kind = next((_KINDS[c] for c in type(exc).__mro__ if c in _KINDS), Kind(500, SERVER_ERROR, SERVER_ERROR))
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
