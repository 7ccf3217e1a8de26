"""Sends and receives large content outside of a site's link: training data, snapshots, adapters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final, Protocol

import grpc

from wire import federation_pb2 as pb

CHUNK_BYTES: Final = 2**20
NEXT_WITHIN_S: Final = 60.0


class BulkRefused(Exception):
    """Refuses a call with the gRPC status `code`."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Upload(Protocol):
    """An upload in progress. If the stream breaks, the written part is kept for a later try."""

    @property
    def offset(self) -> int: ...

    async def write(self, data: bytes) -> None:
        """Append data. Raises BulkRefused if the upload exceeds its announced size."""

    def close(self) -> None:
        """Release the upload, so that a later try can continue at its offset."""

    async def finish(self) -> None:
        """Store the content. Raises BulkRefused if its digest differs or its run is not current."""


class Bulk(Protocol):
    """Stores content by its digest. Methods raise BulkRefused."""

    def read(self, sha256: bytes, offset: int) -> AsyncIterator[bytes]: ...

    async def begin(self, begin: pb.StoreBegin) -> Upload: ...


async def send_content(bulk: Bulk, context: Any) -> None:
    """Serve a Fetch call. Raises BulkRefused."""
    request = await context.read()
    if request is grpc.aio.EOF:
        raise BulkRefused(grpc.StatusCode.INVALID_ARGUMENT, "nothing was asked for")
    async for part in bulk.read(request.sha256, request.offset):
        for begin in range(0, len(part), CHUNK_BYTES):
            await context.write(pb.Chunk(data=part[begin : begin + CHUNK_BYTES]).SerializeToString())


async def receive_content(bulk: Bulk, context: Any) -> None:
    """Serve a Store call. Raises BulkRefused."""
    first = await context.read()
    if first is grpc.aio.EOF or first.WhichOneof("body") != "begin":
        raise BulkRefused(grpc.StatusCode.INVALID_ARGUMENT, "the first message is 'begin'")
    upload = await bulk.begin(first.begin)
    try:
        await _receive(upload, first.begin.content.bytes, context)
    finally:
        upload.close()


async def _receive(upload: Upload, size: int, context: Any) -> None:
    await context.write(pb.StoreReply(offset=upload.offset).SerializeToString())
    while upload.offset < size:
        try:
            message = await asyncio.wait_for(context.read(), NEXT_WITHIN_S)
        except TimeoutError as exc:
            reason = f"nothing came for {NEXT_WITHIN_S:.0f} s"
            raise BulkRefused(grpc.StatusCode.DEADLINE_EXCEEDED, reason) from exc
        if message is grpc.aio.EOF:
            return  # a later try continues
        await upload.write(message.data)
    await upload.finish()
    await context.write(pb.StoreReply(offset=upload.offset, done=True).SerializeToString())
