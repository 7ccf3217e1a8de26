"""The gateway's HTTP API as the command line uses it: plain dictionaries, errors a person can act on."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mico.errors import Away, CommandFailed, ExitCode
from mico.sse import data_events, lines

if TYPE_CHECKING:
    import httpx

CONNECT_S = 5.0
ANSWER_S = 600.0
LOOK_S = 30.0
"""What only looks is not worth more patience."""
PASSING = (502, 503, 504)
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ENVIRONMENT = "HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and SSL_CERT_FILE in the environment say how"


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One chunk of an answer as the gateway sent it, with the response headers beside it."""

    chunk: dict[str, Any]
    headers: dict[str, str]


class Client:
    """`base_url` ends in /v1, as OpenAI's SDK has it; the admin API lives beside it."""

    def __init__(
        self, base_url: str, api_key: str | None, *, transport: httpx.BaseTransport | None = None
    ) -> None:
        import httpx

        self.base_url = base_url.rstrip("/")
        url = address(self.base_url)
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise CommandFailed(
                "the API key is none",
                cause="a key has plain letters, digits and signs only",
                tip="mico config show says where it comes from",
                exit_code=ExitCode.WRONG_USAGE,
            )
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
        here = url.scheme == "http" and url.host in LOOPBACK
        try:  # a proxy for the world outside does not know this machine's own addresses
            self.http = httpx.Client(
                headers=headers, timeout=timeout, transport=transport, trust_env=not here
            )
        except (ImportError, ValueError, OSError) as error:
            raise CommandFailed(
                "the gateway can't be asked", cause=f"{type(error).__name__}: {error}", tip=ENVIRONMENT
            ) from error

    @property
    def root(self) -> str:
        return self.base_url.removesuffix("/v1")

    def get(self, path: str, within_s: float = LOOK_S) -> dict[str, Any]:
        """`path` starts with /v1/ or /admin/. Raises CommandFailed when the answer is not a success, and Away
        where nothing is said for `within_s`."""
        import httpx

        return self._ask("GET", path, timeout=httpx.Timeout(within_s, connect=min(within_s, CONNECT_S)))

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._ask("POST", path, body)

    def upload(self, path: Path, purpose: str) -> dict[str, Any]:
        """As it is read: a large file is never in memory as a whole."""
        with path.open("rb") as file:
            return self._ask(
                "POST", "/v1/files", files={"file": (path.name, file)}, data={"purpose": purpose}
            )

    def download(self, path: str, target: Path) -> None:
        """Into `target`, there only once it is complete; what is no file, such as a pipe, as it comes."""
        import httpx

        special = target.exists() and not target.is_file()
        part = target if special else target.with_name(f"{target.name}.part")
        try:
            with self.http.stream("GET", self.root + path) as response, part.open("wb") as file:
                if response.is_error:
                    raise refusal(response.status_code, response.read().decode(errors="replace"))
                for data in response.iter_bytes():
                    file.write(data)
        except httpx.HTTPError as error:
            raise self.unreachable(error) from error
        if not special:
            part.replace(target)

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, **options: Any
    ) -> dict[str, Any]:
        import httpx

        try:
            response = self.http.request(method, self.root + path, json=body, **options)
        except httpx.HTTPError as error:
            raise self.unreachable(error) from error
        except ValueError as error:
            raise CommandFailed("that can't be sent", cause=str(error)) from error
        if response.is_error:
            raise refusal(response.status_code, response.text)
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise CommandFailed(
                f"{self.root} is no gateway of Mico",
                cause=f"its answer to {path} begins with {response.text[:60]!r}",
                tip="--base-url or MICO_BASE_URL names another",
            )
        return answer

    def chat(self, model: str, messages: list[dict[str, str]], **options: Any) -> Generator[StreamEvent]:
        """The chunks of one streamed answer. Closing the iterator closes the connection and ends the work."""
        import httpx

        body = {"model": model, "messages": messages, "stream": True, **options}
        body["stream_options"] = {"include_usage": True}
        try:
            with self.http.stream("POST", f"{self.root}/v1/chat/completions", json=body) as response:
                if response.is_error:
                    raise refusal(response.status_code, response.read().decode(errors="replace"))
                headers = dict(response.headers)
                for data in data_events(lines(response.iter_bytes())):
                    if data == "[DONE]":
                        return
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise CommandFailed("the answer broke off", cause=chunk["error"]["message"])
                    yield StreamEvent(chunk, headers)
        except httpx.HTTPError as error:
            raise self.unreachable(error) from error
        except json.JSONDecodeError as error:
            raise CommandFailed("the answer broke off", cause=f"what came is no JSON: {error}") from error
        except UnicodeEncodeError as error:
            raise CommandFailed("that can't be sent", cause=str(error)) from error
        raise CommandFailed("the answer broke off", cause="the stream ended without [DONE]")

    def unreachable(self, error: Exception) -> Away:
        return Away(
            f"the gateway at {self.root} does not answer",
            cause=str(error) or type(error).__name__,
            tip="mico up starts one here; --base-url or MICO_BASE_URL names another",
        )


def address(base_url: str) -> httpx.URL:
    """Raises CommandFailed for what is none."""
    import httpx

    try:
        url = httpx.URL(base_url)
        why = "" if url.scheme in ("http", "https") and url.host else "it is not http://HOST or https://HOST"
    except (httpx.InvalidURL, ValueError) as error:
        url, why = httpx.URL(), str(error)
    if why:
        raise CommandFailed(
            f"{base_url!r} is no address of a gateway",
            cause=why,
            tip="such as http://127.0.0.1:8080/v1; --base-url or MICO_BASE_URL gives it",
            exit_code=ExitCode.WRONG_USAGE,
        )
    return url


def refusal(status: int, text: str) -> CommandFailed:
    """An error answer in OpenAI's shape, or whatever stood in its place."""
    try:
        cause = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        cause = text[:200]
    if status == 401:
        tip = "mico keys create NAME makes a key; --api-key or MICO_API_KEY passes it"
        return CommandFailed(
            "the API key was not accepted", cause=cause, tip=tip, exit_code=ExitCode.NOT_AUTHENTICATED
        )
    kind = Away if status in PASSING else CommandFailed
    return kind(f"the gateway refused with status {status}", cause=cause)
