"""Issue the certificate of a gateway's own listeners from its authority."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

from gateway.security.pki.authority import SERVER_LIFE, Authority
from gateway.security.tls import CertKeyPair


class SelfIssuedCertificate:
    """A certificate that the gateway issues to itself, renewed at half its lifetime."""

    def __init__(
        self, authority: Authority, names: tuple[str, ...], unix_time: Callable[[], float] = time.time
    ) -> None:
        self._authority = authority
        self._names = names
        self._unix_time = unix_time
        self._pair: CertKeyPair | None = None
        self._due_at = 0.0

    def pair(self) -> CertKeyPair:
        """Return the current certificate. Issue a new one first if it is due."""
        now = self._unix_time()
        if self._pair is None or now >= self._due_at:
            self._pair = self._authority.issue_server(self._names, datetime.fromtimestamp(now, UTC))
            self._due_at = now + SERVER_LIFE.total_seconds() / 2
        return self._pair
