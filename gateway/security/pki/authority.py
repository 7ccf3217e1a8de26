"""Sign the certificates of sites, and the gateway's own where none is configured.

The authority is a key and its certificate in a folder. The key can name sites, so it belongs on gateways
only.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gateway.security.tls import CertKeyPair

CERTIFICATE, KEY = "ca.pem", "ca-key.pem"
AUTHORITY_DAYS = 3650
SITE_LIFE = timedelta(hours=24)
SERVER_LIFE = timedelta(days=30)
SKEW = timedelta(minutes=5)
"""Tolerated clock lag of a machine that checks a certificate."""
MAX_CSR_BYTES = 16 * 1024
SITE_URI = "spiffe://mico/site/"
_MIN_RSA_BITS = 2048


class PkiError(Exception):
    """A folder, request or certificate is wrong; the message says how."""


class SiteCertificate(NamedTuple):
    """The site named in a certificate. Unix times; `issued_at` in whole seconds."""

    site: str
    serial: str
    issued_at: float
    expires_at: float


class Issued(NamedTuple):
    """A new certificate, encoded and parsed."""

    pem: bytes
    certificate: SiteCertificate


class Authority:
    """The certificate authority of a federation. `pem` is its certificate."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key
        self.pem = certificate.public_bytes(serialization.Encoding.PEM)

    @classmethod
    def create(cls, folder: Path, name: str, now: datetime) -> Authority:
        """Create an authority.

        Raises PkiError if the folder already has an authority, since replacing it would lock out every site,
        or if the name is not valid in a certificate.
        """
        if (folder / KEY).exists() or (folder / CERTIFICATE).exists():
            raise PkiError(f"{folder} holds an authority already")
        try:
            subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        except ValueError as exc:
            raise PkiError(f"an authority can't be named {name[:70]!r}: 1 to 64 bytes of UTF-8") from exc
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _builder(subject, subject, key.public_key(), now, timedelta(days=AUTHORITY_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        made = cls(certificate, key)
        folder.mkdir(parents=True, exist_ok=True)
        write_secret(folder / KEY, _private(key))
        try:
            (folder / CERTIFICATE).write_bytes(made.pem)
        except OSError:  # a partial authority would make the next attempt fail
            (folder / CERTIFICATE).unlink(missing_ok=True)
            (folder / KEY).unlink()
            raise
        return made

    @classmethod
    def open(cls, folder: Path) -> Authority:
        """Read the authority from its folder. Raises PkiError."""
        try:
            certificate = x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes())
            key = serialization.load_pem_private_key((folder / KEY).read_bytes(), None)
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as exc:
            raise PkiError(f"no authority can be read in {folder}: {exc}; `mico pki init` makes one") from exc
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise PkiError(f"{folder / KEY} is not the key of {folder / CERTIFICATE}")
        return cls(certificate, key)

    def secret(self, purpose: bytes) -> bytes:
        """Derive a secret for another purpose from the authority's key."""
        raw = self._key.private_numbers().private_value.to_bytes(32, "big")
        return hmac.new(raw, b"mico " + purpose, hashlib.sha256).digest()

    @staticmethod
    def requested_name(csr_pem: bytes) -> str:
        """Return the common name in the request, empty if there is none. Raises PkiError."""
        subject = _request(csr_pem).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        return str(subject[0].value) if subject else ""

    def issue_site(self, site: str, csr_pem: bytes, now: datetime) -> Issued:
        """Issue a certificate for the key in the request; its other fields are ignored. Raises PkiError."""
        key = _requested_key(csr_pem)
        shown = site.encode()[:64].decode(errors="ignore")  # the limit of a common name in bytes
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, shown)])
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(SITE_URI + quote(site, safe=""))])
        issued = self._sign(
            _builder(subject, self._certificate.subject, key, now, SITE_LIFE),
            names,
            ExtendedKeyUsageOID.CLIENT_AUTH,
        )
        pem = issued.public_bytes(serialization.Encoding.PEM)
        return Issued(pem, read_site(pem))

    def issue_server(self, names: Iterable[str], now: datetime) -> CertKeyPair:
        """Create a key and issue its certificate for names and addresses of this machine."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = x509.SubjectAlternativeName([_general_name(name) for name in names])
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Mico gateway")])
        builder = _builder(subject, self._certificate.subject, key.public_key(), now, SERVER_LIFE)
        issued = self._sign(builder, alternatives, ExtendedKeyUsageOID.SERVER_AUTH)
        return CertKeyPair(issued.public_bytes(serialization.Encoding.PEM) + self.pem, _private(key))

    def _sign(
        self,
        builder: x509.CertificateBuilder,
        names: x509.SubjectAlternativeName,
        purpose: x509.ObjectIdentifier,
    ) -> x509.Certificate:
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(names, critical=False)
            .add_extension(authority, critical=False)
            .sign(self._key, hashes.SHA256())
        )


def read_site(pem: bytes) -> SiteCertificate:
    """Return the site that a certificate names. The signature is checked by TLS only. Raises PkiError."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound) as exc:
        raise PkiError(f"this is not the certificate of a site: {exc}") from exc
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    if len(uris) != 1 or not uris[0].startswith(SITE_URI):
        raise PkiError("this is not the certificate of a site")
    return SiteCertificate(
        site=unquote(uris[0].removeprefix(SITE_URI)),
        serial=f"{certificate.serial_number:x}",
        issued_at=(certificate.not_valid_before_utc + SKEW).timestamp(),
        expires_at=certificate.not_valid_after_utc.timestamp(),
    )


def write_secret(path: Path, content: bytes) -> None:
    """Create a file that only its owner can ever read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    except OSError:
        path.unlink()
        raise


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey | rsa.RSAPublicKey,
    now: datetime,
    life: timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now.astimezone(UTC) - SKEW)
        .not_valid_after(now.astimezone(UTC) + life)
    )


def _request(csr_pem: bytes) -> x509.CertificateSigningRequest:
    if len(csr_pem) > MAX_CSR_BYTES:
        raise PkiError(f"the request has {len(csr_pem)} bytes, at most {MAX_CSR_BYTES} are read")
    try:
        csr = x509.load_pem_x509_csr(csr_pem)
        valid = csr.is_signature_valid
    except (ValueError, InvalidSignature, UnsupportedAlgorithm) as exc:
        raise PkiError(f"the request can't be read: {exc}") from exc
    if not valid:
        raise PkiError("the request is not signed by its own key")
    return csr


def _requested_key(csr_pem: bytes) -> ec.EllipticCurvePublicKey | rsa.RSAPublicKey:
    try:
        key = _request(csr_pem).public_key()
    except (ValueError, UnsupportedAlgorithm) as exc:
        raise PkiError(f"the request's key can't be read: {exc}") from exc
    strong = isinstance(key, ec.EllipticCurvePublicKey) or (
        isinstance(key, rsa.RSAPublicKey) and key.key_size >= _MIN_RSA_BITS
    )
    if not strong:
        raise PkiError(f"the key must be of an elliptic curve, or RSA of {_MIN_RSA_BITS} bits")
    assert isinstance(key, ec.EllipticCurvePublicKey | rsa.RSAPublicKey)
    return key


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
