"""A site's calls beside its stream, over real gRPC: cut, refused in the middle, and gone on with."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from typing import Any

import grpc
import pytest

from site_engine.core.training import Content, Kind, Train
from site_engine.errors import LinkLost, TransferFailed
from site_engine.federation.bulk import CHUNK_BYTES, Bulk
from site_engine.federation.link import open_channel
from wire import federation_pb2 as pb
from wire import federation_pb2_grpc

DATA = bytes(range(256)) * 4096 * 8  # of several chunks
CONTENT = Content(hashlib.sha256(DATA).digest(), len(DATA))
ORDER = Train("j", "r", "acme", "m", "ft:m", CONTENT)


class Gateway(federation_pb2_grpc.FederationServicer):
    """Sends `data` until `breaks` bytes, once. Ends a store with `refusal` at its beginning, or, if it
    `cuts`, after the first chunk.
    """

    def __init__(self) -> None:
        self.data, self.breaks = DATA, len(DATA)
        self.offsets: list[int] = []
        self.metadata: list[dict[str, Any]] = []
        self.refusal: grpc.StatusCode | None = None
        self.cuts = False
        self.stored = bytearray()
        self.begin = pb.StoreBegin()

    async def Fetch(self, request: pb.FetchRequest, context: Any) -> AsyncIterator[pb.Chunk]:
        self.offsets.append(request.offset)
        until, self.breaks = self.breaks, len(self.data)
        for place in range(request.offset, until, CHUNK_BYTES):
            yield pb.Chunk(data=self.data[place : min(until, place + CHUNK_BYTES)])
        if until < len(self.data):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the database is away")

    async def Store(self, requests: AsyncIterator[pb.StoreRequest], context: Any) -> Any:
        self.metadata.append(dict(context.invocation_metadata()))
        async for request in requests:
            if request.WhichOneof("body") == "begin":
                self.begin = request.begin
                if self.refusal is not None:
                    await context.abort(self.refusal, "the run is not current")
                yield pb.StoreReply(offset=len(self.stored))
                continue
            self.stored += request.data
            if self.cuts:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the database is away")
        yield pb.StoreReply(offset=len(self.stored), done=len(self.stored) == self.begin.content.bytes)


@asynccontextmanager
async def calls() -> AsyncIterator[tuple[Gateway, Bulk]]:
    gateway, server = Gateway(), grpc.aio.server()
    federation_pb2_grpc.add_FederationServicer_to_server(gateway, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield gateway, Bulk(lambda: open_channel(f"127.0.0.1:{port}"), (("authorization", "Bearer t"),))
    finally:
        await server.stop(None)


def test_a_fetch_that_was_cut_goes_on_and_other_content_is_refused() -> None:
    async def main() -> None:
        async with calls() as (gateway, bulk):
            gateway.breaks = CHUNK_BYTES + 5
            received = BytesIO()
            with pytest.raises(TransferFailed, match="the database is away") as cut:
                await bulk.fetch(CONTENT, received)
            assert not cut.value.final
            await bulk.fetch(CONTENT, received)
            assert (received.getvalue(), gateway.offsets) == (DATA, [0, CHUNK_BYTES + 5])
            for other in (DATA[:-1] + b"x", DATA + b"x", DATA[:-1]):
                gateway.data, gateway.breaks = other, len(other)
                with pytest.raises(
                    TransferFailed, match=r"another digest|1 bytes of the content are missing"
                ):
                    await bulk.fetch(CONTENT, BytesIO())

    asyncio.run(main())


def test_a_store_goes_on_where_it_was_cut_and_says_which_refusal_is_final() -> None:
    async def main() -> None:
        async with calls() as (gateway, bulk):
            for refusal, final, stale in (
                (grpc.StatusCode.UNAVAILABLE, False, False),
                (grpc.StatusCode.RESOURCE_EXHAUSTED, True, False),
                (grpc.StatusCode.FAILED_PRECONDITION, True, True),
            ):
                gateway.refusal = refusal
                with pytest.raises(TransferFailed, match="the run is not current") as failed:
                    await bulk.store(ORDER, Kind.ADAPTER, 7, DATA)
                assert (failed.value.final, failed.value.stale) == (final, stale)
            gateway.refusal, gateway.cuts = None, True
            with pytest.raises(TransferFailed) as failed:  # gRPC may name a reason of its own
                await bulk.store(ORDER, Kind.ADAPTER, 7, DATA)
            assert not failed.value.final
            gateway.cuts = False
            assert 0 < len(gateway.stored) < len(DATA)
            await bulk.store(ORDER, Kind.ADAPTER, 7, DATA)
            assert bytes(gateway.stored) == DATA
            begin = gateway.begin
            assert (begin.job_id, begin.run, begin.kind, begin.step) == ("j", "r", pb.StoreBegin.ADAPTER, 7)
            assert begin.content.sha256 == CONTENT.sha256
            assert {each["authorization"] for each in gateway.metadata} == {"Bearer t"}

    asyncio.run(main())


def test_a_site_whose_certificate_has_expired_tries_again() -> None:
    """Its links stay up meanwhile, and so do jobs and orders."""

    def refuse() -> Any:
        raise LinkLost("this site has no certificate yet")

    async def main() -> None:
        bulk = Bulk(refuse, ())
        for call in (bulk.fetch(CONTENT, BytesIO()), bulk.store(ORDER, Kind.SNAPSHOT, 1, DATA)):
            with pytest.raises(TransferFailed, match="no certificate yet") as failed:
                await call
            assert not failed.value.final

    asyncio.run(main())
