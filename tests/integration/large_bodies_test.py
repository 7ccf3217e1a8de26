"""Tests large bodies: the memory of all together is bounded, and no stream waits for what is read of one."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

from gateway.http.body import BodyReader, ClientGone
from gateway.side_work import INLINE_BYTES
from tests.support.fakes.edge import KEY, MODEL, Script, chat_body, error_of, events_of, on_loopback
from tests.support.fakes.federation import until

WITHIN_S = 30
PART = b" " * 50_000
HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    f"authorization: Bearer {KEY}\r\ncontent-length: 1000000\r\n\r\n"
).encode()


def test_bodies_that_fill_the_memory_are_refused_with_the_time_to_wait_and_leave_room_for_others() -> None:
    async def main() -> None:
        bodies = BodyReader(max_bytes=10 * len(PART))
        script = Script(settings={"bodies": bodies})
        async with on_loopback(script) as (edge, port):
            large = chat_body(messages=[{"role": "user", "content": "x" * len(PART)}])
            opened = []
            try:
                for number in range(8):  # four fifths of ten
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    opened.append(writer)
                    writer.write(HEAD + PART)
                    most = (number + 1) * len(PART)
                    await until(lambda most=most: bodies.memory.used_bytes == most)
                refused = await edge.post("/v1/chat/completions", large)
                assert "fill the memory" in error_of(refused, 503)["message"]
                assert float(refused.headers["retry-after"]) > 0
                other = await edge.post("/v1/chat/completions", large, authorization="Bearer narrow")
                assert other.status_code == 200, other.text
            finally:
                for writer in opened:
                    writer.close()
            await until(lambda: bodies.memory.used_bytes == 0, "who leaves gives back what it took")
            assert (await edge.post("/v1/chat/completions", large)).status_code == 200

    asyncio.run(main())


class Held:
    """Holds up the reading of large bodies until a neighbour was answered."""

    def __init__(self) -> None:
        self.reading, self.answered = threading.Event(), threading.Event()
        self.bodies = BodyReader()

    def read_slowly(self, body: dict[str, object]) -> dict[str, object]:
        self.reading.set()
        assert self.answered.wait(WITHIN_S), "no neighbour was answered while a large body was read"
        return body


def receive_of(raw: bytes) -> Any:
    parts = [{"type": "http.request", "body": raw, "more_body": False}]

    async def receive() -> Any:
        if parts:
            return parts.pop()
        return await asyncio.Event().wait()

    return receive


def test_neighbours_are_answered_while_a_large_body_is_read() -> None:
    async def main() -> None:
        held = Held()
        raw = json.dumps({"prompt": "x" * INLINE_BYTES}).encode()
        scope: Any = {"headers": [(b"content-type", b"application/json")]}
        flood = [
            asyncio.create_task(
                held.bodies.read_json(scope, receive_of(raw), "flood", 2**20, held.read_slowly)
            )
            for _ in range(8)
        ]
        script = Script(settings={"bodies": held.bodies})
        async with on_loopback(script) as (edge, _):
            await until(held.reading.is_set, "the first large body is read")
            answer = await edge.chat(stream=True)
            assert "Hello" in json.dumps(events_of(answer.content))
            assert not any(task.done() for task in flood)
            held.answered.set()
            async with asyncio.timeout(WITHIN_S):
                assert [len(str(each["prompt"])) for each in await asyncio.gather(*flood)] == 8 * [
                    INLINE_BYTES
                ]

    asyncio.run(main())


def test_a_large_body_is_answered_as_a_small_one_and_its_mistakes_are_named() -> None:
    async def main() -> None:
        script = Script()
        async with on_loopback(script) as (edge, _):
            content = "word " * INLINE_BYTES
            assert (await edge.chat(messages=[{"role": "user", "content": content}])).status_code == 200
            assert script.query.text == content
            wrong = await edge.chat(messages=[{"role": "king", "content": content}])
            assert error_of(wrong, 400)["param"] == "messages.0.role"
            broken = await edge.post("/v1/chat/completions", b'{"model": ' + b" " * INLINE_BYTES)
            assert error_of(broken, 400)["code"] == "invalid_json"
            nested = {"model": MODEL, "prompt": "x", "metadata": {str(n): [] for n in range(100_000)}}
            assert (
                "objects, lists and fields"
                in error_of(await edge.post("/v1/completions", nested), 400)["message"]
            )

    asyncio.run(main())


def test_a_client_that_leaves_costs_no_reading() -> None:
    async def main() -> None:
        held = Held()
        read: list[object] = []
        raw = json.dumps({"prompt": "x" * INLINE_BYTES}).encode()
        scope: Any = {"headers": [(b"content-type", b"application/json")]}
        parts: asyncio.Queue[Any] = asyncio.Queue()
        parts.put_nowait({"type": "http.request", "body": raw, "more_body": False})
        first = asyncio.create_task(
            held.bodies.read_json(scope, receive_of(raw), "a", 2**20, held.read_slowly)
        )
        await until(held.reading.is_set, "the first is read")
        second = asyncio.create_task(held.bodies.read_json(scope, parts.get, "a", 2**20, read.append))
        await until(parts.empty, "the second was received")
        parts.put_nowait({"type": "http.disconnect"})
        await asyncio.wait([second], timeout=WITHIN_S)
        assert second.done() and isinstance(second.exception(), ClientGone)
        held.answered.set()
        await first
        assert not read and held.bodies.memory.used_bytes == 0

    asyncio.run(main())
