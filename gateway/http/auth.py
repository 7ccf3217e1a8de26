"""Authenticates requests: looks up the bearer key of a request in memory."""

from __future__ import annotations

from litestar.types import Scope

from gateway.domain import Caller
from gateway.errors import TooMany, Unauthenticated
from gateway.http.backend import Backend
from gateway.http.exchange import header


async def authenticate(scope: Scope, backend: Backend) -> Caller:
    """Return the caller whose key is in `Authorization: Bearer` or in Anthropic's `x-api-key`.

    Raises Unauthenticated or TooMany; their messages never repeat what was sent.
    """
    scheme, _, secret = header(scope, b"authorization").partition(" ")
    if not scheme:
        scheme, secret = "bearer", header(scope, b"x-api-key")
    address = client_address(scope)
    secret = secret.strip()
    if scheme.lower() != "bearer" or not secret:
        raise _record_failure(
            backend, address, "This endpoint needs an API key: send it as 'Authorization: Bearer <key>'."
        )
    return await authenticate_key(secret, backend, address)


async def authenticate_key(secret: str, backend: Backend, address: str) -> Caller:
    """Return the owner of a key. Raises Unauthenticated or TooMany.

    A valid key is accepted however often its address has failed. A key that is not in memory may be new, so
    it is looked up in the database before it is refused, unless its address must wait.
    """
    if secret.isascii():
        caller = backend.authenticate(secret)
        if caller is None and not backend.login_limiter.wait_s(address):
            caller = await backend.look_up_key(secret)
        if caller is not None:
            return caller
    raise _record_failure(backend, address, "This API key is unknown, has expired or was revoked.")


def client_address(scope: Scope) -> str:
    client = scope["client"]
    return client[0] if client else ""


def _record_failure(backend: Backend, address: str, message: str) -> Unauthenticated | TooMany:
    """Return the error to raise: TooMany, without counting the failure, if the address must wait."""
    wait_s = backend.login_limiter.wait_s(address)
    if wait_s:
        return TooMany("Too many requests without a good key came from your address.", retry_after_s=wait_s)
    backend.login_limiter.record_failure(address)
    return Unauthenticated(message)
