"""Tests the limits of a connection: its speed, its size, the number of connections, and wrong keys."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
from litestar import get as route_get
from litestar.handlers import HTTPRouteHandler
from litestar.response import Stream

from gateway.admin.dashboard.pages import page_routes
from gateway.domain import Answer, AnswerEvent, Delta, Query
from gateway.http.app import create_http
from gateway.http.backend import Readiness
from gateway.http.server import ACCEPTS_IN_A_ROW, ConnectionLimits, http_server
from gateway.security.login_limiter import MAX_FAILURES, LoginLimiter
from tests.integration.store_databases.store_disk_test import no_descriptors
from tests.support.fakes.edge import (
    KEY,
    OPENING,
    READY,
    Script,
    chat_body,
    error_of,
    get,
    in_process,
    scripted,
)
from tests.support.fakes.federation import until

LIMITS = ConnectionLimits(
    connections=3, slow_s=10.0, bytes_per_s=1_000_000, header_bytes=4096, unread_bytes=100_000
)
HURRIED = replace(LIMITS, slow_s=0.5)
"""For those who are to be cut off: who is to be answered may be slower than that on a machine that stalls."""
Open = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
HEAD = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
JSON = HEAD + "content-type: application/json\r\n"


@asynccontextmanager
async def serving(
    script: Script, limits: ConnectionLimits = LIMITS, handlers: Sequence[HTTPRouteHandler] = ()
) -> AsyncIterator[Open]:
    app = create_http(script.backend(), [*page_routes(), *handlers])
    server = http_server(app, host="127.0.0.1", port=0, end_within_s=1, limits=limits)
    listener = socket.create_server(("127.0.0.1", 0))
    running = asyncio.create_task(server.serve(sockets=[listener]))
    port = listener.getsockname()[1]
    writers: list[asyncio.StreamWriter] = []

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        return reader, writer

    try:
        async with asyncio.timeout(60):
            yield connect
    finally:
        for writer in writers:
            writer.close()
        server.should_exit = True
        await running
        listener.close()


def play(
    scenario: Callable[[Open], Awaitable[None]],
    limits: ConnectionLimits = LIMITS,
    readiness: Readiness = READY,
    answer: Answer | None = None,
    handlers: Sequence[HTTPRouteHandler] = (),
) -> Script:
    script = Script(answer=answer or scripted("Hello"), readiness=readiness)

    async def main() -> None:
        async with serving(script, limits, handlers) as connect:
            await scenario(connect)

    asyncio.run(main())
    return script


def test_who_waits_for_a_file_descriptor_is_served_later_and_floods_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refusals() -> int:
        return sum("out of system resource" in record.message for record in caplog.records)

    async def scenario(connect: Open) -> None:
        _, first = await connect()
        with socket.socket() as waiting:
            waiting.setblocking(False)
            with no_descriptors():
                await asyncio.get_running_loop().sock_connect(waiting, first.get_extra_info("peername"))
                await until(refusals)
                assert refusals() <= ACCEPTS_IN_A_ROW
            reader, writer = await asyncio.open_connection(sock=waiting)
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()

    play(scenario)


async def cut(reader: asyncio.StreamReader) -> bytes:
    """Return the bytes received before the connection was cut."""
    came = b""
    with suppress(ConnectionError):
        while part := await reader.read(65536):
            came += part
    return came


async def answered(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
    return head + await reader.readexactly(int(length.partition(b":")[2]))


def comparable_head(head: bytes) -> list[bytes]:
    """Return the status and the headers, without those that differ from request to request."""
    own = (b"x-request-id", b"date", b"x-mico-", b"openai-processing-ms")
    return [line for line in head.lower().split(b"\r\n") if line and not line.startswith(own)]


def test_load_balancers_may_ask_by_head_and_get_what_get_says_without_its_body() -> None:
    """Uses one connection: a body sent by mistake would precede the next answer."""

    async def ask(connect: Open, path: str) -> bytes:
        reader, writer = await connect()
        heads: list[bytes] = []
        for method in ("GET", "HEAD", "GET"):
            head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n\r\n"
            writer.write(head.encode())
            answer = await (reader.readuntil(b"\r\n\r\n") if method == "HEAD" else answered(reader))
            heads.append(answer.partition(b"\r\n\r\n")[0])
        assert comparable_head(heads[0]) == comparable_head(heads[1]) == comparable_head(heads[2]), path
        writer.close()
        return heads[1]

    async def well(connect: Open) -> None:
        paths = ["/health", "/ready", "/version", "/", "/admin", "/admin/static/page.js", "/v1/models"]
        for path in paths:
            assert (await ask(connect, path)).startswith(b"HTTP/1.1 200"), path

    async def not_ready(connect: Open) -> None:
        assert (await ask(connect, "/ready")).startswith(b"HTTP/1.1 503")

    play(well)
    play(not_ready, readiness=Readiness(False, "No site has joined yet."))


@pytest.mark.parametrize("origin", ["", "origin: http://page\r\n"])
def test_a_stream_over_http_1_0_is_no_chunks_and_ends_with_the_connection(origin: str) -> None:
    async def scenario(connect: Open) -> None:
        reader, writer = await connect()
        body = json.dumps(chat_body(stream=True))
        writer.write(
            f"{JSON}{origin}content-length: {len(body)}\r\n\r\n{body}".replace("/1.1", "/1.0").encode()
        )
        head, _, frames = (await cut(reader)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and b"transfer-encoding" not in head.lower()
        events = frames.split(b"\n\n")
        assert all(each.startswith(b"data: ") for each in events[:-1])
        assert events[-2:] == [b"data: [DONE]", b""]

    play(scenario)


def test_a_head_ends_also_where_get_streams_for_ever() -> None:
    left = asyncio.Event()

    async def ticks() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"tick"
                await asyncio.sleep(0)
        finally:
            left.set()

    @route_get("/ticks")
    async def stream() -> Stream:
        return Stream(ticks())

    async def scenario(connect: Open) -> None:
        reader, writer = await connect()
        for path in ("/ticks", "/health"):
            writer.write(f"HEAD {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200"), path
        await left.wait()

    play(scenario, handlers=[stream])


def test_what_is_no_http_is_refused_in_the_shape_of_every_error() -> None:
    async def scenario(connect: Open) -> None:
        for line in (
            b"GET /v1/models/\xe6\xa8\xa1 HTTP/1.1",
            b"FOO / HTTP/1.1",
            b"\x16\x03\x01",
            b"GET / HTTP/x",
        ):
            reader, writer = await connect()
            writer.write(line + b"\r\nhost: x\r\n\r\n")
            head, _, body = (await cut(reader)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400"), line
            headers = dict(each.split(b": ", 1) for each in head.split(b"\r\n")[1:])
            assert headers[b"content-type"] == b"application/json" and len(headers[b"x-request-id"]) == 32
            error = json.loads(body)["error"]
            assert error.keys() == {"message", "type", "param", "code"} and error["code"] == "invalid_http"
            writer.close()

    play(scenario)


def test_what_is_no_http_is_not_told_within_an_answer() -> None:
    async def scenario(connect: Open) -> None:
        reader, writer = await connect()
        body = json.dumps(chat_body(stream=True)).encode()
        writer.write(f"{JSON}content-length: {len(body)}\r\n\r\n".encode() + body)
        await reader.readuntil(b"Hello")
        writer.write(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert b"HTTP/1.1" not in await cut(reader)

    async def unending(query: Query) -> AsyncGenerator[AnswerEvent, None]:
        yield OPENING
        yield Delta(0, "Hello", 1)
        await asyncio.Event().wait()

    play(scenario, answer=unending)


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_request_that_offers_another_protocol_is_answered_with_its_body(
    protocol: str, at_once: bool
) -> None:
    """Java's client offers HTTP/2 in every request without TLS."""

    async def scenario(connect: Open) -> None:
        reader, writer = await connect()
        body = json.dumps(chat_body()).encode()
        offer = f"connection: Upgrade, HTTP2-Settings\r\nupgrade: {protocol}\r\nhttp2-settings: AAEAAEAA\r\n"
        head = f"{JSON}{offer}content-length: {len(body)}\r\n\r\n".encode()
        if at_once:
            writer.write(2 * (head + body))
        for _ in range(2):
            if not at_once:
                writer.write(head)
                await writer.drain()
                writer.write(body)
            assert (await answered(reader)).startswith(b"HTTP/1.1 200")

    assert len(play(scenario).queries) == 2


def test_a_last_request_that_offers_another_protocol_is_answered() -> None:
    async def scenario(connect: Open) -> None:
        reader, writer = await connect()
        body = json.dumps(chat_body()).encode()
        offer = f"connection: Upgrade, close\r\nupgrade: h2c\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write((JSON + offer).encode() + body)
        assert (await cut(reader)).startswith(b"HTTP/1.1 200")

    play(scenario)


def test_who_says_nothing_or_never_ends_a_request_is_cut_off() -> None:
    async def scenario(connect: Open) -> None:
        for beginning in (b"", b"GET /hea", HEAD.encode(), JSON.encode() + b"content-length: 99\r\n\r\n{"):
            reader, writer = await connect()
            writer.write(beginning)
            assert await cut(reader) == b""

    assert not play(scenario, HURRIED).queries


def test_a_second_request_is_limited_as_the_first_is() -> None:
    async def scenario(connect: Open) -> None:
        for rest in (b"GET /hea", b"\r\n"):
            reader, writer = await connect()
            writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await answered(reader)).startswith(b"HTTP/1.1 200")
            writer.write(rest)
            assert await cut(reader) == b""

    play(scenario, HURRIED)


def test_who_sends_slowly_but_fast_enough_is_heard() -> None:
    async def scenario(connect: Open) -> None:
        reader, writer = await connect()
        body = b'{"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}' + b" " * 400_000
        writer.write((JSON + f"content-length: {len(body)}\r\n\r\n").encode())
        for start in range(0, len(body), 40_000):  # 0.6 s in all, longer than the time for a short request
            writer.write(body[start : start + 40_000])
            await asyncio.sleep(0.06)
        assert (await answered(reader)).startswith(b"HTTP/1.1 200")

    assert len(play(scenario, replace(HURRIED, bytes_per_s=10_000)).queries) == 1


def test_headers_without_end_and_bodies_after_the_answer_are_cut_off() -> None:
    async def scenario(connect: Open) -> None:
        reader, writer = await connect()
        with suppress(ConnectionError):
            for _ in range(200):
                writer.write(b"GET / HTTP/1.1\r\n" if _ == 0 else b"x: " + b"y" * 4000 + b"\r\n")
                await writer.drain()
        came = await cut(reader)
        assert came == b"" or came.startswith(b"HTTP/1.1 431")
        reader, writer = await connect()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n")
        assert (await answered(reader)).startswith(b"HTTP/1.1 401")
        with suppress(ConnectionError):
            for _ in range(400):
                writer.write(b"z" * 65536)
                await writer.drain()
        assert await cut(reader) == b""

    play(scenario)


def test_headers_over_the_limit_are_refused_also_when_they_come_at_once() -> None:
    """200 KB in one write were read as one request, since only the next write would have been too much."""

    async def scenario(connect: Open) -> None:
        for large in (b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 200_000, b"GET /" + b"y" * 5000):
            reader, writer = await connect()
            writer.write(large + b"\r\n\r\n" if b"host" in large else large + b" HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = await cut(reader)
            assert (
                answer.startswith(b"HTTP/1.1 431") and b"4096 bytes" in answer and b"x-request-id: " in answer
            )
        reader, writer = await connect()
        writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 3000 + b"\r\n\r\n")
        assert (await answered(reader)).startswith(b"HTTP/1.1 200")

    play(scenario)


def test_one_connection_too_many_is_closed_and_the_others_stay() -> None:
    async def scenario(connect: Open) -> None:
        held = [await connect() for _ in range(3)]
        for _, writer in held:
            writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        for reader, _ in held:
            await answered(reader)
        reader, _ = await connect()
        assert await cut(reader) == b""
        for reader, writer in held:
            writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await answered(reader)).startswith(b"HTTP/1.1 200")

    play(scenario)


def test_wrong_keys_are_looked_up_only_so_often_and_a_good_one_still_passes() -> None:
    looked: list[str] = []

    async def look_up_key(secret: str) -> Any:
        looked.append(secret)

    async def main() -> None:
        script = Script(
            answer=scripted("Hello"),
            settings={"look_up_key": look_up_key, "login_limiter": LoginLimiter(lambda: 0.0)},
        )
        async with in_process(script) as edge:
            body = chat_body()
            for _ in range(int(MAX_FAILURES)):
                error_of(await edge.post("/v1/chat/completions", body, authorization="Bearer wrong"), 401)
            for wrong in ("Bearer wrong", "Basic x", ""):
                refused = await edge.post("/v1/chat/completions", body, authorization=wrong)
                assert error_of(refused, 429)["code"] == "rate_limit_exceeded"
                assert int(refused.headers["retry-after"]) == 1
            assert len(looked) == int(MAX_FAILURES)
            assert (await edge.chat()).status_code == 200

    asyncio.run(main())


def test_a_neighbour_is_answered_while_wrong_keys_are_looked_up() -> None:
    looked, answers = list[str](), asyncio.Event()

    async def look_up_key(secret: str) -> Any:
        looked.append(secret)
        await answers.wait()

    async def main() -> None:
        async with in_process(Script(settings={"look_up_key": look_up_key})) as edge:
            flood = [
                asyncio.create_task(
                    edge.post("/v1/chat/completions", chat_body(), authorization=f"Bearer wrong-{number}")
                )
                for number in range(int(MAX_FAILURES))
            ]
            await until(lambda: len(looked) == len(flood), "all wait for the database")
            assert (await edge.chat(stream=True)).status_code == 200
            assert not any(task.done() for task in flood)
            answers.set()
            for refused in await asyncio.gather(*flood):
                error_of(refused, 401)

    asyncio.run(main())


def test_every_response_forbids_guessing_its_type() -> None:
    for path in ("/health", "/v1/models", "/nowhere", "/admin/api/sites"):
        assert get(path).headers["x-content-type-options"] == "nosniff"


def test_who_forges_the_address_it_comes_from_is_counted_where_it_comes_from() -> None:
    async def scenario(connect: Open) -> None:
        reader, writer = await connect()
        statuses: list[bytes] = []
        while b"429" not in statuses:
            number = len(statuses)
            assert number < 1000
            forged = f"x-forwarded-for: 10.0.1.{number}\r\nx-real-ip: 10.0.1.{number}\r\n"
            writer.write(f"GET /v1/models HTTP/1.1\r\nhost: x\r\n{forged}\r\n".encode())
            statuses.append((await answered(reader))[9:12])
        assert set(statuses[: int(MAX_FAILURES)]) == {b"401"}

    play(scenario)
