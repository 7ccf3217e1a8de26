"""A site proves its identity by a certificate, and believes only gateways whose authority it was given."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from site_engine.app import serve
from site_engine.config import SiteConfig
from site_engine.errors import ConfigError
from site_engine.federation.dial import Dialer, identity_of
from tests.support.site_fakes import fake_loaded
from tests.support.site_gateway import Gateway, assign
from wire import federation_pb2 as pb
from wire import federation_pb2_grpc

OPENSSL = shutil.which("openssl")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate that is its own authority, and its key."""
    if OPENSSL is None:
        pytest.skip("openssl makes the certificates of this test")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = [OPENSSL, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=mico"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


def test_a_site_and_a_gateway_know_each_other_by_certificate(pair: tuple[Path, Path]) -> None:
    certificate, key = pair
    own = [(key.read_bytes(), certificate.read_bytes())]

    async def scenario() -> None:
        gateway = Gateway(token=None)
        server = grpc.aio.server()
        federation_pb2_grpc.add_FederationServicer_to_server(gateway, server)
        trust = grpc.ssl_server_credentials(own, certificate.read_bytes(), require_client_auth=True)
        gateway.port = server.add_secure_port("127.0.0.1:0", trust)
        await server.start()
        config = SiteConfig(
            site="alpha",
            model="letters",
            gateways=(gateway.address,),
            tls=True,
            tls_ca=certificate,
            tls_cert=certificate,
            tls_key=key,
        )
        loaded = fake_loaded()
        site = asyncio.create_task(serve(config, lambda _: loaded))
        session = await gateway.linked()
        assert "authorization" not in session.metadata
        await session.send(**assign("a"))
        assert await session.finished("a") == pb.Delta.LENGTH
        site.cancel()
        await asyncio.gather(site, return_exceptions=True)
        await server.stop(grace=None)

    asyncio.run(scenario())


def test_a_certificate_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = SiteConfig(site="a", model="m", gateways=("h:1",), tls=True, tls_ca=tmp_path / "none.pem")
    with pytest.raises(ConfigError, match=r"tls: .*none\.pem"):
        asyncio.run(serve(config))


def test_files_that_no_link_can_use_are_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Links would fail to connect for ever, and not say why."""
    certificate, key = pair
    other, der = tmp_path / "other.pem", tmp_path / "cert.der"
    pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    other.write_bytes(
        ec.generate_private_key(ec.SECP256R1()).private_bytes(*pem, serialization.NoEncryption())
    )
    encrypted = tmp_path / "encrypted.pem"
    encrypted.write_bytes(
        ec.generate_private_key(ec.SECP256R1()).private_bytes(
            *pem, serialization.BestAvailableEncryption(b"word")
        )
    )
    der.write_bytes(b"\x30\x82\x01")
    for files, complaint in (
        ({"tls_ca": der}, "tls_ca"),
        ({"tls_cert": key, "tls_key": certificate}, "tls_cert"),
        ({"tls_cert": certificate, "tls_key": certificate}, "tls_key"),
        ({"tls_cert": certificate, "tls_key": encrypted}, "tls_key"),
        ({"tls_cert": certificate, "tls_key": other}, "tls_key is not the key of tls_cert"),
    ):
        config = SiteConfig(site="a", model="m", gateways=("h:1",), tls=True, **files)
        with pytest.raises(ConfigError, match=rf"^{complaint}\b"):
            Dialer.from_config(config)
    with pytest.raises(ConfigError, match=r"^tls_ca\b"):
        identity_of(
            SiteConfig(site="a", model="m", gateways=("h:1",), tls=True, tls_ca=der, identity=tmp_path)
        )
