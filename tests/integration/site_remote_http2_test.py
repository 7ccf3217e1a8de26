"""HTTP/2 to a server over TLS if it offers that; leaving one answer leaves the others alone."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from site_engine.remote.request import HttpRequest
from site_engine.remote.server import Server
from tests.support.h2_server import CHUNK, h2_server
from tests.support.openai_server import openai_server

REQUEST = HttpRequest("/v1/completions", {"prompt": "ab", "max_tokens": 3})


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """Return the context of a server on 127.0.0.1 whose certificate clients trust by their environment."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "server")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(address, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate, private = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setenv("NO_PROXY", "*")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, private)
    return context


def connected(port: int) -> Server:
    return Server(f"https://127.0.0.1:{port}", "", silence_s=20.0, connections=4)


async def read(server: Server) -> bytes:
    async with server.stream(REQUEST) as received:
        return b"".join([data async for data in received])


async def gone(task: asyncio.Task[bytes]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("begins", [True, False])
def test_answers_share_a_connection_and_one_that_is_left_is_reset(
    context: ssl.SSLContext, *, begins: bool
) -> None:
    context.set_alpn_protocols(["h2", "http/1.1"])

    async def scenario() -> None:
        async with h2_server(context, begins=begins) as there:
            server = connected(there.port)
            left = asyncio.create_task(read(server))
            await there.until(there.open, 1)
            stays = asyncio.create_task(read(server))
            await there.until(there.open, 2)
            await gone(left)
            await there.until(there.reset, 1)
            assert there.reset == there.open[:1]
            there.finish(there.open[1])
            assert await stays == (CHUNK * 2 if begins else CHUNK)
            last = asyncio.create_task(read(server))
            await there.until(there.open, 3)
            there.finish(there.open[2])
            await last
            await server.close()
            assert there.connections == 1
            assert len(there.reset) == 1  # what was read to its end is not

    asyncio.run(scenario())


def test_a_server_that_offers_only_http_1_gets_that(context: ssl.SSLContext) -> None:
    async def scenario() -> None:
        async with openai_server(tls=context) as there:
            server = connected(there.port)
            assert b"[DONE]" in await read(server)
            await server.close()

    asyncio.run(scenario())
