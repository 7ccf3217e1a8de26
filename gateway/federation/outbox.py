"""The messages that wait to be sent to one site. An Assign is withdrawn if its attempt ends before that.

A large one goes alone, and what is small and came meanwhile goes before the next large one: no prompt of
megabytes makes others wait for more than itself.
"""

from __future__ import annotations

import asyncio
from itertools import count

from gateway.federation import codec
from wire import federation_pb2 as pb

MAX_BYTES = 64 * 2**20
"""Above this a site is full: it reads too slowly for what it is given."""
LARGE_BYTES = 256 * 1024
BUNCH_BYTES = 1 << 20
"""Size at which a bunch is closed."""


class Outbox:
    """Small messages in the order in which they were put, large ones between them in theirs. One writer
    awaits `next`.
    """

    def __init__(self) -> None:
        self._small: dict[str | int, bytes] = {}  # serialized: each message is written once
        self._large: dict[str | int, bytes] = {}
        self._large_is_next = False
        self._numbers = count()
        self._filled = asyncio.Event()
        self.bytes = 0  # of the messages that wait

    @property
    def full(self) -> bool:
        return self.bytes > MAX_BYTES

    def __contains__(self, key: str) -> bool:
        return key in self._small

    def put(self, message: pb.GatewayMessage, key: str | None = None) -> None:
        """Add a message; `key` names one that may be withdrawn or looked for."""
        key_or_number = next(self._numbers) if key is None else key
        serialized = message.SerializeToString()
        messages = self._small if len(serialized) < LARGE_BYTES else self._large
        messages[key_or_number] = serialized
        self.bytes += len(serialized)
        self._filled.set()

    def withdraw(self, key: str) -> bool:
        """Remove a message; return False if it was sent before."""
        message = self._small.pop(key, b"") or self._large.pop(key, b"")
        self.bytes -= len(message)
        return bool(message)

    async def next(self, *, in_bunches: bool) -> bytes:
        """Wait for a message and take it, serialized; bunched with what waits behind it, up to about
        BUNCH_BYTES, for a site that reads bunches.
        """
        while not (self._small or self._large):
            self._filled.clear()
            await self._filled.wait()
        if self._large and (self._large_is_next or not self._small):
            self._large_is_next = False
            return self._take(self._large)
        self._large_is_next = True
        bunch = [self._take(self._small)]
        size = len(bunch[0])
        while in_bunches and self._small and size < BUNCH_BYTES:
            bunch.append(self._take(self._small))
            size += len(bunch[-1])
        return codec.bunch(bunch) if len(bunch) > 1 else bunch[0]

    def _take(self, messages: dict[str | int, bytes]) -> bytes:
        message = messages.pop(next(iter(messages)))
        self.bytes -= len(message)
        return message
