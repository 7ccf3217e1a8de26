"""Who this site is: a key that is made here and never leaves, and a certificate for it that lives for a day.

The first certificate is asked for with a join secret; each later one, at half the life of the last, with that
one. Links that are up stay up: a new certificate is shown from the next one on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from site_engine.errors import ConfigError, LinkLost
from wire import federation_pb2 as pb
from wire import federation_pb2_grpc as rpc

log = logging.getLogger(__name__)

KEY, CERTIFICATE = "site-key.pem", "site.pem"
ASK_WITHIN_S = 10.0
REST_FIRST_S, REST_LONGEST_S = 1.0, 300.0

Dial = Callable[[str, Any], Any]


@dataclass(frozen=True, slots=True)
class Asking:
    """Where to ask: `first` with the join secret, one of `again` with a certificate. `ca` is believed."""

    site: str
    first: str
    secret: str
    again: tuple[str, ...]
    ca: bytes | None


class Identity:
    """Its folder belongs to this site alone. Raises ConfigError when it cannot be used."""

    def __init__(
        self, folder: Path, asking: Asking, dial: Dial, unix_time: Callable[[], float] = time.time
    ) -> None:
        self._folder = folder
        self._asking = asking
        self._dial = dial
        self._unix_time = unix_time
        self._refused = asyncio.Event()
        self._taken_at = float("-inf")
        try:
            self._key = _key(folder)
            self._certificate = _certificate(folder, self._key)
        except (OSError, ValueError) as exc:
            raise ConfigError(f"identity: {folder} can't be used: {exc}") from exc

    @property
    def good(self) -> bool:
        """Whether there is a certificate to show."""
        return self._certificate is not None and self._unix_time() < _ends_at(self._certificate)

    @property
    def due_s(self) -> float:
        """Until a new certificate is to be asked for: 0 when there is none, else until half of its life."""
        if self._certificate is None or not self.good:
            return 0.0
        begins_at = self._certificate.not_valid_before_utc.timestamp()
        return max(0.0, (begins_at + _ends_at(self._certificate)) / 2 - self._unix_time())

    def credentials(self) -> Any:
        """For a link. Raises LinkLost while there is no certificate."""
        if self._certificate is None or not self.good:
            raise LinkLost("this site has no certificate yet")
        shown = self._certificate.public_bytes(serialization.Encoding.PEM)
        return grpc.ssl_channel_credentials(self._asking.ca, _pem(self._key), shown)

    def refused(self) -> None:
        """A gateway takes the certificate no longer: another is needed, and only a join secret gets it.

        One that was issued just now is not at fault; another would be refused as well.
        """
        if self._unix_time() - self._taken_at > REST_LONGEST_S:
            self._certificate = None
            self._refused.set()

    async def keep(self) -> None:
        """Asks in time, while the site runs; what is refused is asked for again, ever more rarely."""
        rest_s = REST_FIRST_S
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.due_s):
                    await self._refused.wait()
            self._refused.clear()
            try:
                await self.renew()
                rest_s = REST_FIRST_S
            except LinkLost as exc:
                log.error("no certificate: %s", exc)
                await asyncio.sleep(rest_s * random.uniform(0.5, 1.0))
                rest_s = min(REST_LONGEST_S, 2 * rest_s)

    async def renew(self) -> None:
        """Raises LinkLost, and keeps the certificate that it has."""
        reasons = []
        if self.good:
            for address in self._asking.again:
                try:
                    return self._take(await self._ask(address, self.credentials(), ""))
                except LinkLost as exc:
                    reasons.append(f"{address}: {exc}")
        if self._asking.secret:
            trust = grpc.ssl_channel_credentials(self._asking.ca)
            try:
                return self._take(await self._ask(self._asking.first, trust, self._asking.secret))
            except LinkLost as exc:
                reasons.append(f"{self._asking.first}: {exc}")
        raise LinkLost(
            "; ".join(reasons) or "set join_secret or join_secret_file: `mico pki invite` makes one"
        )

    async def _ask(self, address: str, credentials: Any, secret: str) -> bytes:
        metadata = (("authorization", f"Bearer {secret}"),) if secret else ()
        channel = self._dial(address, credentials)
        try:
            async with asyncio.timeout(ASK_WITHIN_S):
                enrol = rpc.FederationStub(channel).Enrol  # type: ignore[no-untyped-call]
                answer = await enrol(pb.EnrolRequest(csr=self._request()), metadata=metadata)
        except TimeoutError as exc:
            raise LinkLost(f"no answer within {ASK_WITHIN_S:g} s") from exc
        except grpc.RpcError as exc:
            raise LinkLost(f"{exc.code().name}, {exc.details()}") from exc
        finally:
            await channel.close()
        certificate: bytes = answer.certificate
        return certificate

    def _request(self) -> bytes:
        shown = self._asking.site.encode()[:64].decode(errors="ignore")  # more bytes the name does not take
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, shown)])
        csr = x509.CertificateSigningRequestBuilder().subject_name(name).sign(self._key, hashes.SHA256())
        return csr.public_bytes(serialization.Encoding.PEM)

    def _take(self, pem: bytes) -> None:
        """Raises LinkLost for a certificate that is not for our key."""
        try:
            certificate = x509.load_pem_x509_certificate(pem)
        except ValueError as exc:
            raise LinkLost(f"what came is no certificate: {exc}") from exc
        if certificate.public_key() != self._key.public_key():
            raise LinkLost("the certificate is for another key")
        self._certificate, self._taken_at = certificate, self._unix_time()
        log.info("this site has a certificate until %s", certificate.not_valid_after_utc.isoformat())
        draft = self._folder / f"{CERTIFICATE}.new"
        try:
            draft.write_bytes(pem)
            draft.replace(self._folder / CERTIFICATE)
        except OSError as exc:  # this process has it; what runs must not end for a full disk
            log.error("the certificate could not be written down, so a restart will ask for one: %s", exc)


def _key(folder: Path) -> ec.EllipticCurvePrivateKey:
    """Made at the first start, readable by its owner only."""
    path = folder / KEY
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        key = ec.generate_private_key(ec.SECP256R1())
        draft = folder / f"{KEY}.new"
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(_pem(key))
        draft.replace(path)
        return key
    found = serialization.load_pem_private_key(path.read_bytes(), None)
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{path} is not the key of an elliptic curve")
    return found


def _certificate(folder: Path, key: ec.EllipticCurvePrivateKey) -> x509.Certificate | None:
    path = folder / CERTIFICATE
    if not path.exists():
        return None
    found = x509.load_pem_x509_certificate(path.read_bytes())
    return found if found.public_key() == key.public_key() else None


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _ends_at(certificate: x509.Certificate) -> float:
    return certificate.not_valid_after_utc.timestamp()
