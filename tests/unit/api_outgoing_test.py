"""A piece of a response goes with what follows at once, and at the latest in the next turn of the loop."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.api.serving import Outgoing


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
        response = Outgoing(wire, asyncio.get_running_loop())
        for part in parts:
            response.write(part)
            for _ in range(turns_between):
                await asyncio.sleep(0)
        if close:
            response.close()

    asyncio.run(main())
    assert wire.closed is close
    packets: list[bytes] = wire.packets
    return packets


def test_a_short_answer_is_one_packet() -> None:
    assert written([b"head", b"body"], turns_between=0) == [b"headbody"]


def test_a_third_piece_waits_for_a_fourth() -> None:
    assert written([b"head", b"a", b"b", b"c"], turns_between=0) == [b"heada", b"bc"]


def test_nothing_is_held_beyond_its_turn_of_the_loop() -> None:
    assert written([b"head", b"a", b"b"], turns_between=2) == [b"head", b"a", b"b"]


def test_an_empty_piece_is_no_packet() -> None:
    assert written([b"head", b"", b"", b"b"], turns_between=2) == [b"head", b"b"]


def test_closing_sends_what_waits() -> None:
    assert written([b"head"], turns_between=0, close=True) == [b"head"]


def test_a_client_that_left_meanwhile_is_sent_nothing() -> None:
    wire: Any = Wire()

    async def main() -> None:
        Outgoing(wire, asyncio.get_running_loop()).write(b"head")
        wire.close()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert wire.packets == []
