"""What the gateway logs of a request and its response."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from gateway.admin.access import Access
from gateway.admin.session import session_routes
from gateway.http.app import create_http
from tests.support.fakes.edge import Edge, Script, chat_body, run


def test_the_sdks_own_headers_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(edge: Edge) -> None:
        sdk = edge.sdk.with_options(organization="org-1", project="proj-1")
        await sdk.chat.completions.create(**chat_body())

    with caplog.at_level(logging.INFO, "gateway"):
        run(scenario)
    (record,) = [record for record in caplog.records if record.name == "gateway.http.exchange"]
    fields = vars(record)["fields"]
    client = fields["client"]
    assert client["openai-organization"] == "org-1"
    assert client["openai-project"] == "proj-1"
    assert "x-stainless-retry-count" in client
    assert fields["status"] == 200
    assert fields["complete"] is True
    assert "mico-secret" not in str(vars(record))


def test_a_head_is_logged_as_complete(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(edge: Edge) -> None:
        assert (await edge.http.head("/v1/models")).status_code == 200

    with caplog.at_level(logging.INFO, "gateway"):
        run(scenario)
    (record,) = [record for record in caplog.records if record.name == "gateway.http.exchange"]
    assert vars(record)["fields"]["complete"] is True


def test_a_client_that_leaves_within_its_body_is_no_failure_of_the_gateway(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Anybody could fill the log with the stack traces of sign-ins that were not sent to their end."""
    backend = Script().backend()
    app = create_http(backend, session_routes(Access(backend, lambda _: None, b"k" * 32)))
    scope: Any = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/admin/api/session",
        "raw_path": b"/admin/api/session",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"500")],
        "client": ("127.0.0.1", 1),
        "state": {},
    }
    received: list[Any] = [
        {"type": "http.disconnect"},
        {"type": "http.request", "body": b'{"key":', "more_body": True},
    ]

    async def receive() -> Any:
        return received.pop()

    async def send(_: Any) -> None:
        """Nobody is there."""

    with caplog.at_level(logging.INFO, "gateway"):
        asyncio.run(app(scope, receive, send))
    (record,) = caplog.records
    assert (record.levelno, vars(record)["fields"]["status"]) == (logging.INFO, 400)
