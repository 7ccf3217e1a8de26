"""Tests that a response is written as uvicorn writes it, byte by byte, and refused as uvicorn refuses it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway.http.response_writer import ResponseWriter

JSON = (b"content-type", b"application/json")
LENGTH = (b"content-length", b"2")
Messages = list[dict[str, Any]]


class Wire:
    """A transport whose client reads nothing while `full`."""

    def __init__(self) -> None:
        self.data = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.data += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def resume_reading(self) -> None: ...


def cycle_of(wire: Any, method: str, keep_alive: bool) -> RequestResponseCycle:
    log = logging.getLogger("test")
    scope: Any = {"type": "http", "http_version": "1.1", "method": method}
    return RequestResponseCycle(
        scope,
        wire,
        FlowControl(wire),
        log,
        log,
        access_log=False,
        default_headers=[(b"date", b"Mon, 23 Nov 2026 18:00:00 GMT")],
        message_event=asyncio.Event(),
        expect_100_continue=True,
        keep_alive=keep_alive,
        on_response=lambda: None,
    )


def written(messages: Messages, *, method: str, keep_alive: bool, by_uvicorn: bool) -> tuple[object, ...]:
    """Return what reached the wire, the error if there was one, and how the response ended."""

    async def main() -> tuple[object, ...]:
        wire, error = Wire(), ""
        cycle = cycle_of(wire, method, keep_alive)
        send: Any = cycle.send if by_uvicorn else writer_of(cycle).send
        try:
            for message in messages:
                await send(message)
        except RuntimeError as exc:
            error = str(exc)
        ended = cycle.response_started, cycle.response_complete, cycle.waiting_for_100_continue
        return wire.data, wire.closed, error, ended

    return asyncio.run(main())


def writer_of(cycle: RequestResponseCycle) -> Any:
    sent = asyncio.get_running_loop().create_future()
    sent.set_result(None)
    return ResponseWriter(cycle, sent)


def start(*headers: tuple[bytes, bytes], status: int = 200) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(data: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


RESPONSES: dict[str, Messages] = {
    "whole": [start(JSON, LENGTH), body(b"{}")],
    "whole, in parts": [start(JSON, LENGTH), body(b"{", more=True), body(b"}")],
    "streamed": [start(JSON), body(b"data: 1\n\n", more=True), body(b"x" * 300, more=True), body(b"end")],
    "streamed, with empty parts": [start(JSON), body(b"", more=True), body(b"a", more=True), body(b"")],
    "error": [start(JSON, LENGTH, status=429), body(b"{}")],
    "without a body": [start(status=204), body(b"")],
    "twice the same header": [start((b"set-cookie", b"a=1"), (b"set-cookie", b"b=2"), LENGTH), body(b"{}")],
    "closes": [start(LENGTH, (b"connection", b"close")), body(b"{}")],
    "in chunks, as it says": [start((b"transfer-encoding", b"chunked")), body(b"a", more=True), body(b"b")],
    "large letters": [start((b"Content-Length", b"2"), (b"Connection", b"close")), body(b"{}")],
    "tabs and bytes above ASCII": [start((b"x-mico-site", b"a\tb \xe4"), LENGTH), body(b"{}")],
    "longer than it says": [start(LENGTH), body(b"{}}")],
    "shorter than it says": [start(LENGTH), body(b"{")],
    "a second head": [start(LENGTH), start(LENGTH)],
    "a body without a head": [body(b"{}")],
    "after its end": [start(), body(b""), body(b"late", more=True)],
    "cut by a value": [start((b"x-mico-site", b"a\r\nset-cookie: b"), LENGTH), body(b"{}")],
    "cut by a name": [start((b"x\r\ny", b"a"), LENGTH), body(b"{}")],
    "with a zero": [start((b"x-mico-site", b"a\0"), LENGTH), body(b"{}")],
}


@pytest.mark.parametrize("keep_alive", (True, False))
@pytest.mark.parametrize("method", ("POST", "HEAD"))
@pytest.mark.parametrize("name", RESPONSES)
def test_a_response_is_written_as_by_uvicorn(name: str, method: str, keep_alive: bool) -> None:
    ours, theirs = (
        written(RESPONSES[name], method=method, keep_alive=keep_alive, by_uvicorn=each)
        for each in (False, True)
    )
    assert ours == theirs


def test_a_chunk_waits_while_the_client_reads_too_slowly() -> None:
    async def main() -> None:
        wire = Wire()
        cycle = cycle_of(wire, "POST", keep_alive=True)
        writer = writer_of(cycle)
        await writer.send(start(JSON))
        head = wire.data
        cycle.flow.pause_writing()
        sending = asyncio.ensure_future(writer.send(body(b"data: 1\n\n", more=True)))
        for _ in range(3):
            await asyncio.sleep(0)
        assert wire.data == head and not sending.done()
        cycle.flow.resume_writing()
        await sending
        assert wire.data == head + b"9\r\ndata: 1\n\n\r\n"

    asyncio.run(main())


def test_nothing_is_written_to_a_client_that_left() -> None:
    async def main() -> None:
        wire = Wire()
        cycle = cycle_of(wire, "POST", keep_alive=True)
        writer = writer_of(cycle)
        await writer.send(start(JSON))
        before = wire.data
        cycle.disconnected = True
        await writer.send(body(b"data: 1\n\n", more=True))
        assert wire.data == before

    asyncio.run(main())
