"""Dial the gateways of a site process: token, TLS or own certificates, and timeouts of all its links."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import grpc

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
    ca = None if config.tls_ca is None else _bytes(config.tls_ca)
    enrolment = Enrolment(config.site, config.enrol_at, config.invitation(), config.gateways, ca)
    return Identity(config.identity, enrolment, open_channel)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"tls: {exc}") from exc


def tls_credentials(config: SiteConfig) -> Any:
    paths = (config.tls_ca, config.tls_key, config.tls_cert)
    ca, key, cert = (_bytes(path) if path else None for path in paths)
    return grpc.ssl_channel_credentials(ca, key, cert)
