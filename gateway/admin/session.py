"""Serve `/admin/api/session`: open a session with an admin key, read its rights, end it."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from litestar import Response, delete, get, post
from litestar.datastructures import Cookie
from litestar.handlers import HTTPRouteHandler

from gateway.admin.access import COOKIE, SESSION_S, Access, AnyRequest, Operator, check_origin
from gateway.errors import ClientMistake
from gateway.http.body import decode_as

MAX_LOGIN_BYTES: Final = 16_384
"""Sign-in bodies are read before authentication: those of the usual limit could fill the memory."""


class Login(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a sign-in."""

    key: str
    view_only: bool = False


def session_routes(access: Access) -> list[HTTPRouteHandler]:
    @post("/admin/api/session", status_code=200, request_max_body_size=MAX_LOGIN_BYTES)
    async def open_session(request: AnyRequest) -> Response[dict[str, Any]]:
        check_origin(request)
        login = decode_as(await request.body(), Login, "send {'key': …, 'view_only': false} as JSON")
        value = await access.open_session(request, login.key.strip(), view_only=login.view_only)
        return Response({"may_act": not login.view_only}, cookies=[cookie(request, value, SESSION_S)])

    @get("/admin/api/session")
    async def session(request: AnyRequest) -> dict[str, Any]:
        """Return the operator, with an empty name if there is no session: every page requests this first."""
        try:
            operator = await access.operator(request)
        except ClientMistake:
            operator = Operator("", may_act=False)
        return {"who": operator.who, "may_act": operator.may_act}

    @delete("/admin/api/session", status_code=200)
    async def close_session(request: AnyRequest) -> Response[dict[str, Any]]:
        await access.end_session(request)
        return Response({}, cookies=[cookie(request, "", 0)])

    return [open_session, session, close_session]


def cookie(request: AnyRequest, value: str, age_s: int) -> Cookie:
    """Build the session cookie. It is `secure` if the page came over TLS, to this gateway or a proxy."""
    scheme, _, _ = request.headers.get("x-forwarded-proto", request.url.scheme).partition(",")
    return Cookie(
        key=COOKIE,
        value=value,
        max_age=age_s,
        path="/admin",
        httponly=True,
        samesite="strict",
        secure="https" in (scheme.strip().lower(), request.url.scheme),
    )
