"""The messages that wait to be sent to one site. An Assign is withdrawn if its attempt ends before it is
sent.

A large message is sent alone, and small messages that wait are sent between two large ones, so that a prompt
of megabytes delays others only by its own size.
"""

from __future__ import annotations

import asyncio
from itertools import count

from gateway.federation import codec
from wire import federation_pb2 as pb

MAX_BYTES = 64 * 2**20
"""The size of waiting messages above which a site is full, as it reads too slowly."""
LARGE_BYTES = 256 * 1024
BUNCH_BYTES = 1 << 20
"""The size at which a bunch is closed."""


class Outbox:
    """Two queues, of small and of large messages, each in the order of `put`. One writer awaits `next`."""

    def __init__(self) -> None:
        self._small: dict[str | int, bytes] = {}  # serialized messages, by key or number
        self._large: dict[str | int, bytes] = {}
        self._large_is_next = False
        self._numbers = count()
        self._filled = asyncio.Event()
        self.bytes = 0  # total size of the waiting messages

    @property
    def full(self) -> bool:
        return self.bytes > MAX_BYTES

    def __contains__(self, key: str) -> bool:
        return key in self._small

    def put(self, message: pb.GatewayMessage, key: str | None = None) -> None:
        """Add a message. `key` identifies a message that may be withdrawn or looked up."""
        key_or_number = next(self._numbers) if key is None else key
        serialized = message.SerializeToString()
        messages = self._small if len(serialized) < LARGE_BYTES else self._large
        messages[key_or_number] = serialized
        self.bytes += len(serialized)
        self._filled.set()

    def withdraw(self, key: str) -> bool:
        """Remove a waiting message. Return False if it is already sent."""
        message = self._small.pop(key, b"") or self._large.pop(key, b"")
        self.bytes -= len(message)
        return bool(message)

    async def next(self, *, in_bunches: bool) -> bytes:
        """Wait for a message, remove it and return it serialized. With `in_bunches`, return it in one bunch
        with the small messages behind it, up to about BUNCH_BYTES.
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
