"""A server that is full is left alone as long as it asked at the longest."""

from __future__ import annotations

import asyncio

import httpx

from site_engine.core.request import Request
from site_engine.engine_client import Prepared
from site_engine.errors import NotServed, Reason
from site_engine.remote.dialects import UNKNOWN
from site_engine.remote.engine import RemoteEngine, ServerProfile
from site_engine.remote.request import HttpRequest
from site_engine.remote.server import Server


def test_a_refusal_that_names_no_time_does_not_shorten_one_that_did() -> None:
    async def scenario() -> list[str]:
        first_is_told = asyncio.Event()

        async def answer(request: httpx.Request) -> httpx.Response:
            if request.url.path == "/named":
                return httpx.Response(429, headers={"retry-after": "20"})
            await first_is_told.wait()
            return httpx.Response(429)

        server = Server(
            "http://server", "", silence_s=60, connections=4, transport=httpx.MockTransport(answer)
        )
        engine = RemoteEngine(server, ServerProfile({"m": "m"}, UNKNOWN, 64, 1000, 4, 8), lambda: 7.0)
        told: list[str] = []

        def submit(name: str) -> asyncio.Future[NotServed]:
            refused: asyncio.Future[NotServed] = asyncio.get_running_loop().create_future()

            def reply(said: NotServed | None) -> None:
                if isinstance(said, NotServed):
                    refused.set_result(said)

            prepared = Prepared((), "", guessed_tokens=1, payload=HttpRequest(f"/{name}", {}))
            engine.submit(prepared, (Request(name, [1]),), reply)
            return refused

        named, unnamed = submit("named"), submit("unnamed")
        async with asyncio.timeout(60):
            assert (await named).reason is Reason.FULL
            told.append((await submit("after the first")).message)
            first_is_told.set()
            assert (await unnamed).reason is Reason.FULL
            told.append((await submit("after both")).message)
        engine.fail_all("the test is over")
        await server.close()
        return told

    assert asyncio.run(scenario()) == ["the server asked to be left alone for 20.0 s more"] * 2
