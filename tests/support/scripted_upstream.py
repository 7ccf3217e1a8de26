"""One upstream for every gateway: the same answers over OpenAI's HTTP and, as a site, over the link.

A prompt says what it wants: `12 tokens at once`, `12 tokens paced` or `12 tokens paced, each of 900 letters`;
a paced answer gets its first token at once and then one an iteration, with all others that run, as an engine
does. `/stats` counts them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import httptools

from site_engine.federation.codec import unbundle
from tests.support.stand_in_site import TOKEN, due, hello, report
from wire import federation_pb2 as pb
from wire import federation_pb2_grpc as rpc

LARGE_MESSAGES = (("grpc.max_receive_message_length", 64 << 20),)
MODEL = "m"
SHADOW = "shadow"
"""A second model, over the link alone."""
WANTED = re.compile(r"(\d+) tokens (at once|paced)(?:, each of (\d+) letters)?")
PROMPT_TOKENS = 7
REDIAL_S = 0.2
MAX_WANTED_CHARS = 1_000
"""A prompt begins with what it wants: to search megabytes takes 50 ms, in which no answer advances."""
MAX_UNREAD = 256
"""Messages that wait for the gateway; then deltas are merged."""


def words(count: int) -> list[str]:
    return [f"w{number} " for number in range(count)]


def prompt(tokens: int, number: int, *, paced: bool) -> str:
    return f"{tokens} tokens {'paced' if paced else 'at once'}, please; this is query {number}."


@dataclass(slots=True, eq=False)
class Job:
    """One answer; `emit(texts, finished)` hands on its new words."""

    tokens: int
    emit: Callable[[list[str], bool], None]
    letters: int = 0
    emitted: int = 0
    phase: int = 0


@dataclass(slots=True)
class Engine:
    """Advance all paced answers together, once an iteration; `flush` follows the emits of an iteration.

    With `phases` it stands for as many engines, whose iterations follow one another.
    """

    iteration_s: float
    phases: int = 1
    running: set[Job] = field(default_factory=set)
    flushes: list[Callable[[], None]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: {"begun": 0, "finished": 0, "aborted": 0})

    def begin(self, prompt: str, emit: Callable[[list[str], bool], None]) -> Job:
        wanted = WANTED.search(prompt, 0, MAX_WANTED_CHARS)
        tokens, at_once = (int(wanted[1]), wanted[2] == "at once") if wanted else (4, True)
        phase = self.counts["begun"] % self.phases
        job = Job(tokens, emit, int((wanted and wanted[3]) or 0), phase=phase)
        self.counts["begun"] += 1
        self.running.add(job)
        self._advance(job, tokens if at_once else 1)
        self._flush()
        return job

    def abort(self, job: Job) -> bool:
        """Stop an answer; return whether it still ran."""
        if job not in self.running:
            return False
        self.running.discard(job)
        self.counts["aborted"] += 1
        return True

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        for phase in itertools.cycle(range(self.phases)):
            due_s = max(due_s + self.iteration_s / self.phases, loop.time())
            await asyncio.sleep(due_s - loop.time())
            for job in [each for each in self.running if each.phase == phase]:
                self._advance(job, 1)
            self._flush()

    def _advance(self, job: Job, count: int) -> None:
        texts = [f"w{number} " for number in range(job.emitted, min(job.tokens, job.emitted + count))]
        job.emitted += len(texts)
        if job.letters:
            texts = [text.rjust(job.letters, "x") for text in texts]
        finished = job.emitted >= job.tokens
        if finished:
            self.running.discard(job)
            self.counts["finished"] += 1
        job.emit(texts, finished)

    def _flush(self) -> None:
        for flush in self.flushes:
            flush()


class HttpConnection(asyncio.Protocol):
    """One connection of OpenAI's API: as little as an engine's server can do."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._parser = httptools.HttpRequestParser(self)
        self._job: Job | None = None
        self._url, self._body = b"", b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._job is not None:
            self._engine.abort(self._job)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url, self._body = url, b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._url.endswith(b"/chat/completions"):
            self._answer(json.loads(self._body))
        elif self._url.endswith(b"/stats"):
            self._send(self._engine.counts)
        elif self._url.endswith(b"/models"):
            self._send({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "vllm"}]})
        elif self._url.endswith((b"/health", b"/version")):
            self._send({"version": "0.20.0"})
        else:
            self._send({"error": {"message": "unknown"}}, b"404 Not Found")

    def _answer(self, asked: dict[str, Any]) -> None:
        content = asked["messages"][-1]["content"]
        prompt = content if isinstance(content, str) else "".join(part["text"] for part in content)
        if asked.get("stream"):
            self._stream(prompt, bool((asked.get("stream_options") or {}).get("include_usage")))
            return
        texts: list[str] = []

        def emit(new_texts: list[str], finished: bool) -> None:
            texts.extend(new_texts)
            if finished:
                message = {"role": "assistant", "content": "".join(texts)}
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                self._send(_head("chat.completion") | {"choices": [choice], "usage": _usage(len(texts))})

        self._job = self._engine.begin(prompt, emit)

    def _stream(self, prompt: str, with_usage: bool) -> None:
        headers = b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self._transport.write(b"HTTP/1.1 200 OK\r\n" + headers)
        self._event({"role": "assistant", "content": ""})
        emitted = 0

        def emit(new_texts: list[str], finished: bool) -> None:
            nonlocal emitted
            emitted += len(new_texts)
            for text in new_texts:
                self._event({"content": text})
            if finished:
                self._event({}, "stop")
                if with_usage:
                    counted = _head("chat.completion.chunk") | {"choices": [], "usage": _usage(emitted)}
                    self._chunk(b"data: %s\n\n" % json.dumps(counted).encode())
                self._chunk(b"data: [DONE]\n\n")
                self._transport.write(b"0\r\n\r\n")

        self._job = self._engine.begin(prompt, emit)

    def _event(self, delta: dict[str, str], finish: str | None = None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        event = _head("chat.completion.chunk") | {"choices": [choice]}
        self._chunk(b"data: %s\n\n" % json.dumps(event).encode())

    def _chunk(self, body: bytes) -> None:
        self._transport.write(b"%x\r\n%s\r\n" % (len(body), body))

    def _send(self, body: object, status: bytes = b"200 OK") -> None:
        raw = json.dumps(body).encode()
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % (status, len(raw)) + raw)


def _head(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 1_790_000_000, "model": MODEL}


def _usage(tokens: int) -> dict[str, int]:
    whole = PROMPT_TOKENS + tokens
    return {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens, "total_tokens": whole}


class LinkSite:
    """A site of one gateway; all deltas of an iteration are one message, as a site's are. Deltas that the
    gateway has not read are merged, as a site does.
    """

    def __init__(self, engine: Engine, address: str, site: str) -> None:
        self._engine, self._address, self._site = engine, address, site
        self._out: asyncio.Queue[pb.SiteMessage] = asyncio.Queue()
        self._jobs: dict[str, Job] = {}
        self._deltas: dict[tuple[str, int], pb.Delta] = {}
        engine.flushes.append(self._flush)

    async def run(self) -> None:
        while True:
            with suppress(grpc.RpcError, asyncio.InvalidStateError):
                async with grpc.aio.insecure_channel(self._address, LARGE_MESSAGES) as channel:
                    await self._serve(channel)
            await asyncio.sleep(REDIAL_S)

    async def _serve(self, channel: grpc.aio.Channel) -> None:
        stub = rpc.FederationStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Join(metadata=(("authorization", f"Bearer {TOKEN}"),))
        self._out = asyncio.Queue()
        self._out.put_nowait(pb.SiteMessage(hello=hello(self._site, models=(MODEL, SHADOW))))
        both = [asyncio.create_task(self._write(call)), asyncio.create_task(report(self._out))]
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                for each in unbundle(message):
                    self._take(each)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _write(self, call: Any) -> None:
        with suppress(grpc.RpcError, asyncio.InvalidStateError):
            await call.write(await self._out.get())  # Hello
            while True:
                for message in await due(self._out):
                    await call.write(message)

    def _take(self, message: Any) -> None:
        match message.WhichOneof("body"):
            case "ping":
                self._out.put_nowait(pb.SiteMessage(pong=pb.Pong(nonce=message.ping.nonce)))
            case "assign":
                self._begin(message.assign)
            case "cancel":
                attempt_id = message.cancel.attempt_id
                job = self._jobs.pop(attempt_id, None)
                if job is not None and self._engine.abort(job):
                    over = pb.Delta(
                        attempt_id=attempt_id, completion_tokens=job.emitted, finish=pb.Delta.CANCELLED
                    )
                    self._out.put_nowait(pb.SiteMessage(step=pb.Step(deltas=[over])))

    def _begin(self, assign: pb.Assign) -> None:
        attempt_id = assign.attempt_id
        self._out.put_nowait(
            pb.SiteMessage(accepted=pb.Accepted(attempt_id=attempt_id, prompt_tokens=PROMPT_TOKENS))
        )
        emitted = 0

        def emit(new_texts: list[str], finished: bool) -> None:
            nonlocal emitted
            ids = range(emitted, emitted + len(new_texts))
            emitted += len(new_texts)
            finish = pb.Delta.STOP if finished else pb.Delta.NOT_FINISHED
            text = "".join(new_texts)
            same: dict[str, Any] = {
                "text": text,
                "token_ids": ids,
                "completion_tokens": emitted,
                "finish": finish,
            }
            choices = range(assign.sampling.n)
            for index in choices:
                delta = pb.Delta(attempt_id=attempt_id, index=index, **same)
                if (unread := self._deltas.get((attempt_id, index))) is not None:
                    delta.text = unread.text + text
                    delta.token_ids[:] = [*unread.token_ids, *ids]
                self._deltas[attempt_id, index] = delta
            if finished:
                self._jobs.pop(attempt_id, None)

        prompt = assign.chat.messages[-1].content if assign.chat.messages else assign.text
        job = self._engine.begin(prompt, emit)
        if job in self._engine.running:
            self._jobs[attempt_id] = job

    def _flush(self) -> None:
        if self._deltas and self._out.qsize() < MAX_UNREAD:
            self._out.put_nowait(pb.SiteMessage(step=pb.Step(deltas=self._deltas.values())))
            self._deltas = {}


async def serve(options: argparse.Namespace) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    engine = Engine(options.iteration_ms / 1000, options.phases)
    server = await loop.create_server(lambda: HttpConnection(engine), "127.0.0.1", options.http_port)
    going = [asyncio.create_task(engine.run())]
    going += [asyncio.create_task(LinkSite(engine, address, options.site).run()) for address in options.join]
    await stop.wait()
    server.close()
    for task in going:
        task.cancel()
    # Where a stream is lost just then gRPC may raise another error: the end of the loop cancels again.
    await asyncio.wait(going, timeout=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--http-port", type=int, required=True)
    parser.add_argument("--join", action="append", default=[], help="a gateway's host:port for sites")
    parser.add_argument("--site", default="stand-in", help="the name of the site")
    parser.add_argument("--iteration-ms", type=float, default=20.0)
    parser.add_argument("--phases", type=int, default=1, help="stand for as many engines")
    import uvloop

    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
