"""A TCP relay on loopback that can be cut, stopped and slowed: a bad network between site and gateway."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Self

CHUNK_BYTES = 64 * 1024


class Relay:
    """Forwards to `target_port`. Faults: `cut`, `hold`, `swallow`, and a `delay_s` in each direction."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.delay_s = 0.0
        self._flows = asyncio.Event()
        self._up_flows = asyncio.Event()
        self._closed = False
        self._open: set[asyncio.StreamWriter] = set()
        self._swallowing: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.release()

    @classmethod
    async def start(cls, target_port: int) -> Self:
        relay = cls(target_port)
        relay._server = await asyncio.start_server(relay._forward, "127.0.0.1", 0)
        return relay

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    def cut(self) -> None:
        """Break every connection and accept none until `release`."""
        self._closed = True
        for writer in self._open:
            writer.transport.abort()

    def hold(self, *, up_only: bool = False) -> None:
        """Keep connections open and let nothing through."""
        self._up_flows.clear()
        if not up_only:
            self._flows.clear()

    def swallow(self) -> None:
        """Let nothing through on the connections that are open, for ever, as after a router's restart."""
        self._swallowing |= self._open

    def release(self) -> None:
        self._closed = False
        self._flows.set()
        self._up_flows.set()

    async def close(self) -> None:
        self.cut()
        if self._server:
            self._server.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closed:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, far_writer}
        self._open |= ends
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(reader, far_writer, self._up_flows))
                both.create_task(self._pump(far_reader, writer, self._flows))
        except* OSError:
            pass  # one end is gone: the other goes with it
        finally:
            self._open -= ends
            self._swallowing -= ends
            for end in ends:
                end.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flows: asyncio.Event
    ) -> None:
        """Forward with the delay of each part independent of the next: distance, not bandwidth."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        clock = asyncio.get_running_loop().time
        sending = asyncio.create_task(self._send(pieces, writer, flows))
        try:
            while piece := await reader.read(CHUNK_BYTES):
                pieces.put_nowait((clock() + self.delay_s, piece))
            raise ConnectionResetError
        finally:
            sending.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await sending

    async def _send(
        self, pieces: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, flows: asyncio.Event
    ) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due_s, piece = await pieces.get()
            await asyncio.sleep(max(0.0, due_s - clock()))
            await flows.wait()
            if writer in self._swallowing:
                continue
            writer.write(piece)
            await writer.drain()
