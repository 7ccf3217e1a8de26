"""Keep a stream to each gateway: dial, authenticate, send Hello, transfer messages both ways, redial.

Makes no decisions: `site.py` creates the messages, `outbox.py` knows when they are due. One task per address.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import grpc

from site_engine.core.training import StopTraining, Train
from site_engine.errors import LinkLost, WrongMessage
from site_engine.federation import codec
from site_engine.federation.bulk import Bulk
from site_engine.federation.connection import Connection
from site_engine.federation.site import Site
from site_engine.messages import Bye, FromSite, Hello, ReportPace, Welcome
from wire import federation_pb2_grpc

log = logging.getLogger(__name__)

MAX_ADDRESSES = 64
MAX_PEER_FAILURES = 10
"""Consecutive failures after which a peer is dropped, unless a gateway still names it."""
MAX_MESSAGE_BYTES = 64 << 20
MESSAGES_PER_TURN = 16
"""Messages of a bunch handled before pending messages are sent: a few milliseconds of work."""
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # else a new channel inherits the old one's backoff
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_LOOPBACK = ("127.", "localhost:", "[::1]:", "unix:")
MAX_MISSED_HEARTBEATS = 3


@dataclass(frozen=True, slots=True)
class LinkTimeouts:
    """Timeouts of a link. Backoff doubles from its first to its longest value, with jitter.

    Backoff counts from the start of a try: the next try follows at once after one that took longer. A gateway
    whose process was suspended therefore has a pending try of every site when it continues.
    """

    hello_s: float = 10.0
    backoff_first_s: float = 0.2
    backoff_longest_s: float = 3.0
    goodbye_s: float = 2.0


class Link:
    """The stream to one gateway address, redialled until `close`."""

    def __init__(
        self,
        address: str,
        *,
        site: Site,
        open_channel: Callable[[str], Any],
        token: str,
        add_peers: Callable[[Iterable[str]], None],
        clock: Callable[[], float],
        timeouts: LinkTimeouts,
        random: Random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        cpu_clock: Callable[[], float] = time.thread_time,
        on_unauthenticated: Callable[[], None] = lambda: None,
    ) -> None:
        """`add_peers` receives the addresses of other gateways that a gateway names. `cpu_clock` returns the
        CPU seconds of the event loop's thread.
        """
        self.address = address
        self._on_unauthenticated = on_unauthenticated
        self._site = site
        self._open_channel = open_channel
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._add_peers = add_peers
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._timeouts = timeouts
        self._random = random
        self._sleep = sleep
        self._failures = 0
        self._received_s = 0.0
        self._gateway = ""
        self._changed = asyncio.Event()
        self._room_made = asyncio.Event()
        self._bye: Bye | None = None

    async def run(self, *, max_failures: int | None = None) -> None:
        """Dial until closed, or until `max_failures` consecutive failures."""
        while self._bye is None and (max_failures is None or self._failures < max_failures):
            began_s = self._clock()
            try:
                await self._run_stream()
            except Exception as exc:  # noqa: BLE001 - whatever broke this stream, the site needs the next one
                self._log_failure(exc)
            self._failures += 1
            await self._pause(self._clock() - began_s)
            if self._gateway in self._site.linked:
                # this address is another name of a replica that is linked: of use only when no link is left
                log.info("gateway %s is linked through another address than %s", self._gateway, self.address)
                while self._site.linked and self._bye is None:
                    self._failures = 1
                    await self._pause()

    def close(self, reason: str) -> None:
        """Send all pending messages and Bye. `run` returns soon after."""
        self._bye = Bye(reason)
        self._changed.set()

    def _log_failure(self, exc: Exception) -> None:
        if isinstance(exc, grpc.RpcError):
            text = f"{exc.code().name}, {exc.details()}"
            self._check_status(exc.code())
        elif isinstance(exc, LinkLost | WrongMessage | OSError | asyncio.InvalidStateError):
            text = str(exc) or type(exc).__name__
        else:
            log.error("link to %s: a fault of ours", self.address, exc_info=exc)
            return
        log.log(logging.WARNING if self._bye is None else logging.INFO, "link to %s: %s", self.address, text)

    async def _end_reason(self, stream: Any) -> str:
        code, details = await stream.code(), await stream.details()
        self._check_status(code)
        return f"the gateway ended the stream: {code.name}{f', {details}' if details else ''}"

    def _check_status(self, code: grpc.StatusCode) -> None:
        if code is grpc.StatusCode.UNAUTHENTICATED:
            self._on_unauthenticated()

    async def _pause(self, waited_s: float = 0.0) -> None:
        if self._bye is not None:
            return
        first_s, longest_s = self._timeouts.backoff_first_s, self._timeouts.backoff_longest_s
        backoff_s = max(first_s, min(longest_s, first_s * 2 ** min(self._failures - 1, 16)) - waited_s)

        async def closed() -> None:
            while self._bye is None:
                self._changed.clear()
                await self._changed.wait()

        sleeping = asyncio.ensure_future(self._sleep(backoff_s * self._random.uniform(0.5, 1.0)))
        await _first_of(sleeping, asyncio.create_task(closed()))

    async def _run_stream(self) -> None:
        channel = self._open_channel(self.address)
        try:
            stream = federation_pb2_grpc.FederationStub(channel).Join(  # type: ignore[no-untyped-call]
                metadata=self._metadata
            )
            hello = self._site.hello()
            welcome = await self._handshake(stream, hello)
            connection = self._site.welcomed(hello, welcome, self._changed.set)
            connection.bulk = Bulk(partial(self._open_channel, self.address), self._metadata)
            log.info("linked to gateway %s at %s", welcome.gateway, self.address)
            self._failures, self._gateway = 0, welcome.gateway
            host = self.address.rpartition(":")[0]
            self._add_peers([*welcome.peers, *(f"{host}:{port}" for port in welcome.worker_ports)])
            try:
                self._received_s = self._clock()
                reading = self._read(stream, connection)
                writing = self._write(stream, connection, in_bundles=welcome.reads_bunches)
                watching = [self._watch(connection)] if welcome.heartbeat_s > 0 else []
                await _first_of(*map(asyncio.create_task, (reading, writing, *watching)))
            finally:
                self._site.lost(connection)
        finally:
            await channel.close()

    async def _handshake(self, stream: Any, hello: Hello) -> Welcome:
        try:
            async with asyncio.timeout(self._timeouts.hello_s):
                for message in codec.encode(hello):
                    await stream.write(message)
                answer = await stream.read()
        except TimeoutError as exc:
            raise LinkLost(f"no Welcome within {self._timeouts.hello_s:g} s") from exc
        if answer is grpc.aio.EOF:
            raise LinkLost(await self._end_reason(stream))
        welcome = codec.decode(answer)
        if not isinstance(welcome, Welcome):
            raise WrongMessage(f"expected Welcome, got {type(welcome).__name__}")
        return welcome

    async def _watch(self, connection: Connection) -> None:
        """Raise LinkLost after MAX_MISSED_HEARTBEATS of silence.

        Heartbeats at which this process woke late do not count: messages of the gateway may wait unread.
        """
        missed = 0
        while missed < MAX_MISSED_HEARTBEATS:
            began_s, heartbeat_s = self._clock(), connection.heartbeat_s
            await self._sleep(heartbeat_s)
            late = self._clock() - began_s > 1.5 * heartbeat_s
            missed = 0 if late or self._received_s >= began_s else missed + 1
        raise LinkLost(f"the gateway was silent for {missed} heartbeats of {connection.heartbeat_s:g} s")

    async def _read(self, stream: Any, connection: Connection) -> None:
        while True:
            while connection.attempts.outbox.full:  # of answers that the gateway does not read
                self._room_made.clear()
                await self._room_made.wait()
            message = await stream.read()
            if message is grpc.aio.EOF:
                raise LinkLost(await self._end_reason(stream))
            self._received_s = self._clock()
            for place, each in enumerate(codec.unbundle(message)):
                if place and place % MESSAGES_PER_TURN == 0:
                    await asyncio.sleep(0)
                decoded = codec.decode(each)
                if decoded is None:
                    self._site.load_reports.unknown_messages += 1
                elif isinstance(decoded, Train | StopTraining):
                    self._site.on_training(decoded)
                elif isinstance(decoded, ReportPace):
                    connection.paced(decoded)
                else:
                    self._site.receive(connection, decoded)

    async def _write(self, stream: Any, connection: Connection, *, in_bundles: bool) -> None:
        outbox = connection.attempts.outbox
        while self._bye is None:
            self._changed.clear()
            if connection.displaced:
                raise LinkLost(f"gateway {connection.gateway} is linked through another address")
            due = outbox.take(self._clock(), self._cpu_clock())
            parts = [part for message in due for part in codec.encode(message)]
            for part in codec.bundle(parts) if in_bundles else parts:
                await stream.write(part)
            self._room_made.set()
            if connection.hello_is_old and connection.is_idle:
                await self._finish(stream)
                raise LinkLost(f"gateway {connection.gateway} is told the models of this site by a new Hello")
            await self._wait_until(outbox.due_s())
        await self._finish(stream, *outbox.take(float("inf")), self._bye)

    async def _finish(self, stream: Any, *last: FromSite) -> None:
        """Write the last messages and wait until the gateway ends the stream, having read all of them."""
        async with asyncio.timeout(self._timeouts.goodbye_s):
            for message in last:
                for part in codec.encode(message):
                    await stream.write(part)
            await stream.done_writing()
            await stream.code()

    async def _wait_until(self, due_s: float | None) -> None:
        """Wait until something is due or changes. None: only a change ends the wait."""
        wait_s = None if due_s is None else due_s - self._clock()
        if wait_s is not None and wait_s <= 0:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._changed.wait()


class Links:
    """One link per address: permanent if configured; for peers while they answer or are named."""

    def __init__(
        self,
        make_link: Callable[[str, Callable[[Iterable[str]], None]], Link],
        timeouts: LinkTimeouts,
        background: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """`background` runs as long as the links do: it renews their certificate."""
        self._make_link = make_link
        self._timeouts = timeouts
        self._links: dict[str, Link] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._named: dict[str, tuple[str, ...]] = {}  # by the address of the gateway that named them last
        self._closed = False
        self._background = asyncio.create_task(background()) if background else None

    def add(self, addresses: Iterable[str], *, max_failures: int | None = None) -> None:
        for address in addresses:
            if address in self._links or self._closed:
                continue
            if len(self._links) >= MAX_ADDRESSES:
                log.warning("gateway address %s is ignored: %d are dialled already", address, MAX_ADDRESSES)
                continue
            link = self._links[address] = self._make_link(address, partial(self._add_peers, address))
            task = self._tasks[address] = asyncio.create_task(link.run(max_failures=max_failures))
            task.add_done_callback(partial(self._forget, address))

    async def close(self, reason: str) -> None:
        """Send all pending messages and Bye on every link, then end all tasks."""
        self._closed = True
        tasks = list(self._tasks.values())
        for link in self._links.values():
            link.close(reason)
        if self._background is not None:
            self._background.cancel()
            await asyncio.gather(self._background, return_exceptions=True)
        if tasks:
            await asyncio.wait(tasks, timeout=self._timeouts.goodbye_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _add_peers(self, named_by: str, addresses: Iterable[str]) -> None:
        named = self._named[named_by] = tuple(addresses)
        self.add(named, max_failures=MAX_PEER_FAILURES)

    def _forget(self, address: str, done: asyncio.Task[None]) -> None:
        del self._links[address], self._tasks[address]
        self._named.pop(address, None)
        if any(address in named for named in self._named.values()):
            self.add([address], max_failures=MAX_PEER_FAILURES)
        if not done.cancelled() and (exc := done.exception()) is not None:
            log.error("the link to %s ended", address, exc_info=exc)


async def _first_of(*tasks: asyncio.Future[Any]) -> None:
    """Run tasks until one ends; cancel the others; raise the exception of the first."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


def is_loopback(address: str) -> bool:
    return address.startswith(_LOOPBACK)


def open_channel(address: str, credentials: Any = None) -> Any:
    """Open a channel for one stream; `credentials` are grpc's for TLS."""
    options: tuple[tuple[str, int], ...] = _CHANNEL_OPTIONS
    if is_loopback(address):
        options = (*options, ("grpc.enable_http_proxy", 0))
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)
