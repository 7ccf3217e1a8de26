"""TLS at the gateway's own ports, and a certificate that is replaced while it serves."""

from __future__ import annotations

import asyncio
import os
import ssl
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import grpc
import pytest

from gateway.config import ConfigError, GatewayConfig
from gateway.http.app import create_http
from gateway.http.server import ConnectionLimits, http_server
from gateway.listeners import load_credentials
from gateway.security.pki.authority import Authority
from gateway.security.tls import CertificateFiles, grpc_credentials
from tests.support.fakes.edge import Script
from tests.support.fakes.federation import DEADLINE_S, until


def put(authority: Authority, folder: Path) -> tuple[Path, Path]:
    """A new pair in the same files."""
    pair = authority.issue_server(["127.0.0.1"], datetime.now(UTC))
    chain, key = folder / "chain.pem", folder / "key.pem"
    key.write_bytes(pair.key)
    chain.write_bytes(pair.chain)
    return chain, key


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "pki", "test", datetime.now(UTC))


async def asked(port: int, trust: ssl.SSLContext, **settings: object) -> tuple[bytes, bytes]:
    """The answer to a request, and the certificate that was shown."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    shown: ssl.SSLSocket = writer.get_extra_info("ssl_object")
    der = shown.getpeercert(binary_form=True)
    writer.close()
    assert der is not None
    return answer, der


def test_clients_are_shown_a_new_certificate_without_a_restart(tmp_path: Path, authority: Authority) -> None:
    async def scenario() -> None:
        files = CertificateFiles(*put(authority, tmp_path))
        server = http_server(
            create_http(Script().backend()), host="127.0.0.1", port=0, end_within_s=1, certificate=files
        )
        running = asyncio.create_task(server.serve())
        await until(lambda: server.started, "started")
        port = server.servers[0].sockets[0].getsockname()[1]
        trust = ssl.create_default_context(cadata=authority.pem.decode())
        answer, first = await asked(port, trust)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"strict-transport-security: max-age=" in answer
        assert (await asked(port, trust))[1] == first
        put(authority, tmp_path)
        await asked(port, trust)  # this handshake notices
        second = (await asked(port, trust))[1]
        assert second != first
        (tmp_path / "chain.pem").write_text("half a certif")
        assert [(await asked(port, trust))[1] for _ in range(2)] == [second, second]
        with pytest.raises(ssl.SSLError):
            await asked(port, old_protocols(trust))
        server.should_exit = True
        await running

    asyncio.run(scenario())


CLIENT_HELLO = bytes.fromhex("16030100c8010000c40303")
"""The first bytes of a handshake whose rest never comes."""


def test_handshakes_that_never_end_hold_up_nobody(tmp_path: Path, authority: Authority) -> None:
    async def scenario() -> None:
        files = CertificateFiles(*put(authority, tmp_path))
        app, limits = create_http(Script().backend()), ConnectionLimits(slow_s=2 * DEADLINE_S)
        clients = http_server(app, host="127.0.0.1", port=0, end_within_s=1, certificate=files, limits=limits)
        serving = asyncio.create_task(clients.serve())
        await until(lambda: clients.started, "started")
        port = clients.servers[0].sockets[0].getsockname()[1]
        sites = grpc.aio.server()
        sites_port = sites.add_secure_port("127.0.0.1:0", grpc_credentials(files))
        await sites.start()
        trust = ssl.create_default_context(cadata=authority.pem.decode())
        stuck = [
            (await asyncio.open_connection("127.0.0.1", each))[1]
            for each in (port, sites_port)
            for _ in range(200)
        ]
        for writer in stuck[::2]:
            writer.write(CLIENT_HELLO)
        async with asyncio.timeout(DEADLINE_S):  # before those that are stuck are cut off
            assert (await asked(port, trust))[0].startswith(b"HTTP/1.1 200")
            root = grpc.ssl_channel_credentials(authority.pem)
            async with grpc.aio.secure_channel(f"127.0.0.1:{sites_port}", root) as channel:
                await channel.channel_ready()
        for writer in stuck:
            writer.transport.abort()
        await sites.stop(None)
        clients.should_exit = True
        await serving

    asyncio.run(scenario())


@pytest.mark.parametrize("sent", [b"", CLIENT_HELLO])
def test_a_handshake_that_never_ends_is_cut(tmp_path: Path, authority: Authority, sent: bytes) -> None:
    async def scenario() -> None:
        files = CertificateFiles(*put(authority, tmp_path))
        app, limits = create_http(Script().backend()), ConnectionLimits(slow_s=0.3)
        server = http_server(app, host="127.0.0.1", port=0, end_within_s=1, certificate=files, limits=limits)
        serving = asyncio.create_task(server.serve())
        await until(lambda: server.started, "started")
        port = server.servers[0].sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        async with asyncio.timeout(30):
            with suppress(ConnectionError):
                while await reader.read(65536):
                    pass
        writer.close()
        server.should_exit = True
        await serving

    asyncio.run(scenario())


def old_protocols(trust: ssl.SSLContext) -> ssl.SSLContext:
    with pytest.warns(DeprecationWarning):
        trust.maximum_version = ssl.TLSVersion.TLSv1_1
    return trust


def test_a_certificate_that_could_not_be_read_is_shown_once_it_can(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """A repair of the files, such as a chmod, need not change their time or size."""
    chain, key = put(authority, tmp_path)
    files = CertificateFiles(chain, key)
    old = files.pair()
    put(authority, tmp_path)
    good, at = chain.read_bytes(), (1_900_000_000, 1_900_000_000)
    chain.write_bytes(b"x" * len(good))
    os.utime(chain, at)
    assert files.pair() is files.pair() is old
    assert len([each for each in caplog.records if "can't be used" in each.message]) == 1
    chain.write_bytes(good)
    os.utime(chain, at)
    assert files.pair().chain == good


def test_sites_are_shown_the_new_certificate_too(tmp_path: Path, authority: Authority) -> None:
    async def scenario() -> None:
        files = CertificateFiles(*put(authority, tmp_path))
        server = grpc.aio.server()
        port = server.add_secure_port("127.0.0.1:0", grpc_credentials(files))
        await server.start()
        first = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
        put(authority, tmp_path)
        second = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
        assert (
            first != second == files.pair().chain.decode().split("-----BEGIN", 2)[1].join(["-----BEGIN", ""])
        )
        await server.stop(None)

    asyncio.run(scenario())


def test_a_gateway_does_not_start_with_a_certificate_that_it_cannot_show(
    tmp_path: Path, authority: Authority
) -> None:
    async def opened(**settings: object) -> None:
        await load_credentials(GatewayConfig(site_tokens=("t",), **settings), None)  # type: ignore[arg-type]

    chain, key = put(authority, tmp_path)
    other = authority.issue_server(["x"], datetime.now(UTC))
    key.write_bytes(other.key)
    with pytest.raises(ConfigError, match="tls_cert and tls_key can't be used"):
        asyncio.run(opened(tls_cert=chain, tls_key=key))
    with pytest.raises(ConfigError, match="pki: no authority can be read"):
        asyncio.run(opened(pki=tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="belong together"):
        asyncio.run(opened(tls_cert=chain))
