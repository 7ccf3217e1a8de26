"""Tests the write buffer: the writes of one turn of the event loop make one packet."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.http.server import MAX_BUFFERED_BYTES, WriteBuffer


class Wire:
    def __init__(self) -> None:
        self.packets: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.packets.append(b"too late: " + data if self.closed else data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def written(parts: list[bytes], *, turns_between: int, close: bool = False) -> list[bytes]:
    wire: Any = Wire()

    async def main() -> None:
        response = WriteBuffer(wire, asyncio.get_running_loop())
        for part in parts:
            response.write(part)
            for _ in range(turns_between):
                await asyncio.sleep(0)
        if close:
            response.close()
        else:
            await asyncio.sleep(0)

    asyncio.run(main())
    assert wire.closed is close
    packets: list[bytes] = wire.packets
    return packets


def test_what_is_written_in_one_turn_is_one_packet() -> None:
    assert written([b"head", b"role", b"text"], turns_between=0) == [b"headroletext"]


def test_nothing_is_held_beyond_its_turn_of_the_loop() -> None:
    assert written([b"head", b"a", b"b"], turns_between=2) == [b"head", b"a", b"b"]


def test_an_empty_piece_is_no_packet() -> None:
    assert written([b"", b"head", b"", b"b"], turns_between=2) == [b"head", b"b"]


def test_no_more_is_held_than_a_client_may_be_owed_unnoticed() -> None:
    large = MAX_BUFFERED_BYTES * b"x"
    assert written([b"head", large, b"a", b"b"], turns_between=0) == [b"head" + large, b"ab"]


def test_closing_sends_what_waits() -> None:
    assert written([b"head"], turns_between=0, close=True) == [b"head"]


def test_a_client_that_left_meanwhile_is_sent_nothing() -> None:
    wire: Any = Wire()

    async def main() -> None:
        WriteBuffer(wire, asyncio.get_running_loop()).write(b"head")
        wire.close()
        await asyncio.sleep(0)

    asyncio.run(main())
    assert wire.packets == []
