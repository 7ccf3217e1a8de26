"""Authorize operators: by an admin key in a header, or by a session that the page opened with one.

A session is a signed cookie: HttpOnly, SameSite=Strict, valid for SESSION_S seconds, void once its key is
revoked or its operator has signed out. Acts authorized by a cookie must come from our own page.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from secrets import token_hex
from typing import Any
from urllib.parse import urlsplit

from litestar import Request
from litestar.datastructures import State
from sqlalchemy.exc import SQLAlchemyError

from gateway.domain import Caller
from gateway.errors import Forbidden, Overloaded, Unauthenticated
from gateway.http.auth import authenticate, authenticate_key, client_address
from gateway.http.backend import Backend
from gateway.store.ended_sessions import EndedSessions

COOKIE = "mico_admin"
SESSION_S = 8 * 3600
RETRY_AFTER_S = 2.0
NEEDS_ADMIN = "This needs an admin key: mico keys create NAME --admin"

AnyRequest = Request[Any, Any, State]


@dataclass(frozen=True, slots=True)
class Operator:
    """An authorized operator. `who` is the id of the key, as the audit shows it."""

    who: str
    may_act: bool = True


class Access:
    """Authorizes requests. `still_valid` looks a key up by its id, without I/O."""

    def __init__(
        self,
        backend: Backend,
        still_valid: Callable[[str], Caller | None],
        session_key: bytes,
        ended: EndedSessions | None = None,
    ) -> None:
        self._backend = backend
        self._ended = ended
        self._still_valid = still_valid
        self._session_key = session_key

    async def operator(self, request: AnyRequest) -> Operator:
        """Return the operator of a request. Raises Unauthenticated, TooMany or Forbidden."""
        if "authorization" in request.headers:
            return self._admin(await authenticate(request.scope, self._backend))
        return await self._session_operator(request.cookies.get(COOKIE, ""))

    async def acting_operator(self, request: AnyRequest) -> Operator:
        """Return the operator of a request that changes state.

        Raises Forbidden for a view-only session or a foreign page, and the errors of `operator`.
        """
        operator = await self.operator(request)
        if "authorization" not in request.headers:
            check_origin(request)
        if not operator.may_act:
            raise Forbidden("This session may only look: sign in again without 'view only' to act.")
        return operator

    async def open_session(self, request: AnyRequest, secret: str, *, view_only: bool) -> str:
        """Return the value of the session cookie. Raises Unauthenticated, TooMany or Forbidden."""
        caller = await authenticate_key(secret, self._backend, client_address(request.scope))
        self._admin(caller)
        until = int(self._backend.unix_time()) + SESSION_S
        role = f"{'view' if view_only else 'act'}:{token_hex(8)}"  # makes each session unique
        claim = f"{caller.key_id} {until} {role}".encode()
        return f"{claim.hex()}.{self._signature(claim)}"

    async def end_session(self, request: AnyRequest) -> None:
        """Void the session of the request on every replica. Without a session, do nothing.

        Raises Overloaded if the database is unavailable: the session is then void on this replica only.
        """
        if (claim := self._claim(request.cookies.get(COOKIE, ""))) is None or self._ended is None:
            return
        try:
            await self._ended.end(_session_id(claim), float(claim.decode().split()[1]))
        except SQLAlchemyError as exc:
            raise Overloaded(
                "signed out at this gateway only: the database is away; try again",
                retry_after_s=RETRY_AFTER_S,
            ) from exc

    async def _session_operator(self, cookie: str) -> Operator:
        """Return the operator of a session cookie. Raises Unauthenticated."""
        if (claim := self._claim(cookie)) is None:
            raise Unauthenticated("This page needs an admin key, or a session that was opened with one.")
        key_id, until, role = claim.decode().split()
        caller = self._still_valid(key_id)
        over = int(until) < self._backend.unix_time() or caller is None or not caller.admin
        if over or (self._ended is not None and await self._ended.has_ended(_session_id(claim))):
            raise Unauthenticated("The session has ended: enter the key again.")
        return Operator(key_id, role.partition(":")[0] == "act")

    def _claim(self, cookie: str) -> bytes | None:
        """Return the claim of a cookie that this federation signed, None for any other."""
        hexed, _, signature = cookie.partition(".")
        try:
            claim = bytes.fromhex(hexed)
        except ValueError:
            return None
        ours = hmac.compare_digest(signature.encode(), self._signature(claim).encode())
        return claim if claim and ours else None

    def _admin(self, caller: Caller) -> Operator:
        if not caller.admin:
            raise Forbidden(NEEDS_ADMIN)
        return Operator(caller.key_id)

    def _signature(self, claim: bytes) -> str:
        return hmac.new(self._session_key, claim, sha256).hexdigest()


def _session_id(claim: bytes) -> str:
    """Return the id under which an ended session is stored, a hash that does not reveal the cookie."""
    return sha256(claim).hexdigest()


def check_origin(request: AnyRequest) -> None:
    """Check that the request comes from our own page. Raises Forbidden."""
    origin = request.headers.get("origin")
    foreign = origin is not None and _host_of(origin) != request.headers.get("host")
    elsewhere = request.headers.get("sec-fetch-site", "same-origin") != "same-origin"
    is_json = request.headers.get("content-type", "").startswith("application/json")
    if foreign or elsewhere or not is_json:
        raise Forbidden("This came from another page; acts are taken from /admin only.")


def _host_of(origin: str) -> str | None:
    """Return the host and port of an origin, None for one that no browser would send."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None
