"""Identity of this site: a key that is made here and never leaves, and a certificate for it of a day's life.

The first certificate is requested with a join secret; each later one, at half the life of the last, with the
last. Links that are up stay up: the next link is the first to show a new certificate.
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
ENROL_TIMEOUT_S = 10.0
BACKOFF_FIRST_S, MAX_BACKOFF_S = 1.0, 300.0
LOOK_EVERY_S = 30.0
"""Timers do not count the time in which a machine is suspended, as the lives of certificates do."""

OpenChannel = Callable[[str, Any], Any]


@dataclass(frozen=True, slots=True)
class Enrolment:
    """Addresses that issue certificates: `first` by the join secret, each of `renewal` by a certificate.

    `ca` is the authority to trust, in PEM; None: the system's.
    """

    site: str
    first: str
    secret: str
    renewal: tuple[str, ...]
    ca: bytes | None


class Identity:
    """The key and certificate in a folder of this site alone. Raises ConfigError when it cannot be used."""

    def __init__(
        self,
        folder: Path,
        enrolment: Enrolment,
        open_channel: OpenChannel,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._enrolment = enrolment
        self._open_channel = open_channel
        self._unix_time = unix_time
        self._invalidated = asyncio.Event()
        self._stored_at = float("-inf")
        try:
            self._key = _key(folder)
            self._certificate = self._newest = _certificate(folder, self._key)
        except (OSError, ValueError) as exc:
            raise ConfigError(f"identity: {folder} can't be used: {exc}") from exc

    @property
    def is_valid(self) -> bool:
        """True if there is a certificate that has not expired."""
        return self._certificate is not None and self._unix_time() < _ends_at(self._certificate)

    @property
    def due_s(self) -> float:
        """Seconds until a new certificate is due: 0 when there is none, else until half of its life."""
        if self._certificate is None or not self.is_valid:
            return 0.0
        begins_at = self._certificate.not_valid_before_utc.timestamp()
        return max(0.0, (begins_at + _ends_at(self._certificate)) / 2 - self._unix_time())

    def credentials(self) -> Any:
        """Return gRPC credentials for a link. Raises LinkLost while there is no certificate."""
        self._take_up()
        if self._certificate is None or not self.is_valid:
            raise LinkLost("this site has no certificate yet")
        shown = self._certificate.public_bytes(serialization.Encoding.PEM)
        return grpc.ssl_channel_credentials(self._enrolment.ca, _pem(self._key), shown)

    def _take_up(self) -> None:
        """Use a newer certificate that `mico pki renew` has stored beside this process."""
        with suppress(OSError, ValueError):
            found = _certificate(self._folder, self._key)
            if found and (not self._newest or self._newest.not_valid_before_utc < found.not_valid_before_utc):
                self._certificate = self._newest = found
                self._stored_at = self._unix_time()

    def invalidate(self) -> None:
        """Drop a certificate that a gateway refuses; only a join secret gets another.

        Keep one that was issued just now, which is not at fault: another would be refused as well.
        """
        if self._unix_time() - self._stored_at > MAX_BACKOFF_S:
            self._certificate = None
            self._invalidated.set()

    async def renew_forever(self) -> None:
        """Renew the certificate in time, while the site runs; back off after failures."""
        backoff_s = BACKOFF_FIRST_S
        while True:
            while (due_s := self.due_s) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(due_s, LOOK_EVERY_S)):
                        await self._invalidated.wait()
                self._invalidated.clear()
            try:
                await self.renew()
                if self.due_s > 0:
                    backoff_s = BACKOFF_FIRST_S
                    continue
                log.error("by this machine's clock the new certificate is due already: the clock is wrong")
            except LinkLost as exc:
                log.error("no certificate: %s", exc)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(MAX_BACKOFF_S, 2 * backoff_s)

    async def renew(self) -> None:
        """Get a new certificate. Raises LinkLost, and keeps the old one, if no address issues one."""
        reasons = []
        if self.is_valid:
            for address in self._enrolment.renewal:
                try:
                    return self._store(await self._enrol(address, self.credentials(), ""))
                except LinkLost as exc:
                    reasons.append(f"{address}: {exc}")
        if self._enrolment.secret:
            trust = grpc.ssl_channel_credentials(self._enrolment.ca)
            try:
                return self._store(await self._enrol(self._enrolment.first, trust, self._enrolment.secret))
            except LinkLost as exc:
                reasons.append(f"{self._enrolment.first}: {exc}")
        raise LinkLost(
            "; ".join(reasons) or "set join_secret or join_secret_file: `mico pki invite` makes one"
        )

    async def _enrol(self, address: str, credentials: Any, secret: str) -> bytes:
        metadata = (("authorization", f"Bearer {secret}"),) if secret else ()
        channel = self._open_channel(address, credentials)
        try:
            async with asyncio.timeout(ENROL_TIMEOUT_S):
                enrol = rpc.FederationStub(channel).Enrol  # type: ignore[no-untyped-call]
                answer = await enrol(pb.EnrolRequest(csr=self._signing_request()), metadata=metadata)
        except TimeoutError as exc:
            raise LinkLost(f"no answer within {ENROL_TIMEOUT_S:g} s") from exc
        except grpc.RpcError as exc:
            raise LinkLost(f"{exc.code().name}, {exc.details()}") from exc
        finally:
            await channel.close()
        certificate: bytes = answer.certificate
        return certificate

    def _signing_request(self) -> bytes:
        at_most_64 = self._enrolment.site.encode()[:64]  # bytes of a common name
        shown = at_most_64.decode(errors="ignore")
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, shown)])
        csr = x509.CertificateSigningRequestBuilder().subject_name(name).sign(self._key, hashes.SHA256())
        return csr.public_bytes(serialization.Encoding.PEM)

    def _store(self, pem: bytes) -> None:
        """Use and store a certificate. Raises LinkLost if it is not for our key."""
        try:
            certificate = x509.load_pem_x509_certificate(pem)
        except ValueError as exc:
            raise LinkLost(f"what came is no certificate: {exc}") from exc
        if certificate.public_key() != self._key.public_key():
            raise LinkLost("the certificate is for another key")
        self._certificate = self._newest = certificate
        self._stored_at = self._unix_time()
        log.info("this site has a certificate until %s", certificate.not_valid_after_utc.isoformat())
        draft = self._folder / f"{CERTIFICATE}.new"
        try:
            draft.write_bytes(pem)
            draft.replace(self._folder / CERTIFICATE)
        except OSError as exc:  # in use already; a full disk must not end the process
            log.error("the certificate could not be written down, so a restart will ask for one: %s", exc)


def _key(folder: Path) -> ec.EllipticCurvePrivateKey:
    """Load the key; make it at the first start, readable by its owner only."""
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
