"""Authenticate sites, by a site token or by a certificate of the gateway's authority.

A token proves only that a site belongs to this federation; a certificate also proves which one, and can be
revoked.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

import grpc

from gateway.security.login_limiter import LoginLimiter
from gateway.security.pki import invitation
from gateway.security.pki.authority import Authority, PkiError, SiteCertificate, read_site
from gateway.security.pki.invitation import Invitation
from gateway.store.errors import StoreUnavailable

log = logging.getLogger(__name__)


class Refusal(Exception):
    """Ends a call with a gRPC status. The reason appears in the site's log."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Register(Protocol):
    """The register of issued and revoked certificates. The first three methods read memory only."""

    def has(self, site: str) -> bool: ...
    def revoked_until(self, site: str) -> float: ...
    def expires_at(self, site: str) -> float: ...
    async def refresh(self) -> None: ...
    async def record_issued(
        self, site: str, *, serial: str, issued_at: float, expires_at: float, renewal: bool
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Certificates:
    authority: Authority
    register: Register
    unix_time: Callable[[], float] = time.time

    def invalid_reason(self, shown: SiteCertificate) -> str | None:
        """Return the reason why a certificate is no longer valid, None if it is valid. An expired certificate
        is valid while a renewed one exists, so that a link outlives the certificate that it began with.
        """
        if shown.issued_at <= self.register.revoked_until(shown.site):
            return "its certificate was revoked"
        if max(shown.expires_at, self.register.expires_at(shown.site)) < self.unix_time():
            return "its certificate has expired and was not renewed"
        return None

    def invited(self, secret: str) -> Invitation:
        """Verify a join secret, and return its invitation. Raises PkiError if wrong, expired or revoked."""
        found = invitation.verify(secret, self.authority.secret(invitation.PURPOSE), self.unix_time())
        self._check(found, found.site)
        return found

    def named(self, asker: SiteCertificate | Invitation, csr: bytes) -> str:
        """Return the name of the site that requests a certificate. For the invitation of a pool, the
        machine's name is that in the CSR. Raises PkiError if the name is invalid or revoked.
        """
        if isinstance(asker, SiteCertificate):
            return asker.site
        site = invitation.resolve_name(asker.site, self.authority.requested_name(csr))
        self._check(asker, site)
        return site

    def _check(self, invited: Invitation, site: str) -> None:
        if invited.issued_at <= self.register.revoked_until(site):
            raise PkiError("the join secret was revoked: `mico pki invite` makes a new one")

    async def issue(self, site: str, csr: bytes, *, renewal: bool) -> bytes:
        """Issue a certificate, dated after any revocation. Raises PkiError and StoreUnavailable."""
        now = max(self.unix_time(), self.register.revoked_until(site) + 1.0)  # revoked by a clock ahead
        issued = self.authority.issue_site(site, csr, datetime.fromtimestamp(now, UTC))
        _, serial, issued_at, expires_at = issued.certificate
        await self.register.record_issued(
            site, serial=serial, issued_at=issued_at, expires_at=expires_at, renewal=renewal
        )
        return issued.pem


@dataclass(slots=True)
class SiteAuth:
    """Authenticates each call before any of its messages is read."""

    tokens: tuple[str, ...]
    certificates: Certificates | None = None
    login_limiter: LoginLimiter = field(default_factory=LoginLimiter)

    def identify(self, context: Any) -> SiteCertificate | None:
        """Return the certificate of the calling site, None if it has a token instead. Raises Refusal."""
        shown = self._certificate(context)
        if shown is None and not self._has_token(context):
            raise self._failed(context, "the site token is missing or wrong")
        return shown

    def invalid_reason(self, shown: SiteCertificate | None) -> str | None:
        if shown is None or self.certificates is None:
            return None
        return self.certificates.invalid_reason(shown)

    def check_name(self, site: str, shown: SiteCertificate | None) -> None:
        """Raise Refusal if the site may not use the name. A certificate is valid for its own name only, and a
        token for any name for which no certificate was ever issued.
        """
        if shown is not None and shown.site != site:
            reason = f"the certificate is that of site {shown.site}, not of {site}"
            raise Refusal(grpc.StatusCode.PERMISSION_DENIED, reason)
        if shown is None and self.certificates is not None and self.certificates.register.has(site):
            log.warning("somebody with a site token calls itself site %s, which has a certificate", site)
            reason = f"site {site} has a certificate: join with it, or give this process a name of its own"
            raise Refusal(grpc.StatusCode.PERMISSION_DENIED, reason)

    async def enrol(self, context: Any, csr: Callable[[], Any]) -> bytes:
        """Issue a certificate to a caller with a valid certificate or join secret. Raises Refusal."""
        if self.certificates is None:
            raise Refusal(grpc.StatusCode.UNIMPLEMENTED, "this gateway issues no certificates: set pki")
        self._asker(context, self.certificates)
        try:
            request = await csr()
            await self.certificates.register.refresh()  # to refuse a site that was revoked elsewhere
            asker = self._asker(context, self.certificates)
            renewal = isinstance(asker, SiteCertificate)
            site = self.certificates.named(asker, request)
            pem = await self.certificates.issue(site, request, renewal=renewal)
            self.certificates.named(self._asker(context, self.certificates), request)  # revoked meanwhile?
        except PkiError as exc:
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, str(exc)) from exc
        except StoreUnavailable as exc:
            raise Refusal(grpc.StatusCode.UNAVAILABLE, f"the database is away: {exc}") from exc
        log.info("site %s %s certificate", site, "renewed its" if renewal else "was issued its first")
        return pem

    def _asker(self, context: Any, certificates: Certificates) -> SiteCertificate | Invitation:
        """Return the caller's certificate, or else its invitation. Raises Refusal if it has neither."""
        try:
            return self._certificate(context) or certificates.invited(_bearer(context))
        except PkiError as exc:
            raise self._failed(context, str(exc)) from exc

    def _certificate(self, context: Any) -> SiteCertificate | None:
        """Return the certificate verified by TLS, None on the port for tokens. Raises Refusal if invalid."""
        pem = next(iter(context.auth_context().get("x509_pem_cert", ())), None)
        if pem is None:
            return None
        try:
            shown = read_site(pem)
        except PkiError as exc:
            raise self._failed(context, str(exc)) from exc
        if invalid_reason := self.invalid_reason(shown):
            raise self._failed(context, f"{shown.site}: {invalid_reason}")
        return shown

    def _has_token(self, context: Any) -> bool:
        given = _bearer(context).encode()
        matches = [hmac.compare_digest(given, token.encode()) for token in self.tokens]
        return any(matches)  # all tokens are compared, so that timing reveals nothing

    def _failed(self, context: Any, reason: str) -> Refusal:
        address = host(context.peer())
        if self.login_limiter.wait_s(address):
            return Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many failed attempts; try again later")
        self.login_limiter.record_failure(address)
        log.warning("somebody at %s was turned away: %s", address, reason)
        return Refusal(grpc.StatusCode.UNAUTHENTICATED, reason)


def host(peer: str) -> str:
    """Return `ipv4:1.2.3.4:567` or `ipv6:[::1]:567` without the port."""
    return peer.rpartition(":")[0]


def _bearer(context: Any) -> str:
    metadata: Mapping[str, Any] = dict(context.invocation_metadata())
    return str(metadata.get("authorization", "")).removeprefix("Bearer ")
