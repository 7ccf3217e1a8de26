"""Dial the gateways of a site process: token, TLS or own certificates, and timeouts of all its links."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from site_engine.config import SiteConfig
from site_engine.errors import ConfigError
from site_engine.federation.identity import Enrolment, Identity
from site_engine.federation.link import Link, Links, LinkTimeouts, is_loopback, open_channel
from site_engine.federation.site import Site

log = logging.getLogger(__name__)


class Dialer(NamedTuple):
    """Credentials of all links of this process. `identity`: of a site that gets its certificates itself."""

    token: str
    credentials: Callable[[], Any]
    identity: Identity | None

    @classmethod
    def from_config(cls, config: SiteConfig) -> Dialer:
        """Make a dialer; warn of links that anybody on the way can read. Raises ConfigError."""
        identity = identity_of(config)
        fixed = tls_credentials(config) if config.tls else None
        dialer = cls(config.secret(), identity.credentials if identity else lambda: fixed, identity)
        plain_links = [] if config.tls else [each for each in config.gateways if not is_loopback(each)]
        if plain_links:
            log.warning("links to %s are plain text, the token too; set tls", ", ".join(plain_links))
        return dialer

    def links(self, site: Site) -> Links:
        timeouts = LinkTimeouts()

        def make_link(address: str, add_peers: Callable[[Iterable[str]], None]) -> Link:
            return Link(
                address,
                site=site,
                open_channel=lambda address: open_channel(address, self.credentials()),
                token=self.token,
                add_peers=add_peers,
                clock=time.monotonic,
                timeouts=timeouts,
                random=Random(),
                on_unauthenticated=self.identity.invalidate if self.identity else lambda: None,
            )

        return Links(make_link, timeouts, background=self.identity.renew_forever if self.identity else None)


def identity_of(config: SiteConfig) -> Identity | None:
    """Return the identity that `config` names, None if none. Raises ConfigError."""
    if config.identity is None:
        return None
    ca = _authority(config)
    enrolment = Enrolment(config.site, config.enrol_at, config.invitation(), config.gateways, ca)
    return Identity(config.identity, enrolment, open_channel)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"tls: {exc}") from exc


def tls_credentials(config: SiteConfig) -> Any:
    """Return gRPC's credentials. Raises ConfigError for files with which every link would fail to connect."""
    ca = _authority(config)
    if config.tls_cert is None or config.tls_key is None:
        return grpc.ssl_channel_credentials(ca)
    cert, key = _bytes(config.tls_cert), _bytes(config.tls_key)
    try:
        shown = x509.load_pem_x509_certificate(cert)
    except ValueError as exc:
        raise ConfigError(f"tls_cert has no certificate in PEM: {exc}") from exc
    try:
        own = serialization.load_pem_private_key(key, None)
    except (TypeError, ValueError, UnsupportedAlgorithm) as exc:
        raise ConfigError(f"tls_key has no key in PEM without a password: {exc}") from exc
    if own.public_key() != shown.public_key():
        raise ConfigError("tls_key is not the key of tls_cert")
    return grpc.ssl_channel_credentials(ca, key, cert)


def _authority(config: SiteConfig) -> bytes | None:
    if config.tls_ca is None:
        return None
    ca = _bytes(config.tls_ca)
    if b"CERTIFICATE-----" not in ca:
        raise ConfigError(f"tls_ca has no certificates in PEM: {config.tls_ca}")
    return ca
