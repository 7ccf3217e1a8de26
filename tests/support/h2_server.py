"""A server of HTTP/2 over TLS on loopback: says a piece of each answer at once, the rest when told to."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamEnded, StreamReset

CHUNK = b"data: a piece\n\n"


class H2Server:
    """`begins`: whether an answer's headers and first piece are sent before `finish`."""

    def __init__(self, *, begins: bool = True) -> None:
        self.begins = begins
        self.port = 0
        self.connections = 0
        self.open: list[int] = []
        self.reset: list[int] = []
        self.changed = asyncio.Condition()
        self._at: dict[int, tuple[H2Connection, asyncio.StreamWriter]] = {}

    async def until(self, count_of: list[int], count: int) -> None:
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(lambda: len(count_of) >= count)

    def finish(self, stream_id: int) -> None:
        h2, writer = self._at[stream_id]
        if not self.begins:
            h2.send_headers(stream_id, [(":status", "200")])
        h2.send_data(stream_id, CHUNK, end_stream=True)
        writer.write(h2.data_to_send())

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        h2 = H2Connection(H2Configuration(client_side=False))
        h2.initiate_connection()
        try:
            while True:
                writer.write(h2.data_to_send())
                if not (data := await reader.read(65536)):
                    return
                for event in h2.receive_data(data):
                    await self._take(event, h2, writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def _take(self, event: object, h2: H2Connection, writer: asyncio.StreamWriter) -> None:
        if isinstance(event, RequestReceived):
            self._at[event.stream_id] = h2, writer
        elif isinstance(event, DataReceived):
            h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, StreamEnded):
            if self.begins:
                h2.send_headers(event.stream_id, [(":status", "200")])
                h2.send_data(event.stream_id, CHUNK)
            await self._note(self.open, event.stream_id)
        elif isinstance(event, StreamReset):
            await self._note(self.reset, event.stream_id)

    async def _note(self, where: list[int], stream_id: int) -> None:
        where.append(stream_id)
        async with self.changed:
            self.changed.notify_all()


@asynccontextmanager
async def h2_server(context: ssl.SSLContext, *, begins: bool = True) -> AsyncIterator[H2Server]:
    """`context` decides what is offered."""
    made = H2Server(begins=begins)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=context)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        await server.wait_closed()
