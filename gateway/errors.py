"""All errors of a query, as one tree. Only `openai/error_body.py` maps them to HTTP statuses.

MicoError
├── ClientMistake            4xx, costs no token
│   ├── BadRequest           400, names the field
│   │   └── ContextTooLong   400, both numbers in the message
│   ├── Unauthenticated      401
│   ├── Forbidden            403
│   ├── ModelNotFound        404
│   ├── NotFound             404, no such file or batch
│   └── TooMany              429, Retry-After
│       ├── BudgetSpent      429, the month's tokens are spent: trying again is useless
│       └── AboveQuota       429, one query needs more than the quota: trying again is useless
├── Overloaded               503, no site has room now, Retry-After
├── NoSite                   503, no site serves this model now, Retry-After
├── UpstreamFailed           502, a site failed before the first token and no other could take over
├── UpstreamLost             in the stream: a site failed after the first token and resuming is impossible
├── DeadlinePassed           504
└── ShuttingDown             503, or in the stream: this gateway shuts down before the answer is complete
"""

from __future__ import annotations


class MicoError(Exception):
    """An error for the client. `message` is a sentence that a person can act on. `param` names the offending
    field of the request.
    """

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class ClientMistake(MicoError):
    pass


class BadRequest(ClientMistake):
    """An invalid request. `code`: OpenAI's error code, if any, such as `missing_required_parameter`."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param)
        self.code = code


class ContextTooLong(BadRequest):
    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class Unauthenticated(ClientMistake):
    pass


class Forbidden(ClientMistake):
    pass


class ModelNotFound(ClientMistake):
    pass


class NotFound(ClientMistake):
    pass


class TooMany(ClientMistake):
    pass


class BudgetSpent(TooMany):
    pass


class AboveQuota(TooMany):
    pass


class Overloaded(MicoError):
    pass


class NoSite(MicoError):
    pass


class UpstreamFailed(MicoError):
    pass


class UpstreamLost(MicoError):
    pass


class DeadlinePassed(MicoError):
    pass


class ShuttingDown(MicoError):
    pass
