"""The API's promises about clients that disconnect and streams that fall silent, on real sockets."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gateway.domain import Delta, Finish, Query, Usage
from gateway.errors import Overloaded
from tests.support.fakes.edge import KEY, OPENING, Script, chat_body, on_loopback

DEADLINE_S = 60.0


class Held:
    """Answers that block before their opening, or after their first text, until they are released."""

    def __init__(self, opens: bool, fails: bool = False, parties: int = 1) -> None:
        self.opens, self.fails = opens, fails
        self._arriving = self._leaving = parties
        self.waiting = asyncio.Event()
        self.let_go = asyncio.Event()
        self.ended = asyncio.Event()

    async def __call__(self, query: Query) -> Any:
        try:
            if self.opens:
                yield OPENING
                yield Delta(0, "Hel", 1)
            self._arrive()
            await self.let_go.wait()
            if self.fails:
                raise Overloaded("Full.")
            if not self.opens:
                yield OPENING
            yield Delta(0, "lo", 2, finish=Finish.STOP)
            yield Usage(7, 2)
        finally:
            self._leave()

    def _arrive(self) -> None:
        self._arriving -= 1
        if not self._arriving:
            self.waiting.set()

    def _leave(self) -> None:
        self._leaving -= 1
        if not self._leaving:
            self.ended.set()


def play(scenario: Callable[[Script, int], Awaitable[None]], script: Script) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), on_loopback(script) as (_, port):
            await scenario(script, port)

    asyncio.run(main())


async def send(port: int, path: str = "/v1/chat/completions", **fields: Any) -> tuple[Any, Any]:
    """Send a request over a plain socket, so that the client can disconnect at any time."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(chat_body(**({"prompt": "x"} | fields))).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer


async def leave(writer: Any) -> None:
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_cancels_the_query(
    path: str, opens: bool, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(script: Script, port: int) -> None:
        script.answer = held = Held(opens)
        _, writer = await send(port, path, stream=stream)
        await held.waiting.wait()
        await leave(writer)
        await held.ended.wait()
        assert not held.let_go.is_set()

    with caplog.at_level(logging.INFO, "gateway.http.exchange"):
        play(scenario, Script())
    (line,) = (vars(record)["fields"] for record in caplog.records if record.name == "gateway.http.exchange")
    assert (line["status"], line["complete"]) == (200 if opens and stream else 499, False)
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_a_disconnect_cancels_every_prompt_of_the_request() -> None:
    async def scenario(script: Script, port: int) -> None:
        script.answer = held = Held(opens=True, parties=3)
        _, writer = await send(port, "/v1/completions", prompt=["a", "b", "c"])
        await held.waiting.wait()
        await leave(writer)
        await held.ended.wait()

    play(scenario, Script())


def test_a_disconnect_within_the_body_starts_no_query() -> None:
    async def scenario(script: Script, port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
        writer.write(f"{head}content-type: application/json\r\ncontent-length: 100\r\n\r\n{{".encode())
        await writer.drain()
        await leave(writer)
        reader, writer = await send(port)
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        assert len(script.queries) == 1
        await leave(writer)

    play(scenario, Script())


def test_a_connected_client_is_not_cancelled() -> None:
    async def scenario(script: Script, port: int) -> None:
        script.answer = held = Held(opens=False)
        reader, writer = await send(port)
        await held.waiting.wait()
        held.let_go.set()
        assert b'"content":"lo"' in await reader.read()
        await leave(writer)

    play(scenario, Script())


def test_an_idle_stream_is_kept_alive() -> None:
    async def scenario(script: Script, port: int) -> None:
        script.answer = held = Held(opens=True)
        reader, writer = await send(port, stream=True)
        await reader.readuntil(b": keep-alive\n\n")
        held.let_go.set()
        rest = await reader.read()
        assert b'"content":"lo"' in rest
        assert b"data: [DONE]\n\n" in rest
        await leave(writer)

    play(scenario, Script(settings={"keep_alive_s": 0.01}))


def test_a_busy_stream_has_no_keep_alive_comments() -> None:
    async def scenario(script: Script, port: int) -> None:
        reader, writer = await send(port, stream=True)
        assert b"keep-alive" not in (await reader.read()).split(b"\r\n\r\n", 1)[1]
        await leave(writer)

    play(scenario, Script())


@pytest.mark.parametrize("fails", [False, True])
def test_a_long_wait_for_the_first_token_is_kept_alive(fails: bool) -> None:
    """After the first comment an error can only be an event, and the headers cannot name the site."""

    async def scenario(script: Script, port: int) -> None:
        script.answer = held = Held(opens=False, fails=fails)
        reader, writer = await send(port, stream=True)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"text/event-stream" in head
        assert b"x-mico-site" not in head
        await reader.readuntil(b": keep-alive\n\n")
        held.let_go.set()
        rest = await reader.read()
        assert (b'"code":"overloaded"' if fails else b'"content":"lo"') in rest
        assert b"data: [DONE]\n\n" in rest
        await leave(writer)

    play(scenario, Script(settings={"first_byte_s": 0.01}))


def test_the_sdk_skips_keep_alive_comments() -> None:
    async def main() -> None:
        script = Script(settings={"keep_alive_s": 0.001})
        async with asyncio.timeout(DEADLINE_S), on_loopback(script) as (edge, port):
            script.answer = held = Held(opens=True, parties=2)
            reader, writer = await send(port, stream=True)
            stream = await edge.sdk.chat.completions.create(**chat_body(), stream=True)
            await reader.readuntil(b": keep-alive\n\n")
            held.let_go.set()
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Hello"
            await leave(writer)

    asyncio.run(main())
