"""The messages that wait to be sent to one site. An Assign is withdrawn if its attempt ends before that.

A large one goes alone, and what is small and came meanwhile goes before the next large one: no prompt of
megabytes makes others wait for more than itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from gateway.federation import codec
from wire import federation_pb2 as pb

MAX_BYTES = 64 * 2**20
"""Above this a site is full: it reads too slowly for what it is given."""
LARGE_BYTES = 256 * 1024


class Sized(NamedTuple):
    """A message and its size, which protobuf finds by writing all of it."""

    message: pb.GatewayMessage
    bytes: int


class Outbox:
    """Small messages in the order in which they were put, large ones between them in theirs. One writer
    awaits `next`.
    """

    def __init__(self) -> None:
        self._messages: dict[str | int, Sized] = {}
        self._large: dict[str | int, bytes] = {}  # serialized: megabytes are written once
        self._large_is_next = False
        self._numbers = count()
        self._filled = asyncio.Event()
        self.bytes = 0  # of the messages that wait

    @property
    def full(self) -> bool:
        return self.bytes > MAX_BYTES

    def __contains__(self, key: str) -> bool:
        return key in self._messages

    def put(self, message: pb.GatewayMessage, key: str | None = None) -> None:
        """Add a message; `key` names one that may be withdrawn or looked for."""
        key_or_number = next(self._numbers) if key is None else key
        serialized = message.SerializeToString()
        if len(serialized) < LARGE_BYTES:
            self._messages[key_or_number] = Sized(message, len(serialized))
        else:
            self._large[key_or_number] = serialized
        self.bytes += len(serialized)
        self._filled.set()

    def withdraw(self, key: str) -> bool:
        """Remove a message; return False if it was sent before."""
        if (small := self._messages.pop(key, None)) is not None:
            self.bytes -= small.bytes
            return True
        large = self._large.pop(key, b"")
        self.bytes -= len(large)
        return bool(large)

    async def next(self, *, in_bunches: bool) -> bytes:
        """Wait for a message and take it, serialized; bunched with what waits behind it for a site that reads
        bunches.
        """
        while not (self._messages or self._large):
            self._filled.clear()
            await self._filled.wait()
        if self._large and (self._large_is_next or not self._messages):
            self._large_is_next = False
            large = self._large.pop(next(iter(self._large)))
            self.bytes -= len(large)
            return large
        self._large_is_next = True
        waiting = self._take_small()
        first = next(waiting)
        small: bytes = (codec.bundle(first, waiting) if in_bunches else first).SerializeToString()
        return small

    def _take_small(self) -> Iterator[pb.GatewayMessage]:
        while self._messages:
            message, size = self._messages.pop(next(iter(self._messages)))
            self.bytes -= size
            yield message
