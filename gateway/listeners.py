"""Load the TLS credentials of this gateway's ports, and the authority that issues sites' certificates."""

from __future__ import annotations

from typing import Any, NamedTuple

from gateway.config import ConfigError, GatewayConfig
from gateway.federation.site_auth import Certificates
from gateway.security.pki.authority import Authority, PkiError
from gateway.security.pki.server_certificate import SelfIssuedCertificate
from gateway.security.tls import CertificateFiles, CertKeySource, grpc_credentials
from gateway.store.certificates import CertificateRegistry


class ListenerCredentials(NamedTuple):
    """The credentials of each listener, None if it has no TLS or does not exist.

    `http` is for clients, and `link` for sites that join with a token. `mutual` is the address for sites with
    a certificate and its credentials.
    """

    http: CertificateFiles | None
    link: Any | None
    mutual: tuple[str, Any] | None
    certificates: Certificates | None


async def load_credentials(config: GatewayConfig, registry: CertificateRegistry) -> ListenerCredentials:
    """Read or issue the certificates. Raises ConfigError and StoreUnavailable."""
    files = _files(config)
    if config.pki is None:
        return ListenerCredentials(files, grpc_credentials(files) if files else None, None, None)
    try:
        authority = Authority.open(config.pki)
    except PkiError as exc:
        raise ConfigError(f"pki: {exc}") from exc
    await registry.start()
    shown: CertKeySource = files or SelfIssuedCertificate(authority, config.tls_names)
    mutual = f"{config.grpc_host}:{config.mtls_port}", grpc_credentials(shown, authority.pem)
    return ListenerCredentials(files, grpc_credentials(shown), mutual, Certificates(authority, registry))


def _files(config: GatewayConfig) -> CertificateFiles | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    try:
        return CertificateFiles(config.tls_cert, config.tls_key)
    except OSError as exc:  # ssl.SSLError is one
        raise ConfigError(f"tls_cert and tls_key can't be used: {exc}") from exc
