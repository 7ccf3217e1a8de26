"""Share one quota between replicas. Pure: every replica computes the same shares for itself.

Each replica holds a slice, and never has more in use within the quota's window than its slice. Slices add up
to the quota at most: a slice grows only by what is free, and shrinks only by what it does not use. So the
replicas together never use more than the quota, whatever each of them knows of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gateway.quotas.limits import Claim, Grant

STANDING_PARTS = 20
"""An idle replica wants this fraction (one part in so many) of its even share, so that a first query need not
wait.
"""


class Slice(NamedTuple):
    """The slice of a replica in the database. A replica that is not `alive` holds it and wants nothing."""

    replica: str
    amount: int
    used: int
    want: int
    alive: bool


def fair_shares(limit: int, wants: Mapping[str, int]) -> dict[str, int]:
    """Grant the wants, small ones first, as far as the limit goes; share the rest evenly."""
    shares: dict[str, int] = {}
    left, waiting = max(0, limit), sorted(wants, key=lambda name: (wants[name], name))
    for place, name in enumerate(waiting):
        shares[name] = min(max(0, wants[name]), left // (len(waiting) - place))
        left -= shares[name]
    for place, name in enumerate(waiting):
        part = left // (len(waiting) - place)
        shares[name] += part
        left -= part
    return shares


def granted(limit: int, me: str, claim: Claim, others: Sequence[Slice], alive: Sequence[str]) -> Grant:
    """Return the new slice of replica `me`, given those of all others. `alive`: the replicas that share."""
    wants = dict.fromkeys(alive, 0) | {each.replica: each.want for each in others if each.alive}
    lost = sum(each.amount for each in others if not each.alive)
    target = fair_shares(limit - lost, wants | {me: claim.want})[me]
    free = limit - sum(each.amount for each in others)
    amount = max(claim.ceiling, min(target, free))
    return Grant(amount, target, sum(each.used for each in others))
