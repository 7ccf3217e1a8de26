"""A site that answers with a fixed number of tokens, at once or one by one: the rest of a measurement is the
gateway.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import grpc

from site_engine.federation.codec import bundle, unbundle
from wire import federation_pb2 as pb
from wire import federation_pb2_grpc as rpc

TOKEN = "a-site-token"
REPORT_S = 0.5
REDIAL_S = 0.3


class StandInSite:
    """Joins one gateway, and again whenever the stream is lost."""

    def __init__(
        self,
        address: str,
        prompt_tokens: int,
        answer_tokens: int,
        *,
        token_s: float = 0.0,
        name: str = "stand-in",
        features: Sequence[str] = ("chat", "resume"),
    ) -> None:
        """`token_s`: the time between two tokens; 0 for the whole answer at once."""
        self._token_s = token_s
        self._hello = hello(name, features)
        self._answering: dict[str, asyncio.Task[None]] = {}
        self._address = address
        self._prompt_tokens = prompt_tokens
        self._answer_tokens = answer_tokens
        self._task: asyncio.Task[None] | None = None
        self._left = False

    async def __aenter__(self) -> StandInSite:
        self._task = asyncio.create_task(self._join_for_ever())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._left = True
        self._task.cancel()  # gRPC may raise another error instead where the stream is lost just then
        await asyncio.gather(self._task, return_exceptions=True)

    async def _join_for_ever(self) -> None:
        while True:
            with suppress(grpc.RpcError, asyncio.InvalidStateError):
                async with grpc.aio.insecure_channel(self._address) as channel:
                    await self._serve(channel)
            if self._left:
                return
            await asyncio.sleep(REDIAL_S)

    async def _serve(self, channel: grpc.aio.Channel) -> None:
        stub = rpc.FederationStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Join(metadata=(("authorization", f"Bearer {TOKEN}"),))
        out: asyncio.Queue[pb.SiteMessage] = asyncio.Queue()
        out.put_nowait(pb.SiteMessage(hello=self._hello))
        writing = asyncio.create_task(self._write(call, out))
        reporting = asyncio.create_task(report(out))
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                for each in unbundle(message):
                    self._take(each, out)
        finally:
            tasks = (writing, reporting, *self._answering.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, message: Any, out: asyncio.Queue[pb.SiteMessage]) -> None:
        match message.WhichOneof("body"):
            case "ping":
                out.put_nowait(pb.SiteMessage(pong=pb.Pong(nonce=message.ping.nonce)))
            case "assign":
                attempt_id = message.assign.attempt_id
                accepted = pb.Accepted(attempt_id=attempt_id, prompt_tokens=self._prompt_tokens)
                out.put_nowait(pb.SiteMessage(accepted=accepted))
                if message.assign.HasField("pooling"):
                    out.put_nowait(pb.SiteMessage(step=pb.Step(deltas=[_pooled(message.assign)])))
                    return
                self._answer(out, message.assign)
            case "count":
                attempt_id = message.count.assign.attempt_id
                counted = pb.Counted(attempt_id=attempt_id, prompt_tokens=self._prompt_tokens)
                out.put_nowait(pb.SiteMessage(counted=counted))
            case "cancel":
                if (current := self._answering.get(message.cancel.attempt_id)) is not None:
                    current.cancel()
                    cancelled = pb.Delta(attempt_id=message.cancel.attempt_id, finish=pb.Delta.CANCELLED)
                    out.put_nowait(pb.SiteMessage(step=pb.Step(deltas=[cancelled])))

    def _answer(self, out: asyncio.Queue[pb.SiteMessage], assign: Any) -> None:
        attempt_id = assign.attempt_id
        if not self._token_s:
            self._put_delta(out, attempt_id, range(self._answer_tokens))
            return
        answering = asyncio.create_task(self._answer_slowly(out, attempt_id))
        self._answering[attempt_id] = answering
        answering.add_done_callback(lambda _: self._answering.pop(attempt_id, None))

    async def _answer_slowly(self, out: asyncio.Queue[pb.SiteMessage], attempt_id: str) -> None:
        for token in range(self._answer_tokens):
            await asyncio.sleep(self._token_s)
            self._put_delta(out, attempt_id, range(token, token + 1))

    def _put_delta(self, out: asyncio.Queue[pb.SiteMessage], attempt_id: str, tokens: range) -> None:
        delta = pb.Delta(
            attempt_id=attempt_id,
            text="word " * len(tokens),
            token_ids=tokens,
            completion_tokens=tokens.stop,
            finish=pb.Delta.STOP if tokens.stop == self._answer_tokens else pb.Delta.NOT_FINISHED,
        )
        out.put_nowait(pb.SiteMessage(step=pb.Step(deltas=[delta])))

    async def _write(self, call: Any, out: asyncio.Queue[pb.SiteMessage]) -> None:
        with suppress(grpc.RpcError, asyncio.InvalidStateError):
            await call.write(await out.get())  # Hello
            while True:
                for message in await due(out):
                    await call.write(message)


async def due(out: asyncio.Queue[pb.SiteMessage]) -> list[pb.SiteMessage]:
    """Wait for messages; return all that wait in few bunches, as a site sends them."""
    messages = [await out.get()]
    while not out.empty():
        messages.append(out.get_nowait())
    return list(bundle(messages))


def _pooled(assign: pb.Assign) -> pb.Delta:
    """Return the same vector for every input and the same score for every document."""
    vector = array("f", [0.5, 0.25]).tobytes()
    pooled = [pb.Pooled(index=index, vector=vector, score=0.5) for index in range(assign.pooling.inputs)]
    return pb.Delta(attempt_id=assign.attempt_id, finish=pb.Delta.STOP, pooled=pooled)


def hello(
    name: str = "stand-in", features: Sequence[str] = ("chat", "resume"), models: Sequence[str] = ("m",)
) -> pb.Hello:
    return pb.Hello(
        protocol=1,
        site=name,
        boot_id=str(time.monotonic_ns()),
        cloud="none",
        region="here",
        models=[pb.Model(id=id_, revision="1", context_tokens=8192, features=features) for id_ in models],
        slots=10_000,
        kv_capacity_tokens=10**8,
        reads_bunches=True,
    )


async def report(out: asyncio.Queue[pb.SiteMessage]) -> None:
    sequence = 0
    while True:
        sequence += 1
        cost = pb.IterationCost(base_s=0.001)
        out.put_nowait(pb.SiteMessage(load=pb.Load(seq=sequence, kv_free_tokens=10**8, iteration=cost)))
        await asyncio.sleep(REPORT_S)
