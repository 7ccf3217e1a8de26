"""What this gateway shows and demands at its ports: certificates, and who issues those of sites."""

from __future__ import annotations

from typing import Any, NamedTuple

from gateway.config import ConfigError, GatewayConfig
from gateway.federation.site_auth import Certificates
from gateway.security.pki.authority import Authority, PkiError
from gateway.security.pki.own import OwnPair
from gateway.security.tls import CertificateFiles, PairSource, grpc_credentials
from gateway.store.certificates import CertificateRegister


class Doors(NamedTuple):
    """`http`: for TLS in front of clients. `link`: credentials of the port for tokens; `mutual`: the port for
    certificates and its credentials. None where there is no TLS, or no such port.
    """

    http: CertificateFiles | None
    link: Any | None
    mutual: tuple[str, Any] | None
    certificates: Certificates | None


async def open_doors(config: GatewayConfig, register: CertificateRegister) -> Doors:
    """Raises ConfigError, StoreUnavailable."""
    files = _files(config)
    if config.pki is None:
        return Doors(files, grpc_credentials(files) if files else None, None, None)
    try:
        authority = Authority.open(config.pki)
    except PkiError as exc:
        raise ConfigError(f"pki: {exc}") from exc
    await register.start()
    shown: PairSource = files or OwnPair(authority, config.tls_names)
    mutual = f"{config.grpc_host}:{config.mtls_port}", grpc_credentials(shown, authority.pem)
    return Doors(files, grpc_credentials(shown), mutual, Certificates(authority, register))


def _files(config: GatewayConfig) -> CertificateFiles | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    try:
        return CertificateFiles(config.tls_cert, config.tls_key)
    except OSError as exc:  # ssl.SSLError is one
        raise ConfigError(f"tls_cert and tls_key can't be used: {exc}") from exc
