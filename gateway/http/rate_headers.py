"""Renders a caller's quotas as OpenAI's six rate limit headers, with durations as text."""

from __future__ import annotations

from collections.abc import Callable

from gateway.domain import Caller
from gateway.quotas.ledger import QuotaStatus
from gateway.quotas.limits import Kind

Header = tuple[bytes, bytes]
QuotaLookup = Callable[[Caller, Kind], QuotaStatus | None]

_PARTS = ("limit", "remaining", "reset")
_NAMES = {
    kind: tuple(f"x-ratelimit-{part}-{name}".encode() for part in _PARTS)
    for kind, name in ((Kind.REQUESTS, "requests"), (Kind.TOKENS, "tokens"))
}
RATE_HEADERS = tuple(each.decode() for names in zip(*_NAMES.values(), strict=True) for each in names)


def no_quota(caller: Caller, kind: Kind) -> QuotaStatus | None:
    return None


def rate_headers(caller: Caller, quota_status: QuotaLookup) -> list[Header]:
    """Render the caller's tightest quotas per minute; no headers without a quota."""
    headers: list[Header] = []
    for kind, (limit, remaining, reset) in _NAMES.items():
        quota = quota_status(caller, kind)
        if quota is not None:
            headers += [
                (limit, b"%d" % quota.limit),
                (remaining, b"%d" % quota.remaining),
                (reset, duration(quota.reset_s).encode()),
            ]
    return headers


def duration(seconds: float) -> str:
    """Render a duration as OpenAI does: 12ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    if seconds < 60:
        return f"{round(seconds, 3):g}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s"
