"""Admin keys and sessions: who may look, who may act, and for how long."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator

import pytest

from gateway.admin.access import COOKIE, SESSION_S
from gateway.admin.session import MAX_LOGIN_BYTES
from tests.support.admin_replica import (
    ADMIN,
    BEARER,
    USER,
    Replica,
    open_replica,
    play,
    sign_in,
)
from tests.support.fakes.edge import error_of


def test_nobody_sees_or_acts_without_an_admin_key(url: str) -> None:
    async def scenario(o: Replica) -> None:
        await o.here.site("a")
        for path in (
            "/admin/api/sites",
            "/admin/api/overview",
            "/admin/api/history",
            "/admin/api/events",
            "/admin/api/sites/a/events",
            "/admin/api/decisions/x",
            "/admin/api/routes",
            "/admin/api/models?site=a",
            "/admin/stream",
        ):
            assert (await o.http.get(path)).status_code == 401, path
            user = await o.http.get(path, headers={"authorization": f"Bearer {USER}"})
            assert user.status_code == 403, path
        refused = await o.http.post("/admin/api/sites/a/drain", json={"reason": "x"})
        assert refused.status_code == 401
        assert (await o.http.get("/admin/api/session")).json() == {"who": "", "may_act": False}

    play(url, scenario)


def test_a_session_is_a_cookie_that_acts_only_from_our_own_page(url: str) -> None:
    async def scenario(o: Replica) -> None:
        await o.here.site("a")
        o.publisher.tick()
        cookie = (await sign_in(o)).headers["set-cookie"]
        for word in ("HttpOnly", "SameSite=strict", "Path=/admin", f"Max-Age={SESSION_S}"):
            assert word.lower() in cookie.lower()
        assert ADMIN not in cookie
        assert (await o.http.get("/admin/api/overview")).json()["replica"] == "g1"
        path, body = "/admin/api/sites/a/drain", {"reason": "a test"}
        for foreign in (
            {"origin": "https://evil.example"},
            {"sec-fetch-site": "cross-site"},
            {"sec-fetch-site": "same-site"},
        ):
            assert (await o.http.post(path, json=body, headers=foreign)).status_code == 403
        form = await o.http.post(
            path, content=b"reason=x", headers={"content-type": "application/x-www-form-urlencoded"}
        )
        assert form.status_code == 403
        own = {"origin": "http://gateway", "sec-fetch-site": "same-origin"}
        assert (await o.http.post(path, json=body, headers=own)).status_code == 200

    play(url, scenario)


@pytest.mark.parametrize(
    ("said", "secure"),
    [(None, False), ("http", False), ("https", True), ("HTTPS", True), ("https, http", True)],
)
def test_a_cookie_stays_on_tls_however_many_proxies_there_are(
    url: str, said: str | None, secure: bool
) -> None:
    async def scenario(o: Replica) -> None:
        headers = {"x-forwarded-proto": said} if said else {}
        answer = await o.http.post("/admin/api/session", json={"key": ADMIN}, headers=headers)
        assert ("secure" in answer.headers["set-cookie"].lower()) is secure

    play(url, scenario)


@pytest.mark.parametrize(
    "body", [b'{"key":"\xff"}', b'{"\xff":1}', b"\xff", b"", b"[]", b'{"key":1}', b'{"key":' + b"[" * 9999]
)
def test_a_body_that_is_no_json_of_ours_is_the_clients_mistake(url: str, body: bytes) -> None:
    async def scenario(operator: Replica) -> None:
        kind = {"content-type": "application/json"}
        for path, headers in (("session", {}), ("sites/a/drain", BEARER)):
            answer = await operator.http.post(f"/admin/api/{path}", content=body, headers={**kind, **headers})
            assert error_of(answer, 400)["type"] == "invalid_request_error"

    play(url, scenario)


def test_who_has_no_key_yet_has_no_large_body_read(url: str) -> None:
    async def scenario(o: Replica) -> None:
        async def body() -> AsyncIterator[bytes]:
            for part in (b'{"key":"', *[b"x" * 65_536] * 100, b'"}'):
                yield part

        kind = {"content-type": "application/json"}
        answer = await o.http.post("/admin/api/session", content=body(), headers=kind)
        assert error_of(answer, 413)["code"] == "request_too_large"
        long_key = {"key": ADMIN + " " * MAX_LOGIN_BYTES}
        assert (await o.http.post("/admin/api/session", json=long_key)).status_code == 413
        assert (await sign_in(o)).status_code == 200

    play(url, scenario)


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "https://a]b", "", "null"])
def test_an_origin_that_no_browser_sends_is_foreign(url: str, origin: str) -> None:
    async def scenario(o: Replica) -> None:
        headers = {"origin": origin}
        answer = await o.http.post("/admin/api/session", json={"key": ADMIN}, headers=headers)
        assert error_of(answer, 403)["code"] == "permission_denied"

    play(url, scenario)


def test_a_session_ends_with_its_time_its_key_or_its_signature(url: str) -> None:
    async def scenario(o: Replica) -> None:
        await sign_in(o)
        whole = o.http.cookies[COOKIE]
        claim, _, signature = whole.partition(".")
        forged = (bytes.fromhex(claim).replace(b"key-a", b"key-u")).hex()
        for cookie in (f"{forged}.{signature}", f"{claim}.{signature[:-1]}", claim, "zz.zz", ""):
            o.http.cookies.set(COOKIE, cookie)
            assert (await o.http.get("/admin/api/overview")).status_code == 401
            o.http.cookies.clear()
        await sign_in(o)
        o.pass_time(SESSION_S + 1)
        assert (await o.http.get("/admin/api/overview")).status_code == 401
        await sign_in(o)
        assert (await o.http.get("/admin/api/overview")).status_code == 200
        del o.callers[ADMIN]
        assert (await o.http.get("/admin/api/overview")).status_code == 401

    play(url, scenario)


def test_signing_out_ends_the_session_on_every_replica(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of its cookie opens nothing any more, also after a restart; other sessions go on."""
    monkeypatch.setattr("gateway.store.ended_sessions.REFRESH_S", 0.0)

    async def scenario(o: Replica) -> None:
        async def status(replica: Replica, cookie: str) -> int:
            headers = {"cookie": f"{COOKIE}={cookie}"}
            return (await replica.http.get("/admin/api/overview", headers=headers)).status_code

        o.publisher.tick()
        await sign_in(o)
        copied = o.http.cookies[COOKIE]
        async with open_replica(o.here, url, "g2") as other:
            other.publisher.tick()
            await sign_in(other, view_only=True)
            theirs = other.http.cookies[COOKIE]
            other.http.cookies.clear()
            assert (await status(o, copied), await status(other, copied)) == (200, 200)
            assert (await o.http.delete("/admin/api/session")).status_code == 200
            assert COOKIE not in o.http.cookies
            assert (await status(o, copied), await status(other, copied)) == (401, 401)
            assert await status(other, theirs) == 200
        async with open_replica(o.here, url, "g1 anew") as again:
            again.publisher.tick()
            assert (await status(again, copied), await status(again, theirs)) == (401, 200)

    play(url, scenario)


def test_sessions_that_begin_in_one_second_are_two(url: str) -> None:
    """An operator who signed out and in again at once found the new session ended, too."""

    def until(cookie: str) -> str:
        return bytes.fromhex(cookie.partition(".")[0]).decode().split()[1]

    async def scenario(o: Replica) -> None:
        o.publisher.tick()
        first = second = ""
        while not first or until(first) != until(second):  # until both begin in one second
            await sign_in(o)
            first = o.http.cookies[COOKIE]
            assert (await o.http.delete("/admin/api/session")).status_code == 200
            await sign_in(o)
            second = o.http.cookies[COOKIE]
        assert (await o.http.get("/admin/api/overview")).status_code == 200

    play(url, scenario)


def test_who_signs_out_while_the_database_is_away_is_told(url: str) -> None:
    async def scenario(o: Replica) -> None:
        await sign_in(o)
        headers = {"cookie": f"{COOKIE}={o.http.cookies[COOKIE]}"}
        with sqlite3.connect(url.removeprefix("sqlite:///")) as database:
            database.execute("ALTER TABLE ended_sessions RENAME TO away")
        refused = await o.http.delete("/admin/api/session")
        assert error_of(refused, 503)["message"].startswith("signed out at this gateway only")
        assert refused.headers["x-request-id"]
        assert (await o.http.get("/admin/api/overview", headers=headers)).status_code == 401

    play(url, scenario)


def test_a_session_may_be_for_looking_only(url: str) -> None:
    async def scenario(o: Replica) -> None:
        await o.here.site("a")
        assert (await sign_in(o, view_only=True)).json() == {"may_act": False}
        assert (await o.http.get("/admin/api/sites")).status_code == 200
        refused = await o.http.post("/admin/api/sites/a/drain", json={"reason": "x"})
        assert (refused.status_code, "only look" in refused.text) == (403, True)

    play(url, scenario)
