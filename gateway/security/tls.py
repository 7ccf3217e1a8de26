"""Serve this gateway's certificate from two PEM files, and reload them when they change."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import grpc

log = logging.getLogger(__name__)


class CertKeyPair(NamedTuple):
    """A certificate chain and its key, PEM."""

    chain: bytes
    key: bytes


class CertKeySource(Protocol):
    """A source of the current certificate."""

    def pair(self) -> CertKeyPair:
        """Return the certificate to serve from now on."""
        ...


class CertificateFiles:
    """The certificate in two files. While they are broken or half-written, the last good pair stays in use.

    Broken files are read again at every call, because a repair such as chmod does not change their time
    stamps.
    """

    def __init__(self, chain: Path, key: Path) -> None:
        """Raises OSError or ssl.SSLError: a gateway does not start with an unusable certificate."""
        self._paths = chain, key
        self._seen = self._stamps()
        self._pair = self._read()
        self._logged_error = ""

    def pair(self) -> CertKeyPair:
        """Return the newest good pair; log a change, and an error once."""
        try:
            stamps = self._stamps()
            if stamps != self._seen:
                self._pair = self._read()
                self._seen, self._logged_error = stamps, ""
                log.info("the certificate %s was renewed", self._paths[0])
        except (OSError, ssl.SSLError) as exc:
            if str(exc) != self._logged_error:
                self._logged_error = str(exc)
                log.error("the new certificate %s can't be used: %s", self._paths[0], exc)
        return self._pair

    def context(self) -> ssl.SSLContext:
        """Return the context for HTTP. Each handshake checks the files; a new pair serves the next one."""
        context, loaded = _context(*self._paths), self.pair()

        def reload_if_changed(*_: object) -> None:
            nonlocal loaded
            if (pair := self.pair()) is not loaded:
                context.load_cert_chain(*self._paths)
                loaded = pair

        context.sni_callback = reload_if_changed
        return context

    def _stamps(self) -> tuple[tuple[int, int], ...]:
        return tuple((found.st_mtime_ns, found.st_size) for found in (path.stat() for path in self._paths))

    def _read(self) -> CertKeyPair:
        _context(*self._paths)  # raises when the two do not belong together
        chain, key = (path.read_bytes() for path in self._paths)
        return CertKeyPair(chain, key)


def _context(chain: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(chain, key)
    return context


def grpc_credentials(source: CertKeySource, clients: bytes | None = None) -> Any:
    """Return the credentials of a gRPC port.

    With `clients`, the PEM of an authority, clients need a certificate that it has signed.
    """
    shown = source.pair()

    def configuration(pair: CertKeyPair) -> Any:
        return grpc.ssl_server_certificate_configuration([(pair.key, pair.chain)], root_certificates=clients)

    def newest() -> Any | None:
        nonlocal shown
        if source.pair() == shown:
            return None
        shown = source.pair()
        return configuration(shown)

    return grpc.dynamic_ssl_server_credentials(
        configuration(shown), newest, require_client_authentication=clients is not None
    )
