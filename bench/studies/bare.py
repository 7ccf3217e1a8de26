"""Serve with uvicorn in front, gRPC behind and nothing of a gateway between: the floor of these libraries.

No keys, quotas, forecasts, decisions, records or checks. Its added time is the least of any gateway made of
these parts, on the machine and in the minute in which it is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from itertools import count
from typing import Any

import grpc
import msgspec
import uvicorn

from wire import federation_pb2 as pb
from wire import federation_pb2_grpc as rpc

HEADERS = {False: [(b"content-type", b"application/json")], True: [(b"content-type", b"text/event-stream")]}


class Message(msgspec.Struct):
    role: str
    content: str


class Request(msgspec.Struct):
    model: str
    messages: list[Message]
    stream: bool = False
    max_tokens: int | None = None


class Bare(rpc.FederationServicer):
    """One site at a time; an answer is the queue of its deltas."""

    def __init__(self) -> None:
        self._read = msgspec.json.Decoder(Request).decode
        self._numbers = map(str, count())
        self._answers: dict[str, asyncio.Queue[pb.Delta]] = {}
        self._out: asyncio.Queue[pb.GatewayMessage] = asyncio.Queue()
        self._joined = False

    # the site's side

    async def Join(self, _: object, context: Any) -> None:  # noqa: N802 — the name of the RPC
        await context.read()  # Hello
        await context.write(pb.GatewayMessage(welcome=pb.Welcome(reads_bunches=True)))
        self._joined = True
        writing = asyncio.create_task(self._write(context))
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                for each in message.bunch.messages if message.HasField("bunch") else (message,):
                    for delta in each.step.deltas:
                        if (answer := self._answers.get(delta.attempt_id)) is not None:
                            answer.put_nowait(delta)
        finally:
            writing.cancel()

    async def _write(self, context: Any) -> None:
        while True:
            await context.write(await self._out.get())

    # the client's side

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] != "POST":
            await send({"type": "http.response.start", "status": 200 if self._joined else 503, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        body, more = b"", True
        while more:
            part = await receive()
            body, more = body + part.get("body", b""), part.get("more_body", False)
        asked, number = self._read(body), next(self._numbers)
        answer = self._answers[number] = asyncio.Queue()
        self._out.put_nowait(pb.GatewayMessage(assign=assign(number, asked)))
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS[asked.stream]})
        try:
            await (streamed if asked.stream else whole)(asked, number, answer, send)
        finally:
            del self._answers[number]


def assign(number: str, asked: Request) -> pb.Assign:
    turns = [pb.ChatMessage(role=each.role, content=each.content) for each in asked.messages]
    sampling = pb.Sampling(max_tokens=asked.max_tokens, n=1)
    chat = pb.Chat(messages=turns)
    return pb.Assign(attempt_id=number, model=asked.model, chat=chat, sampling=sampling)


async def whole(asked: Request, number: str, answer: asyncio.Queue[pb.Delta], send: Any) -> None:
    text = ""
    while True:
        delta = await answer.get()
        text += delta.text
        if delta.finish:
            break
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    body = msgspec.json.encode(head(asked, number, "chat.completion") | {"choices": [choice]})
    await send({"type": "http.response.body", "body": body})


async def streamed(asked: Request, number: str, answer: asyncio.Queue[pb.Delta], send: Any) -> None:
    same, finish = head(asked, number, "chat.completion.chunk"), None
    while finish is None:
        delta = await answer.get()
        finish = "stop" if delta.finish else None
        choice = {"index": 0, "delta": {"content": delta.text}, "finish_reason": finish}
        body = b"data: " + msgspec.json.encode(same | {"choices": [choice]}) + b"\n\n"
        await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def head(asked: Request, number: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{number}", "object": kind, "created": 1_790_000_000, "model": asked.model}


async def serve(options: argparse.Namespace) -> None:
    bare, grpc_server = Bare(), grpc.aio.server()
    rpc.add_FederationServicer_to_server(bare, grpc_server)  # type: ignore[no-untyped-call]
    grpc_server.add_insecure_port(f"127.0.0.1:{options.grpc_port}")
    await grpc_server.start()
    config = uvicorn.Config(
        bare, port=options.http_port, http="httptools", log_config=None, access_log=False, lifespan="off"
    )
    server = uvicorn.Server(config)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.handle_exit, signal.SIGTERM, None)
    await server.serve()
    await grpc_server.stop(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--http-port", type=int, required=True)
    parser.add_argument("--grpc-port", type=int, required=True)
    import uvloop

    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
