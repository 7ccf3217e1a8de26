"""What can be limited, of whom. Pure values."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

WINDOW_S = 60.0


class Scope(StrEnum):
    TENANT = "tenant"
    KEY = "key"


class Kind(StrEnum):
    REQUESTS = "requests_per_min"
    TOKENS = "tokens_per_min"
    QUERIES = "concurrent_queries"
    MONTH = "tokens_per_month"

    @property
    def counts_tokens(self) -> bool:
        return self in (Kind.TOKENS, Kind.MONTH)

    @property
    def phrase(self) -> str:
        """As people say it, behind a number."""
        return _PHRASES[self]


_PHRASES = {
    Kind.REQUESTS: "requests per minute",
    Kind.TOKENS: "tokens per minute",
    Kind.QUERIES: "concurrent queries",
    Kind.MONTH: "tokens per month",
}


class LimitId(NamedTuple):
    """`subject` is a tenant's name, or the first id of a key: what replaces a key shares its quotas."""

    scope: Scope
    subject: str
    kind: Kind

    def __str__(self) -> str:
        return f"{self.scope.value} {self.subject!r}"


class WhenAway(StrEnum):
    """What happens to callers that have quotas once a lease has run out because the database is away."""

    HOLD = "hold"
    REFUSE = "refuse"


class Claim(NamedTuple):
    """What a replica says of its slice of one limit.

    It will never use more than `ceiling` within the limit's window, uses `used` now, and could use `want`.
    `period` is the month that it is of, 0 for what has no calendar.
    """

    ceiling: int
    used: int
    want: int
    period: int


class Grant(NamedTuple):
    """What is written down for it: `amount` is its own from now on. It should come down to `target` if that
    is less; `elsewhere` is in use at others.
    """

    amount: int
    target: int
    elsewhere: int
