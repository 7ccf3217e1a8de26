"""The Join server: sites dial in, each keeps one stream, and this is where a stream becomes a `Link`."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import grpc

from gateway.federation import codec
from gateway.federation.directory import Directory
from gateway.federation.link import Link
from gateway.federation.offloading import Offloading
from wire import federation_pb2 as pb
from wire import federation_pb2_grpc as rpc

log = logging.getLogger(__name__)

HELLO_WITHIN_S = 10.0
MISSED_HEARTBEATS = 3
MAX_MESSAGE_BYTES = 64 * 2**20
BYE = "it said bye"


@dataclass(frozen=True, slots=True)
class FederationSettings:
    """`site_tokens`: any of them lets a site in. `grace_s`: how long a site keeps the work of a lost link."""

    replica: str
    site_tokens: tuple[str, ...]
    peers: tuple[str, ...] = ()
    heartbeat_s: float = 1.0
    grace_s: float = 5.0


class Federation(rpc.FederationServicer):
    """All links of this replica. A site that joins again replaces its older link, which is then lost."""

    def __init__(
        self, settings: FederationSettings, directory: Directory, clock: Callable[[], float]
    ) -> None:
        self.directory = directory
        self._settings = settings
        self._clock = clock
        self._links: dict[str, Link] = {}
        self._offloading = Offloading(self._links, directory, clock)

    @property
    def links(self) -> Mapping[str, Link]:
        return MappingProxyType(self._links)

    async def Join(self, _: object, context: Any) -> None:  # noqa: N802 — the name of the RPC
        if not self._authentic(dict(context.invocation_metadata())):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the site token is missing or wrong")
        try:
            link, abandoned = await self._welcome(context)
        except codec.Garbage as exc:
            log.warning("a site was turned away: %s", exc)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(exc))
        log.info("site %s joined with %d attempts of an earlier link", link.name, abandoned)
        reason = await self._serve(link, context)
        if reason != BYE:
            await context.abort(grpc.StatusCode.ABORTED, reason)

    def _authentic(self, metadata: Mapping[str, str]) -> bool:
        given = metadata.get("authorization", "").removeprefix("Bearer ").encode()
        matches = [hmac.compare_digest(given, token.encode()) for token in self._settings.site_tokens]
        return any(matches)  # every token is compared, so that time tells nothing

    async def _welcome(self, context: Any) -> tuple[Link, int]:
        """Hello, Welcome. What the site still runs for an older link is not wanted: it was decided anew."""
        try:
            first = await asyncio.wait_for(context.read(), HELLO_WITHIN_S)
        except TimeoutError as exc:
            raise codec.Garbage(f"no Hello within {HELLO_WITHIN_S:.0f} s") from exc
        if first is grpc.aio.EOF or first.WhichOneof("body") != "hello":
            raise codec.Garbage("the first message of a site is Hello")
        link = Link(codec.identity(first.hello), self.directory, self._offloading, self._clock)
        settings = self._settings
        welcome = pb.Welcome(
            gateway=settings.replica,
            peers=settings.peers,
            heartbeat_s=settings.heartbeat_s,
            grace_s=settings.grace_s,
            cancel=first.hello.attempts,
        )
        await context.write(pb.GatewayMessage(welcome=welcome))
        return link, len(first.hello.attempts)

    async def _serve(self, link: Link, context: Any) -> str:
        """Read, write and watch until one of them ends, for a reason; what lived on the link is then lost."""
        if older := self._links.get(link.name):
            older.close("the site joined again")
        self._links[link.name] = link
        self.directory.join(link.identity, self._clock())
        tasks = {
            asyncio.create_task(work, name=f"{link.name} {name}")
            for name, work in (
                ("read", self._read(link, context)),
                ("write", self._write(link, context)),
                ("watch", self._watch(link)),
            )
        }
        reason = "the connection ended"  # then gRPC cancels this coroutine
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            reason = next(iter(done)).result()
        finally:
            self._unlink(link, reason)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return reason

    def _unlink(self, link: Link, reason: str) -> None:
        link.close(link.closing or reason)
        log.warning("site %s left: %s", link.name, link.closing)
        if self._links.get(link.name) is link:
            del self._links[link.name]
            self.directory.leave(link.name)

    async def _read(self, link: Link, context: Any) -> str:
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                link.receive(message)
        except codec.Garbage as exc:
            return f"sent garbage: {exc}"
        except grpc.RpcError as exc:
            return f"connection lost ({exc})"
        return BYE

    async def _write(self, link: Link, context: Any) -> str:
        try:
            while True:
                await context.write(await link.outbox.get())
        except grpc.RpcError as exc:
            return f"connection lost ({exc})"

    async def _watch(self, link: Link) -> str:
        """Heartbeats: a site that hangs keeps its socket open, so silence is what tells.

        Silence is counted in heartbeats that this process slept through on time: if it was stalled itself,
        the answers wait unread, and that is not the fault of the site.
        """
        heartbeat_s, missed = self._settings.heartbeat_s, 0
        while link.closing is None:
            if missed >= MISSED_HEARTBEATS:
                return f"silent for {self._clock() - link.heard_s:.1f} s"
            link.ping()
            began_s = self._clock()
            await asyncio.sleep(heartbeat_s)
            stalled = self._clock() - began_s > 1.5 * heartbeat_s
            missed = 0 if stalled or link.heard_s >= began_s else missed + 1
        return link.closing


async def listen(federation: Federation, address: str, credentials: Any | None = None) -> tuple[Any, int]:
    """Start the gRPC server: (server, bound port). Raises RuntimeError when the address is taken."""
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.so_reuseport", 0),
    ]
    server = grpc.aio.server(options=options)
    rpc.add_FederationServicer_to_server(federation, server)  # type: ignore[no-untyped-call]
    if credentials is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, credentials)
    await server.start()
    return server, port
