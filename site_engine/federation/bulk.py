"""Fetch and store large content beside a gateway's stream, on a connection of its own: it delays no token."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from io import BytesIO
from typing import Any, Final

import grpc

from site_engine.core.training import Content, Kind, Train
from site_engine.errors import LinkLost, TransferFailed
from wire import federation_pb2 as pb
from wire import federation_pb2_grpc

CHUNK_BYTES: Final = 1 << 20
SILENT_S: Final = 60.0
"""A call in which nothing moves for so long has hung."""
_FINAL: Final = (
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
)


class Bulk:
    """`open_channel` opens a connection to the gateway; `metadata` authenticates as on the stream."""

    def __init__(self, open_channel: Callable[[], Any], metadata: tuple[tuple[str, str], ...]) -> None:
        self._open_channel = open_channel
        self._metadata = metadata

    async def fetch(self, content: Content, received: BytesIO) -> None:
        """Write to `received` what it lacks of content. Raises TransferFailed; a later call goes on from what
        has come.
        """
        async with self._calls() as stub:
            call = stub.Fetch(
                pb.FetchRequest(sha256=content.sha256, offset=received.tell()), metadata=self._metadata
            )
            while (chunk := await asyncio.wait_for(call.read(), SILENT_S)) is not grpc.aio.EOF:
                received.write(chunk.data)
                if received.tell() > content.size_bytes:
                    break
        if (size := received.tell()) < content.size_bytes:
            raise TransferFailed(f"{content.size_bytes - size} bytes of the content are missing")
        digest = await asyncio.to_thread(lambda: hashlib.sha256(received.getbuffer()).digest())
        if size > content.size_bytes or digest != content.sha256:
            received.seek(0)
            received.truncate()
            raise TransferFailed("the content that came has another digest")

    async def store(self, order: Train, kind: Kind, step: int, data: bytes) -> None:
        """Store what a run has made. Raises TransferFailed; a later call goes on from what has arrived."""
        digest = await asyncio.to_thread(hashlib.sha256, data)
        begin = pb.StoreBegin(
            job_id=order.job_id,
            run=order.run,
            kind=pb.StoreBegin.Kind.ValueType(kind),
            step=step,
            content=pb.Content(sha256=digest.digest(), bytes=len(data)),
        )
        async with self._calls() as stub:
            call = stub.Store(metadata=self._metadata)
            try:
                await self._upload(call, begin, data)
            except asyncio.InvalidStateError as exc:  # the gateway has ended the call, and said why
                code, details = await call.code(), await call.details()
                raise _failure(code, details) from exc

    async def _upload(self, call: Any, begin: pb.StoreBegin, data: bytes) -> None:
        await call.write(pb.StoreRequest(begin=begin))
        reply = await asyncio.wait_for(call.read(), SILENT_S)
        if reply is not grpc.aio.EOF and not reply.done:
            for place in range(reply.offset, len(data), CHUNK_BYTES):
                part = pb.StoreRequest(data=data[place : place + CHUNK_BYTES])
                await asyncio.wait_for(call.write(part), SILENT_S)
            await call.done_writing()
            reply = await asyncio.wait_for(call.read(), SILENT_S)
        if reply is grpc.aio.EOF or not reply.done:
            raise TransferFailed("the gateway ended the call before it had everything")

    @asynccontextmanager
    async def _calls(self) -> AsyncIterator[Any]:
        try:
            channel = self._open_channel()
        except LinkLost as exc:  # the certificate has expired, which links that are up survive
            raise TransferFailed(str(exc)) from exc
        try:
            yield federation_pb2_grpc.FederationStub(channel)  # type: ignore[no-untyped-call]
        except grpc.RpcError as exc:
            raise _failure(exc.code(), exc.details()) from exc
        except TimeoutError as exc:
            raise TransferFailed(f"nothing moved for {SILENT_S:.0f} s") from exc
        finally:
            await channel.close()


def _failure(code: grpc.StatusCode, details: str) -> TransferFailed:
    stale = code is grpc.StatusCode.FAILED_PRECONDITION
    return TransferFailed(f"{code.name}, {details}", final=code in _FINAL, stale=stale)
