"""The address of the server behind a site is for the site's log: clients read the rest."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from site_engine.remote.server import Server, ServerLost

ROOT = "http://gpu-7.internal:8000"


def what_is_told(answer: Exception | httpx.Response) -> str:
    """Return the message of the failure of a request that is answered so."""

    async def respond(_: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def scenario() -> str:
        server = Server(ROOT, "", silence_s=5, connections=1, transport=httpx.MockTransport(respond))
        with pytest.raises(ServerLost) as failure:
            await server.post("/count", {})
        await server.close()
        return str(failure.value)

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (httpx.ConnectError("[Errno 111] Connect call failed ('10.0.0.7', 8000)"), "broke off: ConnectError"),
        (httpx.ConnectError("certificate is not valid for 'gpu-7.internal'"), "broke off: ConnectError"),
        (httpx.ReadTimeout(""), "broke off: ReadTimeout"),
        (ConnectionResetError(104, "10.0.0.7"), "broke off: ConnectionResetError"),
        (httpx.Response(200, content=b"<html>"), "answers what is no JSON at /count"),
        (httpx.Response(200, content=b"[]"), "answers no JSON object at /count"),
    ],
)
def test_clients_are_told_the_fault_and_the_log_where_it_is(
    answer: Exception | httpx.Response, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert what_is_told(answer) == f"the server behind this site {told}"
    assert ROOT in caplog.text
    if isinstance(answer, Exception):
        assert str(answer) in caplog.text
