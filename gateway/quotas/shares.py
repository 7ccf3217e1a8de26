"""Share one quota between replicas. Pure: every replica computes the same shares for itself.

Each replica holds a slice, and never uses more than its slice within the quota's window. The sum of the
slices is at most the quota: a slice grows only by free amounts, and shrinks only by what it does not use. So
the replicas together never exceed the quota, whatever each of them knows of the others.

Most of the unused quota is free, that is, in no slice. So a replica that needs more gets it after one round
of its own, and a replica that dies withholds little from the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gateway.quotas.limits import Claim, Grant

STANDING_PARTS = 20
"""A replica gets 1/STANDING_PARTS of its even share beyond its want, whatever the others want."""
SPARE_PARTS = 16
"""A slice gets up to 1/SPARE_PARTS of the limit from the free amount, so that most queries fit at once."""


class Slice(NamedTuple):
    """The slice of a replica in the database. A replica that is not `alive` keeps it but wants nothing."""

    replica: str
    amount: int
    used: int
    want: int
    alive: bool


def fair_shares(limit: int, wants: Mapping[str, int]) -> dict[str, int]:
    """Return the max-min fair shares of a limit: wants are granted in full, smallest first, until the rest is
    shared evenly.
    """
    shares: dict[str, int] = {}
    left, waiting = max(0, limit), sorted(wants, key=lambda name: (wants[name], name))
    for place, name in enumerate(waiting):
        shares[name] = min(max(0, wants[name]), left // (len(waiting) - place))
        left -= shares[name]
    return shares


def granted(limit: int, me: str, claim: Claim, others: Sequence[Slice], alive: Sequence[str]) -> Grant:
    """Return the new slice of replica `me`, given the slices of all others. `alive`: the live replicas."""
    wants = dict.fromkeys([me, *alive], 0) | {each.replica: each.want for each in others if each.alive}
    standing = limit // (STANDING_PARTS * len(wants))
    wants = {name: want + standing for name, want in wants.items()}
    shared = limit - sum(each.amount for each in others if not each.alive)
    shares = fair_shares(shared, wants | {me: claim.want + standing})
    rest = max(0, shared - sum(shares.values()))
    spare = rest if len(shares) == 1 else min(-(-rest // len(shares)), -(-limit // SPARE_PARTS))
    target = shares[me] + spare
    free = limit - sum(each.amount for each in others)
    amount = max(claim.ceiling, min(target, free))
    elsewhere = sum(each.used for each in others)
    reachable = min(fair_shares(shared, wants | {me: limit})[me], limit - elsewhere)
    return Grant(
        amount, target, elsewhere, reachable, max(claim.want, shares[me] if amount < shares[me] else 0)
    )
