"""Filter, estimate, pick: one decision, with everything needed to explain it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from gateway.domain import Estimate, Site
from gateway.routing.demand import Candidate, Demand, Policy
from gateway.routing.estimate import estimate
from gateway.routing.filters import why_not


class Placement(NamedTuple):
    """Where a demand goes. `site` is None if every site was excluded; then `reason` says why."""

    site: Site | None
    reason: str
    estimates: tuple[Estimate, ...]
    excluded: dict[str, str]


def decide(
    demand: Demand,
    sites: Iterable[Site],
    policy: Policy,
    *,
    now_s: float,
    turn: int,
    avoid: Collection[str] = (),
    toward: str | None = None,
) -> Placement:
    candidates: list[Candidate] = []
    excluded: dict[str, str] = {}
    for site in sites:
        reason = why_not(demand, site, now_s, avoid)
        if reason is None:
            candidates.append(Candidate(site, estimate(demand, site, now_s)))
        else:
            excluded[site.name] = reason
    estimates = tuple(c.estimate for c in candidates)
    if not candidates:
        return Placement(None, "no site can serve it: " + _list(excluded), estimates, excluded)
    for site, _ in candidates:
        if site.name == toward:
            return Placement(site, f"offloaded: {toward} was idle and bid for it", estimates, excluded)
    chosen, reason = policy(demand, candidates, turn)
    return Placement(chosen.site, reason, estimates, excluded)


def _list(excluded: dict[str, str]) -> str:
    return "; ".join(f"{site}: {reason}" for site, reason in sorted(excluded.items())) or "no site has joined"
