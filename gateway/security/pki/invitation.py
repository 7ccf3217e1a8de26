"""Sign and verify join secrets: a site's name and two dates with a keyed hash. None are stored.

A secret may be reused while it is valid, so that a replacement machine can join. A name that ends in `*` is
for identical machines of a cloud, each of which gives its own name in its request.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import NamedTuple

from gateway.security.pki.authority import PkiError

PREFIX = "mico-join-"
PURPOSE = b"invitation"


class Invitation(NamedTuple):
    """Content of a join secret. Unix times in whole seconds."""

    site: str
    issued_at: int
    expires_at: int


def resolve_name(invited: str, wanted: str) -> str:
    """Return the name for the certificate. Raises PkiError when the secret does not cover it."""
    if not invited.endswith("*"):
        return invited
    begins_so = wanted.startswith(invited[:-1]) and len(wanted) >= len(invited)
    if not begins_so or "*" in wanted or not wanted.isprintable():
        raise PkiError(f"the join secret is for sites {invited}, not for {wanted!r}")
    return wanted


def sign(invitation: Invitation, key: bytes) -> str:
    """Return the join secret of an invitation."""
    claim = f"{invitation.issued_at} {invitation.expires_at} {invitation.site}".encode()
    return PREFIX + base64.urlsafe_b64encode(_signature(claim, key) + claim).decode().rstrip("=")


def verify(secret: str, key: bytes, now: float) -> Invitation:
    """Verify a join secret and return its content. Raises PkiError, which never contains the secret."""
    body = secret.removeprefix(PREFIX)
    try:
        raw = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
    except ValueError:
        raw = b""
    signature, claim = raw[:32], raw[32:]
    if not hmac.compare_digest(signature, _signature(claim, key)) or not secret.startswith(PREFIX):
        raise PkiError("the join secret is missing or wrong")
    issued_at, expires_at, site = claim.decode().split(" ", 2)
    invitation = Invitation(site, int(issued_at), int(expires_at))
    if now >= invitation.expires_at:
        raise PkiError("the join secret is no longer valid: `mico pki invite` makes a new one")
    return invitation


def _signature(claim: bytes, key: bytes) -> bytes:
    return hmac.new(key, claim, hashlib.sha256).digest()
