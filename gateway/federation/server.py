"""The gRPC server that sites join: each site keeps one stream, which becomes a `Link` here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import grpc
import numpy as np

from gateway.domain import SiteIdentity
from gateway.federation import codec
from gateway.federation.bulk import Bulk, BulkRefused, receive_content, send_content
from gateway.federation.directory import MAX_SITES, Directory
from gateway.federation.link import Link
from gateway.federation.offloading import Offloading
from gateway.federation.progress import CHECK_EVERY_S, AwakeClock
from gateway.federation.report_pace import FEW_SITES, in_share, ping_heartbeats
from gateway.federation.site_auth import Certificates, Refusal, SiteAuth
from gateway.federation.stream_pace import StreamPace
from gateway.federation.training import trains_of
from gateway.security.pki.authority import SiteCertificate
from gateway.tasks import cancel
from wire import federation_pb2 as pb
from wire import federation_pb2_grpc as rpc

log = logging.getLogger(__name__)

HELLO_WITHIN_S = 10.0
MISSED_HEARTBEATS = 3
MAX_MESSAGE_BYTES = 64 * 2**20
HANDSHAKE_WITHIN_MS = 20_000
IDLE_MS = 60_000
MAX_STREAMS_PER_CONNECTION = 16
MAX_METADATA_BYTES = 16 * 1024
ENDED = "the connection ended"
"""The site ended the stream, or the network was cut, which gRPC sometimes reports only as the end of
messages.
"""


@dataclass(frozen=True, slots=True)
class FederationSettings:
    """`site_tokens`: the tokens that are accepted from sites. `grace_s`: how long a site keeps the work of a
    lost link. `stream_interval_s`: the longest that text is held back while the event loop is busy.
    `worker_ports`, `mutual_worker_ports`: the ports of all workers of this gateway, for sites with a token
    and for sites with a certificate.
    """

    replica: str
    site_tokens: tuple[str, ...]
    peers: tuple[str, ...] = ()
    heartbeat_s: float = 1.0
    grace_s: float = 5.0
    stream_interval_s: float = 0.02
    worker_ports: tuple[int, ...] = ()
    mutual_worker_ports: tuple[int, ...] = ()


class Federation(rpc.FederationServicer):
    """Holds the links of this replica. A process that joins again replaces its older link, which is then
    lost. Another process with the name of a linked site is refused until that link has ended.
    """

    def __init__(
        self,
        settings: FederationSettings,
        directory: Directory,
        clock: Callable[[], float],
        certificates: Certificates | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        *,
        replicas: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        """`replicas` returns the names of the live replicas, including this one."""
        self.directory = directory
        self.bulk: Bulk | None = None  # set while fine-tuning runs
        self._settings = settings
        self._clock = clock
        self.replicas = replicas
        self._sleep = sleep
        self._site_auth = SiteAuth(settings.site_tokens, certificates)
        self._links: dict[str, Link] = {}
        self._awake = AwakeClock(clock)
        self._pace = StreamPace(settings.stream_interval_s, clock)
        self._offloading = Offloading(self._links, directory, clock)

    @property
    def links(self) -> Mapping[str, Link]:
        return MappingProxyType(self._links)

    @property
    def loop_is_busy(self) -> bool:
        return self._pace.is_busy

    async def watch_progress(self) -> None:
        """Check all links every CHECK_EVERY_S, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            self.check_progress()

    def check_progress(self) -> None:
        """Check every link for progress, and forget sites that have been down for long."""
        self._awake.tick()
        self.directory.forget_gone(self._clock())
        for link in self._links.values():
            link.check_progress()

    async def Join(self, _: object, context: Any) -> None:  # noqa: N802 — the name of the RPC
        try:
            certificate = self._site_auth.identify(context)
            link, abandoned = await self._welcome(context, certificate)
        except Refusal as exc:
            await context.abort(exc.code, str(exc))
        except codec.ProtocolError as exc:
            log.warning("a site was turned away: %s", exc)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(exc))
        log.info("site %s joined with %d attempts of an earlier link", link.name, abandoned)
        reason = await self._serve(link, context, certificate)
        if reason != ENDED:
            await context.abort(grpc.StatusCode.ABORTED, reason)

    async def Enrol(self, _: object, context: Any) -> pb.EnrolReply:  # noqa: N802 — the name of the RPC
        async def csr() -> bytes:
            asked: pb.EnrolRequest = await _first(context, "request")
            return asked.csr

        try:
            pem = await self._site_auth.enrol(context, csr)
        except Refusal as exc:
            await context.abort(exc.code, str(exc))
        except codec.ProtocolError as exc:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(exc))
        return pb.EnrolReply(certificate=pem)

    async def Fetch(self, _: object, context: Any) -> None:  # noqa: N802 — the name of the RPC
        await self._transfer(context, send_content)

    async def Store(self, _: object, context: Any) -> None:  # noqa: N802 — the name of the RPC
        await self._transfer(context, receive_content)

    async def _transfer(self, context: Any, transfer: Callable[[Bulk, Any], Awaitable[None]]) -> None:
        try:
            self._site_auth.identify(context)
            if self.bulk is None:
                raise BulkRefused(grpc.StatusCode.UNAVAILABLE, "this gateway starts or ends")
            await transfer(self.bulk, context)
        except (Refusal, BulkRefused) as exc:
            await context.abort(exc.code, str(exc))

    async def _welcome(self, context: Any, certificate: SiteCertificate | None) -> tuple[Link, int]:
        """Exchange Hello and Welcome. Return the link, and the number of attempts of an earlier link, which
        the site must cancel because their queries have been decided again.
        """
        first = await _first(context, "Hello")
        if first.WhichOneof("body") != "hello":
            raise codec.ProtocolError("the first message of a site is Hello")
        identity = replace(codec.identity(first.hello), trains=trains_of(first.hello))
        self._check_name(identity, certificate)
        bunches = first.hello.reads_bunches
        link = Link(
            identity,
            self.directory,
            self._offloading,
            self._clock,
            reads_bunches=bunches,
            paces_reports=first.hello.paces_reports,
            awake=self._awake,
            pace=self._pace,
        )
        if codec.shows_life(first.hello) and not first.hello.paces_reports:
            link.reports.ping_heartbeats = ping_heartbeats(len(self._links))
        settings = self._settings
        welcome = pb.Welcome(
            gateway=settings.replica,
            peers=settings.peers if certificate is None else (),  # peers are ports for tokens
            heartbeat_s=settings.heartbeat_s * link.reports.ping_heartbeats,
            worker_ports=settings.worker_ports if certificate is None else settings.mutual_worker_ports,
            grace_s=settings.grace_s,
            cancel=first.hello.attempts,
            reads_bunches=True,
            reads_prefixes=True,
            reads_models=True,
            reads_held=True,
            tunes=True,
            protocol=codec.LOWEST_PROTOCOL,
            highest_protocol=codec.HIGHEST_PROTOCOL,
        )
        await context.write(pb.GatewayMessage(welcome=welcome).SerializeToString())
        self._check_name(identity, certificate)  # another site may have joined meanwhile
        return link, len(first.hello.attempts)

    def _check_name(self, identity: SiteIdentity, certificate: SiteCertificate | None) -> None:
        """Raise Refusal if the name belongs to another site or is in use by another process. The linked
        process keeps the name, so that its work is not interrupted.
        """
        name = identity.name
        self._site_auth.check_name(name, certificate)
        linked = self._links.get(name)
        if linked is not None and linked.identity.boot_id != identity.boot_id:
            log.warning(
                "a second process calls itself site %s; it is turned away while the first is here", name
            )
            reason = f"another process is linked as site {name}: stop it, or give this one a name of its own"
            raise Refusal(grpc.StatusCode.ALREADY_EXISTS, reason)

    async def _serve(self, link: Link, context: Any, certificate: SiteCertificate | None) -> str:
        """Run the link's read, write and watch tasks until one ends, and return its reason. The link's live
        attempts are then lost.
        """
        if older := self._links.get(link.name):
            older.close("the site joined again")
        self._links[link.name] = link
        self.directory.join(link.identity, self._clock())
        tasks = {
            asyncio.create_task(work, name=f"{link.name} {name}")
            for name, work in (
                ("read", self._read(link, context)),
                ("write", self._write(link, context)),
                ("watch", self._watch(link, certificate)),
            )
        }
        reason = ENDED  # then gRPC cancels this coroutine
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            reason = next(iter(done)).result()
        finally:
            self._unlink(link, reason)
            await cancel(*tasks)
        return reason

    def _unlink(self, link: Link, reason: str) -> None:
        link.close(link.closing or reason)
        log.warning("site %s left: %s", link.name, link.closing)
        if self._links.get(link.name) is link:
            del self._links[link.name]
            self.directory.leave(link.name, link.closing or reason)

    async def _read(self, link: Link, context: Any) -> str:
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                first, *later = codec.turns_of(message)
                link.receive(first)
                for part in later:
                    await asyncio.sleep(0)
                    link.receive(part)
        except codec.ProtocolError as exc:
            return f"sent garbage: {exc}"
        except grpc.RpcError as exc:
            return f"connection lost ({exc})"
        return ENDED

    async def _write(self, link: Link, context: Any) -> str:
        try:
            while True:
                await context.write(await link.next_message())
        except grpc.RpcError as exc:
            return f"connection lost ({exc})"

    async def _watch(self, link: Link, certificate: SiteCertificate | None) -> str:
        """Send pings, and return the reason to end the link: the site is silent, does not answer pings, or
        its certificate is no longer valid. (A site that hangs keeps its socket open.)

        A site with work sends a message at every heartbeat, even if pings are less frequent. A site without
        work may be as silent as its reports may be rare. Silence is counted in heartbeats, without those in
        which this process stalled itself, as the site's messages then wait unread.
        """
        heartbeat_s, missed, heartbeats = self._settings.heartbeat_s, 0, 0
        while link.closing is None:
            link.reports.adapt(len(self._links), heartbeat_s, in_share=self._is_in_share(link))
            quiet = 0 if link.live else link.reports.every_s - 1
            if missed >= MISSED_HEARTBEATS + quiet:
                return f"silent for {self._clock() - link.silent_since_s:.1f} s"
            if invalid_reason := self._site_auth.invalid_reason(certificate):
                return invalid_reason
            if heartbeats % link.reports.ping_heartbeats == 0 and (unread_reason := link.pings.send()):
                return unread_reason
            heartbeats += 1
            began_s = self._clock()
            await self._sleep(heartbeat_s)
            stalled = self._clock() - began_s > 1.5 * heartbeat_s
            missed = 0 if stalled or link.silent_since_s >= began_s else missed + 1
        return link.closing

    def _is_in_share(self, link: Link) -> bool:
        """Return whether the site is to report often here; always if few sites serve one of its models."""
        if in_share(link.name, self._settings.replica, self.replicas()):
            return True
        serving = self.directory.fleet.serving
        return any(
            np.count_nonzero(serving(model, frozenset())) < FEW_SITES for model in link.identity.models
        )


class Listening(NamedTuple):
    """The gRPC server and its ports. `mutual_port`: the port for sites with certificates, or None."""

    server: Any
    port: int
    mutual_port: int | None


class ReadOnDemand(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Reads the message of a unary call only when its method does, after authentication. gRPC alone would
    accept up to MAX_MESSAGE_BYTES from any caller. The call is served as a stream of one message, which is
    the same for the client.
    """

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        found = await continuation(call)
        if found is None or found.request_streaming:
            return found
        return grpc.stream_unary_rpc_method_handler(
            found.unary_unary, found.request_deserializer, found.response_serializer
        )


class SendsSerialized(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Sends the messages of a stream as they are, already serialized by the outbox."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        found = await continuation(call)
        if found is None or not found.response_streaming:
            return found
        # Calls of one message, too, so that the method reads it after it has authenticated the caller.
        method = found.stream_stream or found.unary_stream
        return grpc.stream_stream_rpc_method_handler(method, found.request_deserializer)


async def _first(context: Any, what: str) -> Any:
    """Return the first message of a stream. Raises ProtocolError if none arrives within HELLO_WITHIN_S."""
    try:
        message = await asyncio.wait_for(context.read(), HELLO_WITHIN_S)
    except TimeoutError as exc:
        raise codec.ProtocolError(f"no {what} within {HELLO_WITHIN_S:.0f} s") from exc
    if message is grpc.aio.EOF:
        raise codec.ProtocolError(f"the stream ended before its {what}")
    return message


async def listen(
    federation: Federation,
    address: str,
    credentials: Any | None = None,
    mutual: tuple[str, Any] | None = None,
) -> Listening:
    """Start the gRPC server. Raises RuntimeError if an address is in use.

    `mutual`: the address for sites with certificates, and server credentials that require a certificate.
    """
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_WITHIN_MS),
        ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
        ("grpc.max_connection_idle_ms", IDLE_MS),  # a site always has a stream open
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ]
    server = grpc.aio.server(
        interceptors=(ReadOnDemand(), SendsSerialized()), options=options, maximum_concurrent_rpcs=MAX_SITES
    )
    rpc.add_FederationServicer_to_server(federation, server)  # type: ignore[no-untyped-call]
    if credentials is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, credentials)
    mutual_port = None if mutual is None else server.add_secure_port(*mutual)
    await server.start()
    return Listening(server, port, mutual_port)
