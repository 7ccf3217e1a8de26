"""HTTP to a server of the OpenAI kind: what it serves, how busy it is, and answers as they stream."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from site_engine.errors import NotServed, Reason
from site_engine.remote import http2
from site_engine.remote.request import Asking

CONNECT_S, PROBE_S = 5.0, 5.0
PAGE_BYTES_MAX = 16 << 20
KEEP_S = 2.0
"""Connections are kept for less time than servers keep them (uvicorn: 5 s), so that few are found closed."""
_CLOSED = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
"""What a request meets on a connection that the server closed meanwhile; it is worth a second try."""
RETRY_AFTER_S, RETRY_AFTER_MAX_S = 1.0, 30.0
_CONTEXT = re.compile(
    r"context_length|context length|context size|context window|maximum context|max_model_len|"
    r"exceed_context|too many tokens|`inputs` tokens|longer than the model",
    re.IGNORECASE,
)


class ServerLost(Exception):
    """The server cannot be reached, fell silent, or broke off. The message says which."""


class ServerRefused(Exception):
    """The server did not begin an answer. `retry_after_s`: it is full, and asks to be left alone so long."""

    def __init__(self, refusal: NotServed, retry_after_s: float | None = None) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
        self.retry_after_s = retry_after_s


class Server:
    """`root` has no /v1 at its end. Over TLS it is HTTP/2 where the server offers that.

    A server that says nothing for `silence_s` in an answer has hung.
    """

    def __init__(
        self,
        root: str,
        key: str,
        *,
        silence_s: float,
        connections: int,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.root = root
        self._key = key.encode()
        self._client = httpx.AsyncClient(
            base_url=root,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(silence_s, connect=CONNECT_S, pool=silence_s),
            limits=httpx.Limits(
                max_connections=connections,
                max_keepalive_connections=connections,
                keepalive_expiry=KEEP_S,
            ),
            http2=root.startswith("https://") and http2.offered(),
            transport=transport,
            trust_env=not root.startswith(("http://127.", "http://localhost", "http://[::1]")),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def get(self, path: str) -> tuple[int, bytes]:
        """Raises ServerLost."""
        try:
            response = await self._send(self._client.build_request("GET", path, timeout=PROBE_S))
            try:
                return response.status_code, (await response.aread())[:PAGE_BYTES_MAX]
            finally:
                await response.aclose()
        except (httpx.HTTPError, OSError) as exc:
            raise ServerLost(f"{self.root} does not answer: {_told(exc)}") from exc

    @asynccontextmanager
    async def answer(self, asking: Asking) -> AsyncIterator[AsyncIterator[bytes]]:
        """The bytes of the answer as they come; leaving early closes the connection, which cancels it there.

        Raises ServerRefused before the first byte, ServerLost at any time.
        """
        try:
            response = await self._send(self._client.build_request("POST", asking.path, json=asking.body))
            try:
                if response.status_code != httpx.codes.OK:
                    told = self._without_key(await response.aread())
                    raise refused(response.status_code, told, response.headers)
                yield response.aiter_bytes()
            finally:
                await response.aclose()
        except (httpx.HTTPError, httpx.StreamError, OSError) as exc:
            raise ServerLost(f"{self.root} broke off: {_told(exc)}") from exc

    def _without_key(self, told: bytes) -> bytes:
        """Some servers repeat the key that they refuse, and what they say goes on to clients."""
        return told.replace(self._key, b"***") if self._key else told

    async def _send(self, request: httpx.Request) -> httpx.Response:
        """Up to the headers of its response."""
        try:
            return await self._client.send(request, stream=True)
        except _CLOSED:
            return await self._client.send(request, stream=True)


def refused(status: int, body: bytes, headers: Mapping[str, str]) -> ServerRefused:
    """What a status other than 200 means for the attempt."""
    message, code, param = _error(body)
    told = f"the server answered {status}: {message}"
    if status in {400, 413, 422}:
        too_long = status == 413 or _CONTEXT.search(f"{code} {message}")
        reason = Reason.CONTEXT_LENGTH if too_long else Reason.INVALID
        return ServerRefused(NotServed(reason, message, param))
    if status in {408, 429, 503}:
        return ServerRefused(NotServed(Reason.FULL, told), _retry_after_s(headers))
    if status in {404, 405, 501}:
        return ServerRefused(NotServed(Reason.UNSUPPORTED, told, param))
    if status in {401, 403}:
        return ServerRefused(NotServed(Reason.INTERNAL, f"{told} (this site's key, not the client's)"))
    return ServerRefused(NotServed(Reason.INTERNAL, told))


def _error(body: bytes) -> tuple[str, str, str]:
    """Message, code and field, from the shapes of error that servers use; else the body's beginning."""
    try:
        found: Any = json.loads(body)
    except ValueError:
        found = None
    if isinstance(found, dict) and isinstance(found.get("error"), dict):
        found = found["error"]
    if not isinstance(found, dict):
        return body[:300].decode(errors="replace").strip() or "no reason given", "", ""
    message = found.get("message") or found.get("error") or found.get("detail") or "no reason given"
    code = f"{found.get('code') or ''} {found.get('type') or found.get('error_type') or ''}"
    return str(message)[:1000], code, str(found.get("param") or "")


def _retry_after_s(headers: Mapping[str, str]) -> float:
    try:
        asked = float(headers.get("retry-after", ""))
    except ValueError:
        return RETRY_AFTER_S
    return min(RETRY_AFTER_MAX_S, max(0.0, asked))


def _told(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
