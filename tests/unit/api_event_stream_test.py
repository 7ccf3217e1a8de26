"""Tests an event stream with a slow client: the order of what is sent; nothing is left running."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

from gateway.http.sse import KEEP_ALIVE, EventStream
from gateway.openai.frames import DONE


class Wire:
    """A `send` that blocks while the client does not read."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.offered = asyncio.Event()
        self.taken = asyncio.Event()
        self.taken.set()

    async def send(self, message: Any) -> None:
        self.offered.set()
        await self.taken.wait()
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def statuses(self) -> list[int]:
        return [message["status"] for message in self.sent if "status" in message]


def events(wire: Wire, **limits: float) -> EventStream:
    loop = asyncio.get_running_loop()
    return EventStream(wire.send, loop.time, **({"keep_alive_s": 60.0, "first_byte_s": 60.0} | limits))


def test_a_stream_starts_once_and_ends_with_its_last_frames() -> None:
    async def main() -> None:
        wire = Wire()
        async with events(wire) as stream:
            await stream.start(((b"x-mico-site", b"a"),))
            await stream.start()
            await stream.write(b"data: 1\n\n")
            await stream.end(b"data: 2\n\n" + DONE)
        assert wire.statuses == [200]
        assert (b"x-mico-site", b"a") in wire.sent[0]["headers"]
        assert wire.body == b"data: 1\n\ndata: 2\n\n" + DONE
        assert [message.get("more_body") for message in wire.sent] == [None, True, False]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_nothing_is_sent_by_a_stream_that_never_starts() -> None:
    async def main() -> None:
        wire = Wire()
        async with events(wire) as stream:
            await stream.stop_comments()
            assert not stream.started
        assert wire.sent == []
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_a_comment_that_is_not_taken_is_not_followed_by_another() -> None:
    async def main() -> None:
        wire = Wire()
        wire.taken.clear()
        async with events(wire, first_byte_s=0.0, keep_alive_s=0.0):
            await wire.offered.wait()
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(asyncio.all_tasks()) == 2  # this one and the comment's
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_a_comment_under_way_is_finished_before_the_end() -> None:
    """A comment opens the stream just as the answer fails: the status is out, so the end must follow it."""

    async def main() -> None:
        wire = Wire()
        wire.taken.clear()
        async with events(wire, first_byte_s=0.0) as stream:
            await wire.offered.wait()
            stopping = asyncio.create_task(stream.stop_comments())
            await asyncio.sleep(0)
            wire.taken.set()
            await stopping
            assert stream.started
            await stream.end(b"data: sorry\n\n" + DONE)
        assert wire.statuses == [200]
        assert wire.body.endswith(b"data: sorry\n\n" + DONE)

    asyncio.run(main())


def test_leaving_does_not_wait_for_a_client_that_takes_nothing() -> None:
    async def main() -> None:
        wire = Wire()
        wire.taken.clear()
        async with asyncio.timeout(60), events(wire, first_byte_s=0.0):
            await wire.offered.wait()
        assert wire.sent == []
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_comments_come_whole_between_frames() -> None:
    async def main() -> None:
        wire = Wire()
        async with events(wire, keep_alive_s=0.0) as stream:
            await stream.start()
            for number in range(20):
                await stream.write(b"data: %d\n\n" % number)
                await asyncio.sleep(0)
            await stream.end(DONE)
        blocks = [block + b"\n\n" for block in wire.body.split(b"\n\n")[:-1]]
        frames = [block for block in blocks if block != KEEP_ALIVE]
        assert frames == [b"data: %d\n\n" % number for number in range(20)] + [DONE]
        assert KEEP_ALIVE in blocks

    asyncio.run(main())


def test_a_stream_that_was_opened_is_silent_for_no_longer_than_it_may_be() -> None:
    """The longer limit before the first token no longer applies."""

    async def main() -> None:
        wire = Wire()
        async with asyncio.timeout(60), events(wire, first_byte_s=1e6, keep_alive_s=0.0) as stream:
            await asyncio.sleep(0)
            await stream.start()
            wire.offered.clear()
            await wire.offered.wait()
            assert wire.body == KEEP_ALIVE

    asyncio.run(main())


def test_a_stream_leaves_no_garbage_that_only_a_collection_finds() -> None:
    """A hundred streams a second would else have them often, and each holds the loop."""

    async def main() -> None:
        wire = Wire()
        for _ in range(3):
            async with events(wire) as stream:
                await stream.start()
                await stream.write(b"data: 1\n\n")
                await stream.end(DONE)
        gone = weakref.ref(stream)
        del stream
        await asyncio.sleep(0)
        assert gone() is None

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()
