"""The kinds of quotas and their subjects. Pure values."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from gateway.prices import NANO_USD, dollars

WINDOW_S = 60.0


class Scope(StrEnum):
    TENANT = "tenant"
    KEY = "key"


class Kind(StrEnum):
    REQUESTS = "requests_per_min"
    TOKENS = "tokens_per_min"
    QUERIES = "concurrent_queries"
    MONTH = "tokens_per_month"
    BUDGET = "usd_per_month"  # counted in nano-dollars

    @property
    def unit(self) -> Unit:
        return _UNITS.get(self, Unit.QUERIES)

    @property
    def is_monthly(self) -> bool:
        return self in (Kind.MONTH, Kind.BUDGET)

    def phrase(self, amount: int) -> str:
        """Return an amount with its kind."""
        if self is Kind.BUDGET:
            return f"{dollars(amount)} per month"
        return f"{amount:,} {_PHRASES[self]}"

    def counted(self, amount: float) -> int:
        """Convert an amount of people, dollars of a budget, to what is counted."""
        return round(amount * NANO_USD) if self is Kind.BUDGET else int(amount)

    def shown(self, amount: int) -> float:
        """Convert what is counted to an amount for people."""
        return amount / NANO_USD if self is Kind.BUDGET else amount


class Unit(StrEnum):
    QUERIES = "queries"
    TOKENS = "tokens"
    NANO_USD = "nano-dollars"


_UNITS = {Kind.TOKENS: Unit.TOKENS, Kind.MONTH: Unit.TOKENS, Kind.BUDGET: Unit.NANO_USD}
_PHRASES = {
    Kind.REQUESTS: "requests per minute",
    Kind.TOKENS: "tokens per minute",
    Kind.QUERIES: "concurrent queries",
    Kind.MONTH: "tokens per month",
}


class LimitId(NamedTuple):
    """`subject` is a tenant's name, or the first id of a key: keys that replace it share its quotas."""

    scope: Scope
    subject: str
    kind: Kind

    def __str__(self) -> str:
        return f"{self.scope.value} {self.subject!r}"


class WhenAway(StrEnum):
    """Treatment of callers that have quotas once a lease has run out because the database is away."""

    HOLD = "hold"
    REFUSE = "refuse"


class Claim(NamedTuple):
    """The claim of a replica on its slice of one limit.

    It never uses more than `ceiling` within the limit's window, uses `used` now, and could use `want`.
    `period` is the month that is counted, 0 for a kind without a calendar.
    """

    ceiling: int
    used: int
    want: int
    period: int


class Grant(NamedTuple):
    """The slice in the database: the replica owns `amount` from now on, and should shrink to `target` if that
    is less. `elsewhere` is in use at other replicas.

    `reachable` is the largest slice that the replica could get if it wanted all of the limit, given what the
    others want. `want` is stored with the slice: more than `amount` asks the others to give up what they can.
    """

    amount: int
    target: int
    elsewhere: int
    reachable: int
    want: int = 0
