"""The streams to the gateways: dial, authenticate, say Hello, move messages both ways, dial again.

Thin on purpose: `site.py` decides what is said, `outbox.py` when it is due. One task per gateway address.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import grpc

from site_engine.errors import LinkLost, WrongMessage
from site_engine.federation import codec
from site_engine.federation.site import Connection, Site
from site_engine.messages import Bye, Hello, Welcome
from wire import federation_pb2_grpc

log = logging.getLogger(__name__)

ADDRESSES_MAX = 64
PEER_FAILURES_MAX = 10
"""A peer that cannot be reached so often in a row is forgotten, unless a gateway still names it."""
MESSAGE_BYTES_MAX = 64 << 20
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.use_local_subchannel_pool", 1),  # else a new channel inherits the old one's backoff
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_LOOPBACK = ("127.", "localhost:", "[::1]:", "unix:")
HEARTBEATS_MISSED_MAX = 3


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for what. Backoff doubles from its first to its longest, each time with jitter."""

    hello_s: float = 10.0
    backoff_first_s: float = 0.2
    backoff_longest_s: float = 10.0
    goodbye_s: float = 2.0


class Link:
    """The stream to one gateway address, again and again until `close`."""

    def __init__(
        self,
        address: str,
        *,
        site: Site,
        dial: Callable[[str], Any],
        token: str,
        peers: Callable[[Iterable[str]], None],
        clock: Callable[[], float],
        patience: Patience,
        random: Random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        refused: Callable[[], None] = lambda: None,
    ) -> None:
        """`refused` is told when a gateway does not believe who this is."""
        self.address = address
        self._refused = refused
        self._site = site
        self._dial = dial
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._peers = peers
        self._clock = clock
        self._patience = patience
        self._random = random
        self._sleep = sleep
        self._failures = 0
        self._heard_s = 0.0
        self._gateway = ""
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._bye: Bye | None = None

    async def run(self, *, failures_max: int | None = None) -> None:
        """Until closed, or until so many failures in a row."""
        while self._bye is None and (failures_max is None or self._failures < failures_max):
            try:
                await self._one_stream()
            except Exception as exc:  # noqa: BLE001 - whatever broke this stream, the site needs the next one
                self._report(exc)
            self._failures += 1
            await self._pause()
            if self._gateway in self._site.linked:
                await self._stand_by()

    def close(self, reason: str) -> None:
        """Says what is still owed and Bye; `run` returns soon after."""
        self._bye = Bye(reason)
        self._changed.set()

    def _report(self, exc: Exception) -> None:
        if isinstance(exc, grpc.RpcError):
            told = f"{exc.code().name}, {exc.details()}"
            self._consider(exc.code())
        elif isinstance(exc, LinkLost | WrongMessage | OSError | asyncio.InvalidStateError):
            told = str(exc) or type(exc).__name__
        else:
            log.error("link to %s: a fault of ours", self.address, exc_info=exc)
            return
        log.log(logging.WARNING if self._bye is None else logging.INFO, "link to %s: %s", self.address, told)

    async def _ended(self, stream: Any) -> str:
        code, details = await stream.code(), await stream.details()
        self._consider(code)
        return f"the gateway ended the stream: {code.name}{f', {details}' if details else ''}"

    def _consider(self, code: grpc.StatusCode) -> None:
        if code is grpc.StatusCode.UNAUTHENTICATED:
            self._refused()

    async def _stand_by(self) -> None:
        """This address is another name of a replica that is linked: of use only when no link is left."""
        log.info("gateway %s is linked through another address than %s", self._gateway, self.address)
        while self._site.linked and self._bye is None:
            self._failures = 1
            await self._pause()

    async def _pause(self) -> None:
        if self._bye is not None:
            return
        longest = self._patience.backoff_longest_s
        backoff_s = min(longest, self._patience.backoff_first_s * 2 ** min(self._failures - 1, 16))
        self._changed.clear()
        sleeping = asyncio.ensure_future(self._sleep(backoff_s * self._random.uniform(0.5, 1.0)))
        closing = asyncio.create_task(self._closed())
        await _first_of(sleeping, closing)

    async def _closed(self) -> None:
        while self._bye is None:
            self._changed.clear()
            await self._changed.wait()

    async def _one_stream(self) -> None:
        channel = self._dial(self.address)
        try:
            stream = federation_pb2_grpc.FederationStub(channel).Join(  # type: ignore[no-untyped-call]
                metadata=self._metadata
            )
            hello = self._site.hello()
            welcome = await self._introduce(stream, hello)
            connection = self._site.welcomed(hello, welcome, self._changed.set)
            log.info("linked to gateway %s at %s", welcome.gateway, self.address)
            self._failures, self._gateway = 0, welcome.gateway
            self._peers(welcome.peers)
            try:
                await self._talk(stream, connection, welcome)
            finally:
                self._site.lost(connection)
        finally:
            await channel.close()

    async def _introduce(self, stream: Any, hello: Hello) -> Welcome:
        try:
            async with asyncio.timeout(self._patience.hello_s):
                for message in codec.encode(hello):
                    await stream.write(message)
                answer = await stream.read()
        except TimeoutError as exc:
            raise LinkLost(f"no Welcome within {self._patience.hello_s:g} s") from exc
        if answer is grpc.aio.EOF:
            raise LinkLost(await self._ended(stream))
        welcome = codec.decode(answer)
        if not isinstance(welcome, Welcome):
            raise WrongMessage(f"expected Welcome, got {type(welcome).__name__}")
        return welcome

    async def _talk(self, stream: Any, connection: Connection, welcome: Welcome) -> None:
        self._heard_s = self._clock()
        doing = [self._read(stream, connection), self._write(stream, connection, welcome.reads_bunches)]
        if welcome.heartbeat_s > 0:
            doing.append(self._watch(welcome.heartbeat_s))
        await _first_of(*map(asyncio.create_task, doing))

    async def _watch(self, heartbeat_s: float) -> None:
        """Raises LinkLost after three heartbeats of silence.

        Those that this process slept through late do not count: what the gateway said may wait unread.
        """
        missed = 0
        while missed < HEARTBEATS_MISSED_MAX:
            began_s = self._clock()
            await self._sleep(heartbeat_s)
            late = self._clock() - began_s > 1.5 * heartbeat_s
            missed = 0 if late or self._heard_s >= began_s else missed + 1
        raise LinkLost(f"the gateway was silent for {missed} heartbeats of {heartbeat_s:g} s")

    async def _read(self, stream: Any, connection: Connection) -> None:
        while True:
            await self._wait_for_room(connection)
            message = await stream.read()
            if message is grpc.aio.EOF:
                raise LinkLost(await self._ended(stream))
            self._heard_s = self._clock()
            for each in codec.each_of(message):
                decoded = codec.decode(each)
                if decoded is not None:
                    self._site.receive(connection, decoded)

    async def _wait_for_room(self, connection: Connection) -> None:
        """A gateway that does not read its answers is not listened to either."""
        while connection.attempts.outbox.full:
            self._room.clear()
            await self._room.wait()

    async def _write(self, stream: Any, connection: Connection, in_bunches: bool) -> None:
        outbox = connection.attempts.outbox
        while self._bye is None:
            self._changed.clear()
            if connection.displaced:
                raise LinkLost(f"gateway {connection.gateway} is linked through another address")
            parts = [part for message in outbox.take(self._clock()) for part in codec.encode(message)]
            for part in codec.bunched(parts) if in_bunches else parts:
                await stream.write(part)
            self._room.set()
            await self._due(outbox.due_s())
        async with asyncio.timeout(self._patience.goodbye_s):
            for message in (*outbox.take(float("inf")), self._bye):
                for part in codec.encode(message):
                    await stream.write(part)
            await stream.done_writing()
            await stream.code()  # the gateway ends its side when it has read Bye

    async def _due(self, due_s: float | None) -> None:
        """Until something is due; a change may bring that forward."""
        wait_s = None if due_s is None else due_s - self._clock()
        if wait_s is not None and wait_s <= 0:
            return
        try:
            async with asyncio.timeout(wait_s):
                await self._changed.wait()
        except TimeoutError:
            pass


class Links:
    """A link per address: the configured ones for good, peers while they answer or a gateway names them."""

    def __init__(
        self,
        make: Callable[[str, Callable[[Iterable[str]], None]], Link],
        patience: Patience,
        beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """`beside` runs for as long as there are links: it sees to what they show."""
        self._make = make
        self._patience = patience
        self._links: dict[str, Link] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._named: dict[str, tuple[str, ...]] = {}  # by the address of who named them last
        self._closed = False
        self._beside = asyncio.create_task(beside()) if beside else None

    def add(self, addresses: Iterable[str], *, failures_max: int | None = None) -> None:
        for address in addresses:
            if address in self._links or self._closed:
                continue
            if len(self._links) >= ADDRESSES_MAX:
                log.warning("gateway address %s is ignored: %d are dialled already", address, ADDRESSES_MAX)
                continue
            link = self._links[address] = self._make(address, partial(self._add_peers, address))
            task = self._tasks[address] = asyncio.create_task(link.run(failures_max=failures_max))
            task.add_done_callback(partial(self._forget, address))

    async def close(self, reason: str) -> None:
        """What is owed and Bye on every link, then nothing is left."""
        self._closed = True
        tasks = list(self._tasks.values())
        for link in self._links.values():
            link.close(reason)
        if self._beside is not None:
            self._beside.cancel()
            await asyncio.gather(self._beside, return_exceptions=True)
        if tasks:
            await asyncio.wait(tasks, timeout=self._patience.goodbye_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _add_peers(self, named_by: str, addresses: Iterable[str]) -> None:
        named = self._named[named_by] = tuple(addresses)
        self.add(named, failures_max=PEER_FAILURES_MAX)

    def _forget(self, address: str, done: asyncio.Task[None]) -> None:
        del self._links[address], self._tasks[address]
        self._named.pop(address, None)
        if any(address in named for named in self._named.values()):
            self.add([address], failures_max=PEER_FAILURES_MAX)
        if not done.cancelled() and (exc := done.exception()) is not None:
            log.error("the link to %s ended", address, exc_info=exc)


async def _first_of(*tasks: asyncio.Future[Any]) -> None:
    """Runs until one of them ends; ends the others; raises what the first raised."""
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


def dial(address: str, credentials: Any = None) -> Any:
    """A channel of its own for one stream; `credentials` are grpc's for TLS."""
    options: tuple[tuple[str, int], ...] = _CHANNEL_OPTIONS
    if is_loopback(address):
        options = (*options, ("grpc.enable_http_proxy", 0))
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)
