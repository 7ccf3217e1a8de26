"""The certificate that this gateway shows: two PEM files, read again when they change."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import grpc

log = logging.getLogger(__name__)


class Pair(NamedTuple):
    """A certificate chain and its key, PEM."""

    chain: bytes
    key: bytes


class PairSource(Protocol):
    def pair(self) -> Pair:
        """What to show from now on."""
        ...


class CertificateFiles:
    """Broken or half-written files change nothing: the last good pair stays in use, and the log says so. They
    are read again with every look, for what mends them may not touch them: a chmod leaves no stamp.
    """

    def __init__(self, chain: Path, key: Path) -> None:
        """Raises OSError or ssl.SSLError: a gateway does not start with a certificate that it can't show."""
        self._paths = chain, key
        self._seen = self._stamps()
        self._pair = self._read()
        self._told = ""

    def pair(self) -> Pair:
        try:
            stamps = self._stamps()
            if stamps != self._seen:
                self._pair = self._read()
                self._seen, self._told = stamps, ""
                log.info("the certificate %s was renewed", self._paths[0])
        except (OSError, ssl.SSLError) as exc:
            if str(exc) != self._told:
                self._told = str(exc)
                log.error("the new certificate %s can't be used: %s", self._paths[0], exc)
        return self._pair

    def context(self) -> ssl.SSLContext:
        """For HTTP. Looks at the files with every handshake; a new pair holds from the next one on."""
        context, loaded = _context(*self._paths), self.pair()

        def look(*_: object) -> None:
            nonlocal loaded
            if (pair := self.pair()) is not loaded:
                context.load_cert_chain(*self._paths)
                loaded = pair

        context.sni_callback = look
        return context

    def _stamps(self) -> tuple[tuple[int, int], ...]:
        return tuple((found.st_mtime_ns, found.st_size) for found in (path.stat() for path in self._paths))

    def _read(self) -> Pair:
        _context(*self._paths)  # raises when the two do not belong together
        chain, key = (path.read_bytes() for path in self._paths)
        return Pair(chain, key)


def _context(chain: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(chain, key)
    return context


def grpc_credentials(source: PairSource, clients: bytes | None = None) -> Any:
    """For the link. With `clients`, the PEM of an authority, only who shows a certificate of it is let in."""
    shown = source.pair()

    def configuration(pair: Pair) -> Any:
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
