"""HTTP to a server of the OpenAI API: its models and metrics, and answers as they stream."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from site_engine.errors import NotServed, Reason, describe
from site_engine.remote import http2, orphans
from site_engine.remote.request import HttpRequest

log = logging.getLogger(__name__)

CONNECT_S, PROBE_S = 5.0, 5.0
MAX_PAGE_BYTES = 16 << 20
KEEP_S = 2.0
"""Connections are kept for less time than servers keep them (uvicorn: 5 s), so that few are found closed."""
_CLOSED = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
"""Errors of a connection that the server closed meanwhile; the request is worth a second try."""
RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1.0, 30.0
OVERLOADED = 529
"""Anthropic's own status."""
_CONTEXT = re.compile(
    r"context_length|context length|context size|context window|maximum context|max_model_len|"
    r"exceed_context|too many tokens|`inputs` tokens|`inputs` must have less|longer than the model|"
    r"(prompt|input) is too long|maximum number of tokens allowed|maximum (model|prompt) length|"
    r"exceed context limit|exceeded model token limit|supports at most \d+ completion tokens\.$",
    re.IGNORECASE,
)
_FULL = re.compile(r'"?((the|that) )?(model|server|engine) is (currently )?overloaded', re.IGNORECASE)
"""The beginning of a message: further on it may repeat words of the client."""
_NOT_HERE = re.compile(
    r'^400 BAD_REQUEST |exceeds the maximum allowed length|^ *"?Input validation error|'
    r"Unsupported (parameter|value)|Extra inputs are not permitted|Unknown name|"
    r"property '\w+' is unsupported|Argument not supported"
)
"""Of a code and a message, what another site may take: of SGLang, a grammar that it can't follow or a prompt
that its memory has no room for though its context has; of TGI, values such as a `top_p` of 0; of OpenAI's
models that reason, of Mistral, Gemini, Groq and xAI, fields that they do not have.
"""


class ServerLost(Exception):
    """The server cannot be reached, fell silent, or broke off. The message says which.

    Clients may read that of an answer, so that it has no address. That of a probe is for the log.
    """


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
        orphans.free()
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
            http2=root.startswith("https://") and http2.enable(),
            transport=transport,
            trust_env=not root.startswith(("http://127.", "http://localhost", "http://[::1]")),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return the status and the body, cut at MAX_PAGE_BYTES. Raises ServerLost."""
        try:
            response = await self._send(self._client.build_request("GET", path, timeout=PROBE_S))
            body = bytearray()
            try:
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) >= MAX_PAGE_BYTES:
                        break
                return response.status_code, bytes(body[:MAX_PAGE_BYTES])
            finally:
                await response.aclose()
        except (httpx.HTTPError, OSError) as exc:
            raise ServerLost(f"{self.root} does not answer: {describe(exc)}") from exc

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON object of an answer that comes as a whole. Raises ServerRefused and ServerLost."""
        request = HttpRequest(path, body)
        async with self.stream(request) as received:
            data = b"".join([part async for part in received])
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as exc:
            raise self._lost(f"answers what is no JSON at {path}", exc) from exc
        if not isinstance(found, dict):
            raise self._lost(f"answers no JSON object at {path}")
        return found

    @asynccontextmanager
    async def stream(self, request: HttpRequest) -> AsyncIterator[AsyncIterator[bytes]]:
        """Yield the bytes of the answer as they come; leaving early cancels it at the server.

        Raises ServerRefused before the first byte, ServerLost at any time.
        """
        try:
            response = await self._send(self._client.build_request("POST", request.path, json=request.body))
            try:
                if response.status_code != httpx.codes.OK:
                    body = await response.aread()
                    if self._key:  # some servers repeat the key that they refuse, and clients see the message
                        body = body.replace(self._key, b"***")
                    raise server_refused(response.status_code, body, response.headers)
                yield response.aiter_bytes()
            finally:
                await response.aclose()
        except (httpx.HTTPError, httpx.StreamError, OSError) as exc:
            raise self._lost(f"broke off: {type(exc).__name__}", exc) from exc

    def _lost(self, what: str, because: Exception | None = None) -> ServerLost:
        """Log a failure with the address of the server; return it without. The messages of httpx and of the
        system may have one, too.
        """
        log.warning("%s %s%s", self.root, what, f" ({describe(because)})" if because else "")
        return ServerLost(f"the server behind this site {what}")

    async def _send(self, request: httpx.Request) -> httpx.Response:
        """Send a request; return once the headers of its response are there."""
        try:
            return await self._client.send(request, stream=True)
        except _CLOSED:
            return await self._client.send(request, stream=True)


def server_refused(status: int, body: bytes, headers: Mapping[str, str]) -> ServerRefused:
    """Translate a response other than 200 into the refusal of an attempt."""
    message, code, param = parse_error(body)
    text = f"the server answered {status}: {message}"
    if status in {400, 413, 422}:
        said = f"{code} {message}"
        too_long = status == 413 or _CONTEXT.search(said)
        refused = Reason.UNSUPPORTED if _NOT_HERE.search(said) else Reason.INVALID
        reason = Reason.CONTEXT_LENGTH if too_long else refused
        return ServerRefused(NotServed(reason, message, param))
    if status in {408, 429, 503, OVERLOADED}:
        return ServerRefused(NotServed(Reason.FULL, text), retry_after_s_of(headers))
    if status in {404, 405, 501}:
        return ServerRefused(NotServed(Reason.UNSUPPORTED, text, param))
    if status in {401, 403}:
        return ServerRefused(NotServed(Reason.INTERNAL, f"{text} (this site's key, not the client's)"))
    return ServerRefused(NotServed(Reason.INTERNAL, text))


def refused_in_stream(error: bytes) -> ServerRefused | None:
    """Translate an error in place of an answer into a refusal that is known for one. None: the server failed.

    Most codes tell nothing there: vLLM gives 400 to faults of its own, and TGI 422 to everything.
    """
    message, code, _ = parse_error(error)
    is_full = code.startswith(("408 ", "429 ", "503 ")) or "overloaded" in code or _FULL.match(message)
    refused = server_refused(503 if is_full else 400, error, {})
    return None if refused.refusal.reason is Reason.INVALID else refused


def parse_error(body: bytes) -> tuple[str, str, str]:
    """Return message, code and field from the shapes of error that servers use; else the body's beginning."""
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, list) and len(found) == 1:  # of Gemini
        found = found[0]
    if isinstance(found, dict) and isinstance(found.get("error"), dict):
        found = found["error"]
    if not isinstance(found, dict):
        return body[:300].decode(errors="replace").strip() or "no reason given", "", ""
    message = found.get("message") or found.get("error") or found.get("detail") or "no reason given"
    code = f"{found.get('code') or ''} {found.get('type') or found.get('error_type') or ''}"
    return _text(message)[:1000], code, _text(found.get("param") or "")


def _text(found: object) -> str:
    """Return text that can be sent: JSON may hold halves of characters."""
    return str(found).encode(errors="replace").decode()


def retry_after_s_of(headers: Mapping[str, str]) -> float:
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return RETRY_AFTER_S
    return min(MAX_RETRY_AFTER_S, max(0.0, seconds))
