"""Lend the memory of an engine that sleeps to those that are awake on its device, until it wakes.

The engines of a device have no common process. One that is awake listens at a name with the device in it, in
the abstract namespace of Unix sockets, which goes with its process. One that sleeps looks for such names and
connects to each: it sends the bytes that may be held, and gets them back as the answer once no more are held.
Each line is one number. With the connection ends the lease, whichever side ends it. Linux only.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from math import inf
from pathlib import Path

from site_engine.core.leases import Lease, divide
from site_engine.model.descriptors import is_own_user

PREFIX = "mico-memory-"
NAMES = Path("/proc/net/unix")
GIVEN_BACK = -1
"""The last line of an engine that goes to sleep."""
LOOK_EVERY_S = 1.0
GIVEN_BACK_WITHIN_S = 10.0
"""An engine gives back between two iterations; one that takes longer keeps the other asleep."""


class Borrower:
    """The side of an engine that is awake. `hold` lets the engine use so many bytes beyond its own."""

    def __init__(self, device: str, hold: Callable[[int], Awaitable[object]]) -> None:
        """Listen for engines that sleep on a device."""
        self._hold = hold
        self._lent: dict[asyncio.StreamWriter, int] = {}
        self._unconfirmed: set[asyncio.StreamWriter] = set()
        self._changed = asyncio.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self._listener.bind(f"\0{PREFIX}{device}-{secrets.token_hex(8)}")
        self._listener.listen()
        accepting = asyncio.create_task(self._accept())
        # Only then does the event loop watch it no more.
        accepting.add_done_callback(lambda _: self._listener.close())
        self._tasks = {accepting, asyncio.create_task(self._follow())}

    def give_back(self) -> None:
        """Tell all lenders that the engine holds nothing more; call `close` after it."""
        for writer in self._lent:
            if not writer.is_closing():
                writer.write(_line(GIVEN_BACK))

    def close(self) -> None:
        """End all leases."""
        for each in self._tasks:
            each.cancel()

    async def _accept(self) -> None:
        while True:
            other, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            if is_own_user(other):
                task = asyncio.create_task(self._listen(other))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                other.close()

    async def _listen(self, other: socket.socket) -> None:
        """Note what one lender allows, until its connection ends."""
        reader, writer = await asyncio.open_unix_connection(sock=other)
        with closing(writer), suppress(OSError, ValueError):
            try:
                while line := await reader.readline():
                    self._lent[writer] = int(line)
                    self._unconfirmed.add(writer)
                    self._changed.set()
            finally:
                self._lent.pop(writer, None)
                self._unconfirmed.discard(writer)
                self._changed.set()

    async def _follow(self) -> None:
        """Let the engine hold the sum of what lenders allow, and confirm it to each."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            told = {writer: self._lent[writer] for writer in self._unconfirmed}
            self._unconfirmed.clear()  # once each: an old answer must not be taken for that to a new line
            await self._hold(sum(self._lent.values()))
            for writer, size_bytes in told.items():
                if not writer.is_closing():
                    writer.write(_line(size_bytes))


class Lender:
    """The side of an engine that sleeps, whose device has `size_bytes` free meanwhile."""

    def __init__(self, device: str, size_bytes: int) -> None:
        self._device = device
        self._size_bytes = self._lent_bytes = size_bytes
        self._leases: dict[str, tuple[Lease, asyncio.StreamWriter]] = {}
        self._changed = asyncio.Event()
        self._connecting: set[str] = set()
        self._tasks = {asyncio.create_task(self._look())}
        self._abandoned_s = -inf  # when a lease ended of which something was held

    def close(self) -> None:
        for each in self._tasks:
            each.cancel()

    def lend(self) -> None:
        """Lend all of the memory again."""
        self._lent_bytes = self._size_bytes
        self._divide()

    async def take_back(self) -> bool:
        """Ask for all of the memory; return whether it is free within GIVEN_BACK_WITHIN_S."""
        self._lent_bytes = 0
        self._divide()
        with suppress(TimeoutError):
            async with asyncio.timeout(GIVEN_BACK_WITHIN_S):
                while self.held_bytes:
                    self._changed.clear()
                    await self._changed.wait()
        return not self.held_bytes

    @property
    def awaits_end(self) -> bool:
        """Return whether a lease has just ended while its engine held memory: that is free once the engine's
        process has ended.
        """
        return time.monotonic() - self._abandoned_s < GIVEN_BACK_WITHIN_S

    @property
    def held_bytes(self) -> int:
        return sum(lease.max_bytes for lease, _ in self._leases.values())

    async def _look(self) -> None:
        """Look for engines that listen, every LOOK_EVERY_S."""
        while True:
            for name in names(self._device) - self._connecting:
                self._connecting.add(name)
                task = asyncio.create_task(self._serve(name))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _serve(self, name: str) -> None:
        """Lend to one engine until it is gone."""
        given_back = False
        try:
            with suppress(OSError, ValueError):
                reader, writer = await _connected(name)
                lease = Lease()
                with closing(writer):
                    self._leases[name] = lease, writer
                    self._divide()
                    while line := await reader.readline():
                        given_back = int(line) == GIVEN_BACK
                        lease.confirm(int(line))
                        self._divide()
        finally:
            self._connecting.discard(name)
            if name in self._leases:
                gone, _ = self._leases.pop(name)
                if gone.max_bytes and not given_back:
                    self._abandoned_s = time.monotonic()
                self._divide()

    def _divide(self) -> None:
        changed = divide(self._lent_bytes, [lease for lease, _ in self._leases.values()])
        for lease, writer in self._leases.values():
            if lease in changed and not writer.is_closing():
                writer.write(_line(lease.allowed_bytes))
        self._changed.set()


def names(device: str) -> set[str]:
    """Return the names at which engines listen on a device."""
    try:
        found = NAMES.read_text(errors="replace").split()
    except OSError:
        return set()
    begin = f"@{PREFIX}{device}-"
    return {each.removeprefix("@") for each in found if each.startswith(begin)}


async def _connected(name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to an engine of the same user. Raises OSError."""
    other = socket.socket(socket.AF_UNIX)
    try:
        other.setblocking(False)
        await asyncio.get_running_loop().sock_connect(other, f"\0{name}")
        if not is_own_user(other):
            raise PermissionError(f"{name} belongs to another user")
        return await asyncio.open_unix_connection(sock=other)
    except BaseException:
        other.close()
        raise


def _line(number: int) -> bytes:
    return b"%d\n" % number
