"""Share one quota between replicas. Pure: every replica computes the same shares for itself.

Each replica holds a slice, and never has more in use within the quota's window than its slice. Slices add up
to the quota at most: a slice grows only by what is free, and shrinks only by what it does not use. So the
replicas together never use more than the quota, whatever each of them knows of the others.

What nobody uses is mostly free, in no slice: a replica that needs more has it after one round of its own, and
one that dies keeps little from the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gateway.quotas.limits import Claim, Grant

STANDING_PARTS = 20
"""A replica gets this part (one in so many) of its even share beyond what it wants, whatever others want."""
SPARE_PARTS = 16
"""Of what is free, a slice has up to this part of the limit more: most queries find room at once."""


class Slice(NamedTuple):
    """The slice of a replica in the database. A replica that is not `alive` holds it and wants nothing."""

    replica: str
    amount: int
    used: int
    want: int
    alive: bool


def fair_shares(limit: int, wants: Mapping[str, int]) -> dict[str, int]:
    """Grant the wants, small ones first, as far as the limit goes."""
    shares: dict[str, int] = {}
    left, waiting = max(0, limit), sorted(wants, key=lambda name: (wants[name], name))
    for place, name in enumerate(waiting):
        shares[name] = min(max(0, wants[name]), left // (len(waiting) - place))
        left -= shares[name]
    return shares


def granted(limit: int, me: str, claim: Claim, others: Sequence[Slice], alive: Sequence[str]) -> Grant:
    """Return the new slice of replica `me`, given those of all others. `alive`: the replicas that share."""
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
