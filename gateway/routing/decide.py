"""Filter, estimate, pick: one decision, with everything needed to explain it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from gateway.domain import Estimate, Site
from gateway.routing.candidates import Candidates, Choice, Policy
from gateway.routing.demand import Demand
from gateway.routing.estimate import estimates, sizes, told
from gateway.routing.filters import may, why_not
from gateway.routing.fleet import Fleet

MOST_TOLD = 16
"""Estimates kept with a decision: of so many sites at most, the cheapest, or the first to finish."""
MOST_EXCLUDED_TOLD = 64
NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


class Placement(NamedTuple):
    """Where a demand goes. `site` is None if every site was excluded; then `reason` says why."""

    site: Site | None
    reason: str
    estimates: tuple[Estimate, ...]
    excluded: dict[str, str]


def decide(
    demand: Demand,
    fleet: Fleet,
    policy: Policy,
    *,
    now_s: float,
    turn: int,
    avoid: Collection[str] = (),
    barred: Mapping[str, str] = NOTHING,
    toward: str | None = None,
    because: str = "",
    tell: bool = True,
) -> Placement:
    """`avoid`: sites that failed before; `barred`: others that can't, with why. `toward`: the site to take if
    it still can, and `because` is why. `tell`: keep what speaks for it.
    """
    at = fleet.figures
    candidates = Candidates(
        sites=fleet.sites,
        may=may(demand, fleet, at, now_s, [*avoid, *barred] if barred else avoid),
        at=at,
        estimates=estimates(sizes(demand), at, fleet.remaining),
        now_s=now_s,
    )
    excluded = _excluded(demand, candidates, now_s, avoid, barred)
    if not np.count_nonzero(candidates.may):
        return Placement(None, "no site can serve it: " + _list(excluded), (), excluded)
    wanted = fleet.place(toward) if toward is not None else None
    if wanted is not None and candidates.may[wanted]:
        choice = Choice(wanted, because)
    else:
        choice = policy(demand, candidates, turn)
    kept = _told(demand, candidates, choice, now_s) if tell else ()
    return Placement(fleet.sites[choice.place], choice.reason, kept, excluded)


def _told(demand: Demand, candidates: Candidates, choice: Choice, now_s: float) -> tuple[Estimate, ...]:
    places, found, cost = candidates.places, candidates.estimates, choice.cost
    if len(places) > MOST_TOLD:
        by = (found.finish_s if cost is None else cost)[places]
        best = places[np.argpartition(by, MOST_TOLD - 1)[: MOST_TOLD - 1]]
        places = np.union1d(best, [choice.place])
    sites = candidates.sites
    return tuple(told(sites[place], found, place, demand, now_s, cost=cost) for place in places.tolist())


def _excluded(
    demand: Demand, candidates: Candidates, now_s: float, avoid: Collection[str], barred: Mapping[str, str]
) -> dict[str, str]:
    if np.count_nonzero(candidates.may) == len(candidates.may):
        return {}
    out = [candidates.sites[place] for place in np.flatnonzero(~candidates.may)[:MOST_EXCLUDED_TOLD]]
    return {
        site.name: barred.get(site.name) or why_not(demand, site, now_s, avoid) or "excluded" for site in out
    }


def _list(excluded: dict[str, str]) -> str:
    return "; ".join(f"{site}: {reason}" for site, reason in sorted(excluded.items())) or "no site has joined"
