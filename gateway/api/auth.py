"""Who is asking: the bearer key of a request, looked up in memory."""

from __future__ import annotations

from litestar.types import Scope

from gateway.api.backend import Backend
from gateway.api.exchange import header
from gateway.domain import Caller
from gateway.errors import Unauthenticated


async def caller_of(scope: Scope, backend: Backend) -> Caller:
    """Raises Unauthenticated; its message never repeats what was sent.

    A key that is not known here may be a moment old: it is looked up once more before it is refused.
    """
    scheme, _, secret = header(scope, b"authorization").partition(" ")
    secret = secret.strip()
    if scheme.lower() != "bearer" or not secret:
        raise Unauthenticated("This endpoint needs an API key: send it as 'Authorization: Bearer <key>'.")
    caller = None
    if secret.isascii():
        caller = backend.authenticate(secret) or await backend.look_again(secret)
    if caller is None:
        raise Unauthenticated("This API key is unknown or was revoked.")
    return caller
