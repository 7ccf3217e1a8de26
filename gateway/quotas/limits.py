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
        """Return an amount with its unit, as text for people."""
        if self is Kind.BUDGET:
            return f"{dollars(amount)} per month"
        return f"{amount:,} {_PHRASES[self]}"

    def counted(self, amount: float) -> int:
        """Convert an amount as people give it (dollars, for a budget) to counted units."""
        return round(amount * NANO_USD) if self is Kind.BUDGET else int(amount)

    def shown(self, amount: int) -> float:
        """Convert counted units to an amount for people (dollars, for a budget)."""
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
    """The key of a limit. `subject` is a tenant's name, or the first id of an API key, whose replacements
    share its quotas.
    """

    scope: Scope
    subject: str
    kind: Kind

    def __str__(self) -> str:
        return f"{self.scope.value} {self.subject!r}"


class WhenAway(StrEnum):
    """What happens to callers with quotas once a lease has expired because the database is unavailable."""

    HOLD = "hold"
    REFUSE = "refuse"


class Claim(NamedTuple):
    """The claim of a replica on its slice of one limit.

    `ceiling`: the most that the replica uses within the limit's window. `used`: its use now. `want`: what it
    could use. `period`: the month that is counted, 0 for kinds that are not monthly.
    """

    ceiling: int
    used: int
    want: int
    period: int


class Grant(NamedTuple):
    """A slice as granted in the database. The replica owns `amount` from now on, and should shrink to
    `target` if that is less. `elsewhere`: the use at other replicas.

    `reachable`: the largest slice that the replica could get if it wanted the whole limit, given the others'
    wants. `want` is stored with the slice: a want above `amount` requests the others to shrink.
    """

    amount: int
    target: int
    elsewhere: int
    reachable: int
    want: int = 0
