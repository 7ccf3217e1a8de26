"""A request to a server may be cancelled at any moment: its connection is free for the next."""

from __future__ import annotations

import asyncio

import httpcore
import httpx
import pytest

from site_engine.remote.request import HttpRequest
from site_engine.remote.server import Server

REQUEST = HttpRequest("/v1/completions", {"prompt": "ab"})
ANSWER = [b"HTTP/1.1 200 OK\r\n", b"content-length: 2\r\n", b"\r\n", b"ok"]
SILENCE_S = 0.5
"""Waited out by a request that gets no connection, and so only where this test fails."""
TURNS = 40
"""Turns of the event loop, more than an answer takes."""


def one_connection() -> Server:
    """A server that is reached over one connection at a time, and in memory."""
    transport = httpx.AsyncHTTPTransport()
    backend = httpcore.AsyncMockBackend(ANSWER)
    transport._pool = httpcore.AsyncConnectionPool(max_connections=1, network_backend=backend)
    return Server("http://server", "", silence_s=SILENCE_S, connections=1, transport=transport)


async def read(server: Server) -> bytes:
    async with server.stream(REQUEST) as received:
        return b"".join([part async for part in received])


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def cancelled_after(number: int, server: Server) -> None:
    task = asyncio.create_task(read(server))
    await turns(number)
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("number", range(TURNS))
def test_a_request_that_is_cancelled_leaves_its_connection(number: int) -> None:
    async def scenario() -> None:
        server = one_connection()
        await cancelled_after(number, server)
        assert await read(server) == b"ok"
        await server.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("number", range(TURNS))
def test_a_request_that_waits_for_a_connection_and_is_cancelled_leaves_it(number: int) -> None:
    async def scenario() -> None:
        server = one_connection()
        async with server.stream(REQUEST):
            waiting = asyncio.create_task(cancelled_after(TURNS + number, server))
            await turns(TURNS)
        await waiting
        assert await read(server) == b"ok"
        await server.close()

    asyncio.run(scenario())
