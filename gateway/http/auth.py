"""Who is asking: the bearer key of a request, looked up in memory."""

from __future__ import annotations

from litestar.types import Scope

from gateway.domain import Caller
from gateway.errors import TooMany, Unauthenticated
from gateway.http.backend import Backend
from gateway.http.exchange import header


async def caller_of(scope: Scope, backend: Backend) -> Caller:
    """Raises Unauthenticated, TooMany; their messages never repeat what was sent."""
    scheme, _, secret = header(scope, b"authorization").partition(" ")
    address = address_of(scope)
    secret = secret.strip()
    if scheme.lower() != "bearer" or not secret:
        raise failed(
            backend, address, "This endpoint needs an API key: send it as 'Authorization: Bearer <key>'."
        )
    return await owner_of(secret, backend, address)


async def owner_of(secret: str, backend: Backend, address: str) -> Caller:
    """Raises Unauthenticated, TooMany. Who has a good key is let in, however often its address has failed.

    A key that is not known here may be a moment old: it is looked up once more before it is refused.
    """
    if secret.isascii():
        caller = backend.authenticate(secret)
        if caller is None and not backend.login_limiter.wait_s(address):
            caller = await backend.look_again(secret)
        if caller is not None:
            return caller
    raise failed(backend, address, "This API key is unknown, has expired or was revoked.")


def failed(backend: Backend, address: str, message: str) -> Unauthenticated | TooMany:
    wait_s = backend.login_limiter.wait_s(address)
    if wait_s:
        return TooMany("Too many requests without a good key came from your address.", retry_after_s=wait_s)
    backend.login_limiter.record_failure(address)
    return Unauthenticated(message)


def address_of(scope: Scope) -> str:
    client = scope["client"]
    return client[0] if client else ""
