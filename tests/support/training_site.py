"""Acts as a site that trains: over the real link, and the real calls beside it, under the test's hand."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import grpc

from tests.support.batch_replica import Replica
from tests.support.fakes.federation import DEADLINE_S, ScriptedSite
from wire import federation_pb2 as pb

TRAINS = pb.Trains(runs=1, max_rank=64, usd_per_mtok=2.0)
CHUNK = 1_000


class Run:
    """One run at a site, as its order describes it."""

    def __init__(self, site: ScriptedSite, order: pb.Train) -> None:
        self.site = site
        self.order = order

    async def fetch(self, content: pb.Content, offset: int = 0) -> bytes:
        """Return content from an offset on; of all of it the digest is checked."""
        call = self.site.bulk.Fetch(
            pb.FetchRequest(sha256=content.sha256, offset=offset), metadata=self.site.metadata
        )
        data = b"".join([chunk.data async for chunk in call])
        assert offset or hashlib.sha256(data).digest() == content.sha256
        return data

    async def store(
        self,
        kind: pb.StoreBegin.Kind,
        step: int,
        data: bytes,
        *,
        until: int | None = None,
        sha256: bytes | None = None,
    ) -> list[pb.StoreReply]:
        """Store content, or cut the call after `until` bytes. Returns the gateway's replies.

        Raises AioRpcError.
        """
        content = pb.Content(sha256=sha256 or hashlib.sha256(data).digest(), bytes=len(data))
        call = self.site.bulk.Store(metadata=self.site.metadata)
        begin = pb.StoreBegin(
            job_id=self.order.job_id, run=self.order.run, kind=kind, step=step, content=content
        )
        await call.write(pb.StoreRequest(begin=begin))
        replies = [await asyncio.wait_for(call.read(), DEADLINE_S)]
        end = len(data) if until is None else until
        for place in range(replies[0].offset, end, CHUNK):
            await call.write(pb.StoreRequest(data=data[place : min(end, place + CHUNK)]))
        await call.done_writing()
        while (reply := await asyncio.wait_for(call.read(), DEADLINE_S)) is not grpc.aio.EOF:
            replies.append(reply)
        return replies

    async def report(self, step: int, *, total: int = 6, **more: Any) -> None:
        steps = [pb.TrainingStep(step=each, loss=1.0 / each, accuracy=0.5) for each in range(1, step + 1)]
        training = pb.Training(
            **{
                "job_id": self.order.job_id,
                "run": self.order.run,
                "step": step,
                "total_steps": total,
                "trained_tokens": 100 * step,
                "steps": steps,
                "revision": "rev-1",
                **more,
            }
        )
        await self.site.send(training=training)

    async def succeed(self, *, total: int = 6) -> None:
        """Store a checkpoint and the adapter, serve it, and report the end."""
        await self.store(pb.StoreBegin.CHECKPOINT, total // 2, b"checkpoint" * 50)
        await self.store(pb.StoreBegin.ADAPTER, total, b"adapter" * 500)
        await self.serve()
        await self.report(total, total=total, end=pb.Training.SUCCEEDED)

    async def serve(self, *names: str) -> None:
        """Announce these tuned models, else the one that the run makes."""
        about = {"context_tokens": 1024, "features": ("chat",), "parent": self.order.model}
        tuned = [
            pb.Model(id=name, tenant=self.order.tenant, **about)
            for name in names or (self.order.tuned_model,)
        ]
        await self.site.send(models=pb.Models(models=[self.site.served_model, *tuned]))


async def ordered(here: Replica, kind: str = "train") -> tuple[ScriptedSite, Any]:
    """Return the next order of a kind with its site; others before it are dropped."""
    while True:
        site, message = await asyncio.wait_for(here.orders.get(), DEADLINE_S)
        if message.WhichOneof("body") == kind:
            return site, getattr(message, kind)


async def next_run(here: Replica) -> Run:
    return Run(*await ordered(here))


async def stopped(here: Replica, run: Run, *, snapshot: bool) -> None:
    """Wait until the run is asked to stop."""
    while True:
        _, order = await ordered(here, "stop_training")
        if (order.run, order.snapshot) == (run.order.run, snapshot):
            return
