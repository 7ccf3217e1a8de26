"""HTTP client of the gateway for the command line. Returns dictionaries and raises actionable errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mico.errors import CommandFailed, ExitCode, GatewayUnavailable
from mico.sse import data_events, lines

if TYPE_CHECKING:
    import httpx

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 600.0
READ_TIMEOUT_S = 30.0
"""Timeout of GET requests, which are answered without delay."""
TEMPORARY_STATUSES = (502, 503, 504)
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ENVIRONMENT_TIP = "HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and SSL_CERT_FILE in the environment say how"


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """A chunk of a streamed answer as sent by the gateway, and the response headers."""

    chunk: dict[str, Any]
    headers: dict[str, str]


class Answer(dict[str, Any]):
    """A JSON object in an answer. Raises CommandFailed for a missing key."""

    def __missing__(self, key: str) -> Any:
        raise not_understood(f"it has no {key!r}")

    def objects(self, key: str) -> list[Answer]:
        """Return the list of objects at `key`. Raises CommandFailed if the value is not a list of objects."""
        found = self[key]
        if not isinstance(found, list) or not all(isinstance(each, Answer) for each in found):
            raise not_understood(f"its {key!r} is no list of objects")
        return found


def not_understood(cause: str) -> CommandFailed:
    return CommandFailed(
        "the gateway's answer is not understood",
        cause=f"{cause}: another version of Mico, or another program",
        tip="mico doctor shows its version; --base-url or MICO_BASE_URL names another",
    )


class Client:
    """Client of a gateway's API. `base_url` ends in /v1, as in OpenAI's SDK. The admin API is at /admin.

    Raises CommandFailed when a request fails, and GatewayUnavailable when no gateway responds.
    """

    def __init__(
        self, base_url: str, api_key: str | None, *, transport: httpx.BaseTransport | None = None
    ) -> None:
        import httpx

        self.base_url = base_url.rstrip("/")
        url = parse_base_url(self.base_url)
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise CommandFailed(
                "the API key is none",
                cause="a key has plain letters, digits and signs only",
                tip="mico config show says where it comes from",
                exit_code=ExitCode.WRONG_USAGE,
            )
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        is_local = url.scheme == "http" and url.host in LOOPBACK
        try:  # a proxy cannot reach loopback addresses of this machine
            self.http = httpx.Client(
                headers=headers,
                timeout=timeout,
                transport=transport,
                trust_env=not is_local,
                verify=not is_local,  # plain HTTP needs no certificates; loading them takes 80 ms
            )
        except (ImportError, ValueError, OSError) as error:
            raise CommandFailed(
                "the gateway can't be asked", cause=f"{type(error).__name__}: {error}", tip=ENVIRONMENT_TIP
            ) from error

    @property
    def root(self) -> str:
        return self.base_url.removesuffix("/v1")

    def get(self, path: str, timeout_s: float = READ_TIMEOUT_S) -> Answer:
        """Return the JSON answer to a GET of `path`, which starts with /v1/ or /admin/.

        Raises CommandFailed for an error status, and GatewayUnavailable after `timeout_s` without data.
        """
        import httpx

        return self._request(
            "GET", path, timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S))
        )

    def post(self, path: str, body: dict[str, Any]) -> Answer:
        return self._request("POST", path, body)

    def delete(self, path: str) -> Answer:
        return self._request("DELETE", path)

    def upload(self, path: Path, purpose: str) -> Answer:
        """Upload a file as a stream, without loading it into memory."""
        with path.open("rb") as file:
            return self._request(
                "POST", "/v1/files", files={"file": (path.name, file)}, data={"purpose": purpose}
            )

    @contextmanager
    def uploads(self, purpose: str) -> Generator[Callable[[Path], str]]:
        """Yield a function that uploads a file and returns its id.

        Deletes the uploaded files if the block raises CommandFailed, unless the gateway is unavailable.
        """
        ids = list[str]()

        def upload(path: Path) -> str:
            ids.append(self.upload(path, purpose)["id"])
            return ids[-1]

        try:
            yield upload
        except GatewayUnavailable:  # deleting would fail as well
            raise
        except CommandFailed:
            for file_id in ids:
                with suppress(CommandFailed):
                    self.delete(f"/v1/files/{file_id}")
            raise

    def download(self, path: str, target: Path) -> None:
        """Download to `target`, which is created when the download is complete.

        Pipes, devices and links are written to directly: /dev/stdout can be a link to a redirected file.
        """
        import httpx

        is_special = target.is_symlink() or (target.exists() and not target.is_file())
        partial = target if is_special else target.with_name(f"{target.name}.part")
        written = 0
        try:
            with self.http.stream("GET", self.root + path) as response, partial.open("wb") as file:
                if response.is_error:
                    raise error_from_response(response.status_code, response.read().decode(errors="replace"))
                for data in response.iter_bytes():
                    written += file.write(data)
            if not is_special:
                partial.replace(target)
        except httpx.HTTPError as error:
            if is_special and written:  # a retry would write the beginning again
                raise CommandFailed("the download broke off", cause=str(error)) from error
            raise self.unreachable(error) from error
        except OSError as error:
            raise CommandFailed(f"{target} was not written", cause=error.strerror or str(error)) from error
        finally:
            if not is_special:
                partial.unlink(missing_ok=True)

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None, **options: Any) -> Answer:
        import httpx

        try:
            response = self.http.request(method, self.root + path, json=body, **options)
        except httpx.HTTPError as error:
            raise self.unreachable(error) from error
        except (ValueError, httpx.InvalidURL) as error:
            raise CommandFailed("that can't be sent", cause=str(error)) from error
        if response.is_error:
            raise error_from_response(response.status_code, response.text)
        try:
            answer = response.json(object_hook=Answer)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, Answer):
            raise CommandFailed(
                f"{self.root} is no gateway of Mico",
                cause=f"its answer to {path} begins with {response.text[:60]!r}",
                tip="--base-url or MICO_BASE_URL names another",
            )
        return answer

    def chat(self, model: str, messages: list[dict[str, str]], **options: Any) -> Generator[StreamEvent]:
        """Yield the chunks of a streamed answer. Closing the generator cancels the request."""
        import httpx

        body = {"model": model, "messages": messages, "stream": True, **options}
        body["stream_options"] = {"include_usage": True}
        try:
            with self.http.stream("POST", f"{self.root}/v1/chat/completions", json=body) as response:
                if response.is_error:
                    raise error_from_response(response.status_code, response.read().decode(errors="replace"))
                headers = dict(response.headers)
                for data in data_events(lines(response.iter_bytes())):
                    if data == "[DONE]":
                        return
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise CommandFailed("the answer broke off", cause=error_message(data))
                    yield StreamEvent(chunk, headers)
        except httpx.HTTPError as error:
            raise self.unreachable(error) from error
        except json.JSONDecodeError as error:
            raise CommandFailed("the answer broke off", cause=f"what came is no JSON: {error}") from error
        except UnicodeEncodeError as error:
            raise CommandFailed("that can't be sent", cause=str(error)) from error
        raise CommandFailed("the answer broke off", cause="the stream ended without [DONE]")

    def unreachable(self, error: Exception) -> GatewayUnavailable:
        cause = str(error) or type(error).__name__
        tip = "mico up starts one here; --base-url or MICO_BASE_URL names another"
        if "CERTIFICATE_VERIFY_FAILED" in cause:
            tip = "SSL_CERT_FILE=FILE trusts the authorities in that file instead of the public ones"
        return GatewayUnavailable(f"the gateway at {self.root} does not answer", cause=cause, tip=tip)


def parse_base_url(base_url: str) -> httpx.URL:
    """Parse the base URL. Raises CommandFailed if it is not an http or https URL with a host."""
    import httpx

    try:
        url = httpx.URL(base_url)
        cause = (
            "" if url.scheme in ("http", "https") and url.host else "it is not http://HOST or https://HOST"
        )
    except (httpx.InvalidURL, ValueError) as error:
        url, cause = httpx.URL(), str(error)
    if cause:
        raise CommandFailed(
            f"{base_url!r} is no address of a gateway",
            cause=cause,
            tip="such as http://127.0.0.1:8080/v1; --base-url or MICO_BASE_URL gives it",
            exit_code=ExitCode.WRONG_USAGE,
        )
    return url


def error_message(text: str) -> str:
    """Return the message of an error in OpenAI's format, or the first 200 characters of other texts."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return " ".join(text[:200].split())


def error_from_response(status: int, text: str) -> CommandFailed:
    """Convert an error response, in OpenAI's format or any other, to a CommandFailed."""
    cause = error_message(text)
    if status == 401:
        tip = "mico keys create NAME makes a key (--admin for operators); --api-key or MICO_API_KEY passes it"
        return CommandFailed(
            "the API key was not accepted", cause=cause, tip=tip, exit_code=ExitCode.NOT_AUTHENTICATED
        )
    error_type = GatewayUnavailable if status in TEMPORARY_STATUSES else CommandFailed
    return error_type(f"the gateway refused with status {status}", cause=cause)
