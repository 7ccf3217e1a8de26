"""Who may see and who may act: an admin key in a header, or the session that a page opened with one.

A session is a signed cookie: HttpOnly, SameSite=Strict, some hours long, void once its key is revoked.
Acts that come with a cookie must come from our own page.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any
from urllib.parse import unquote, urlsplit

from litestar import Request
from litestar.datastructures import State

from gateway.domain import Caller
from gateway.errors import Forbidden, Unauthenticated
from gateway.http.auth import authenticate, authenticate_key, client_address
from gateway.http.backend import Backend

COOKIE = "mico_admin"
SESSION_S = 8 * 3600
NEEDS_ADMIN = "This needs an admin key: mico keys create NAME --admin"

AnyRequest = Request[Any, Any, State]


@dataclass(frozen=True, slots=True)
class Operator:
    """`who` is the id of the key, as the audit shows it."""

    who: str
    may_act: bool = True


class Access:
    def __init__(
        self, backend: Backend, still_valid: Callable[[str], Caller | None], session_key: bytes
    ) -> None:
        self._backend = backend
        self._still_valid = still_valid
        self._session_key = session_key

    async def operator(self, request: AnyRequest) -> Operator:
        """Raises Unauthenticated or Forbidden."""
        if "authorization" in request.headers:
            return self._admin(await authenticate(request.scope, self._backend))
        return self.of_session(request.cookies.get(COOKIE, ""))

    async def acting(self, request: AnyRequest) -> Operator:
        """For what changes anything. Raises Forbidden for a session that may only look, or a foreign page."""
        operator = await self.operator(request)
        if "authorization" not in request.headers:
            check_origin(request)
        if not operator.may_act:
            raise Forbidden("This session may only look: sign in again without 'view only' to act.")
        return operator

    async def open_session(self, request: AnyRequest, secret: str, *, view_only: bool) -> str:
        """The value of the cookie. Raises Unauthenticated, TooMany or Forbidden."""
        caller = await authenticate_key(secret, self._backend, client_address(request.scope))
        self._admin(caller)
        until = int(self._backend.unix_time()) + SESSION_S
        claim = f"{caller.key_id} {until} {'view' if view_only else 'act'}".encode()
        return f"{claim.hex()}.{self._signature(claim)}"

    def of_session(self, cookie: str) -> Operator:
        claim, _, signature = cookie.partition(".")
        try:
            said = bytes.fromhex(claim)
        except ValueError:
            said = b""
        if not said or not hmac.compare_digest(signature.encode(), self._signature(said).encode()):
            raise Unauthenticated("This page needs an admin key, or a session that was opened with one.")
        key_id, until, role = said.decode().split()
        caller = self._still_valid(key_id)
        if int(until) < self._backend.unix_time() or caller is None or not caller.admin:
            raise Unauthenticated("The session has ended: enter the key again.")
        return Operator(key_id, role == "act")

    def _admin(self, caller: Caller) -> Operator:
        if not caller.admin:
            raise Forbidden(NEEDS_ADMIN)
        return Operator(caller.key_id)

    def _signature(self, claim: bytes) -> str:
        return hmac.new(self._session_key, claim, sha256).hexdigest()


def path_after(request: AnyRequest, prefix: str) -> str:
    """Of the path as it was sent: a name keeps its slashes, of which the framework makes one out of two."""
    return unquote(request.scope["raw_path"].decode("ascii")).removeprefix(prefix)


def check_origin(request: AnyRequest) -> None:
    """A browser says where a request comes from; what does not come from our own page is refused."""
    origin = request.headers.get("origin")
    foreign = origin is not None and urlsplit(origin).netloc != request.headers.get("host")
    elsewhere = request.headers.get("sec-fetch-site", "same-origin") != "same-origin"
    is_json = request.headers.get("content-type", "").startswith("application/json")
    if foreign or elsewhere or not is_json:
        raise Forbidden("This came from another page; acts are taken from /admin only.")
