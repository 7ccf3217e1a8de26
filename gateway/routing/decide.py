"""Decide on a site: filter, estimate, pick. Keeps everything needed to explain the decision."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import ceil
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gateway.decision import Estimate
from gateway.domain import Lane, ModelState, Site
from gateway.prices import MAX_NANO_USD, NANO_USD
from gateway.routing.candidates import Candidates, Choice, Policy
from gateway.routing.demand import Demand
from gateway.routing.estimate import Estimates, estimates, estimates_at, price_usd, sizes
from gateway.routing.filters import allowed_sites, why_not
from gateway.routing.fleet import Figures, Fleet
from gateway.routing.policies import REPORTS_EVERY_S

MAX_ESTIMATES = 16
"""The number of sites whose estimates are kept with a decision: the least costly, or first to finish."""
MAX_EXCLUSIONS = 64
"""The number of excluded sites whose reasons are kept with a decision."""
MIN_DRAWN = 4
DRAWN_TIMES = 2.0
"""With several gateways, each compares DRAWN_TIMES its share of the candidates, and at least MIN_DRAWN.
Measured: docs/decisions/many-gateways.md.
"""
XXH_PRIMES = np.uint32(2654435761), np.uint32(2246822519)
"""The multipliers of xxHash32, which spread consecutive numbers evenly."""
NOT_HEARD = "has not reported lately, and a try elsewhere failed"
ASLEEP = "the model sleeps there, and is awake or waking elsewhere"
NO_EXCLUSIONS: Final[Mapping[str, str]] = MappingProxyType({})


class Placement(NamedTuple):
    """The chosen site and the reason. If every site is excluded, `site` is None and `reason` explains it."""

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
    tried: Collection[str] = (),
    is_retry: bool = False,
    excluded: Mapping[str, str] = NO_EXCLUSIONS,
    preferred_site: str | None = None,
    preference_reason: str = "",
    keep_estimates: bool = True,
    gateways: int = 1,
) -> Placement:
    """Choose the site for one demand.

    `tried`: sites that failed this query before and are not used again. `is_retry`: the query has failed
    before, so sites that may be lost, too, are avoided. `excluded`: the reasons to exclude further sites.
    `preferred_site` is chosen if it can serve the demand, with `preference_reason` as the reason. For a batch
    line, the policy chooses between it and sites with a free slot that have more of the prompt cached.
    `turn` counts decisions and seeds draws. `keep_estimates`: keep the estimates of the best sites.
    `gateways`: the number of gateways that decide by the same reports.
    """
    at = fleet.figures
    allowed = allowed_sites(demand, fleet, at, now_s, [*tried, *excluded] if excluded else tried)
    if is_retry:
        allowed = _reported_lately(allowed, at, now_s)
    found = _with_waking(estimates(sizes(demand, fleet), at, fleet.remaining), demand.model, fleet)
    candidates = Candidates(fleet.sites, allowed, allowed.nonzero()[0], at, found, now_s)
    count = len(candidates.places)
    everywhere = count == len(fleet.sites)
    reasons = {} if everywhere else _exclusion_reasons(demand, candidates, now_s, tried, excluded)
    if not count:
        listed = "; ".join(f"{site}: {reason}" for site, reason in sorted(reasons.items()))
        return Placement(None, f"no site can serve it: {listed or 'no site has joined'}", (), reasons)
    preferred = fleet.place(preferred_site) if preferred_site is not None else None
    if preferred is None or not candidates.allowed[preferred]:
        drawn = _drawn(demand, candidates, fleet, gateways, turn) if gateways > 1 else candidates
        choice = policy(demand, drawn, turn)
    elif (narrowed := _with_more_cached(demand, candidates, fleet, preferred)) is not None:
        choice = policy(demand, narrowed, turn)
    else:
        choice = Choice(preferred, preference_reason)
    estimated = _best_estimates(demand, candidates, choice, now_s) if keep_estimates else ()
    return Placement(fleet.sites[choice.place], choice.reason, estimated, reasons)


def _drawn(demand: Demand, candidates: Candidates, fleet: Fleet, gateways: int, turn: int) -> Candidates:
    """Return the candidates that one of many gateways compares: a random subset, seeded by `turn`, and the
    sites that have a part of the prompt cached.

    Without the draw, all gateways would choose the same few sites until the next reports.
    """
    allowed = candidates.allowed
    count = len(candidates.places)
    keep = max(MIN_DRAWN, ceil(DRAWN_TIMES * count / gateways))
    if keep >= count:
        return candidates
    mixed = (np.arange(len(allowed), dtype=np.uint32) + np.uint32(turn & 0xFFFFFFFF)) * XXH_PRIMES[0]
    mixed ^= mixed >> np.uint32(15)
    mixed *= XXH_PRIMES[1]
    mixed ^= mixed >> np.uint32(13)
    drawn: NDArray[np.bool_] = allowed & (mixed < np.uint32(keep / count * 2**32))
    for site in demand.cached.by_site:
        if (place := fleet.place(site)) is not None:
            drawn[place] = allowed[place]
    return candidates.narrowed(drawn) if np.count_nonzero(drawn) else candidates


def _with_more_cached(
    demand: Demand, candidates: Candidates, fleet: Fleet, preferred: int
) -> Candidates | None:
    """Return the preferred site of a batch line and the sites with a free slot that have more of the prompt
    cached. Return None if there is no such site, or if the demand is not a batch line.
    """
    if demand.lane is not Lane.BATCH or not demand.cached.by_site:
        return None
    at, least = candidates.at, demand.cached.at(candidates.sites[preferred].name)
    kept = np.zeros(len(candidates.allowed), dtype=bool)
    for site, tokens in demand.cached.by_site.items():
        place = fleet.place(site)
        if place is not None and tokens > least and at.requests[place] < at.slots[place]:
            kept[place] = candidates.allowed[place]
    if not np.count_nonzero(kept):
        return None
    kept[preferred] = True
    return candidates.narrowed(kept)


def _reported_lately(allowed: NDArray[np.bool_], at: Figures, now_s: float) -> NDArray[np.bool_]:
    """Return the allowed sites that reported within REPORTS_EVERY_S, or all of them if none did.

    For a query whose site failed. Many sites may have been lost at the same time without being known as lost
    yet, and trying them one after another would use up the query's tries. A site that may report less often
    (`quiet_s`) is excluded as well, as it can't be told from a lost one.
    """
    lately: NDArray[np.bool_] = allowed & (at.received_s >= now_s - REPORTS_EVERY_S)
    return lately if np.count_nonzero(lately) else allowed


def _with_waking(found: Estimates, model: str, fleet: Fleet) -> Estimates:
    """Add the model's wake time, in seconds, to the estimates of sites where it sleeps or wakes."""
    if not (asleep := fleet.asleep(model)):
        return found
    wake_s = np.zeros(len(fleet.sites))
    for name, there in asleep.items():
        wake_s[fleet.place(name)] = there.wake_s
    return found._replace(
        wait_s=found.wait_s + wake_s,
        first_token_s=found.first_token_s + wake_s,
        finish_s=found.finish_s + wake_s,
    )


def most_nano_usd(demand: Demand, fleet: Fleet, now_s: float, response_tokens: int) -> int:
    """Return the cost, in nano-dollars, of an answer of `response_tokens` at the most expensive site that can
    serve the demand now. No prompt tokens count as cached.
    """
    at = fleet.figures
    size = sizes(demand, fleet)._replace(response_tokens=response_tokens, cached_tokens=0.0)
    usd = price_usd(size, at).max(where=allowed_sites(demand, fleet, at, now_s), initial=0.0)
    return min(MAX_NANO_USD, round(NANO_USD * float(usd)))


def _best_estimates(
    demand: Demand, candidates: Candidates, choice: Choice, now_s: float
) -> tuple[Estimate, ...]:
    found, cost, sites = candidates.estimates, choice.cost, candidates.sites
    if len(candidates.places) > MAX_ESTIMATES:
        by = np.where(candidates.allowed, found.finish_s if cost is None else cost, np.inf)
        best = np.argpartition(by, MAX_ESTIMATES - 1)[: MAX_ESTIMATES - 1]
        places = np.array(sorted({*best.tolist(), choice.place}))
    else:
        places = candidates.places
    return estimates_at(places, sites, found, demand, now_s, cost=cost)


def _exclusion_reasons(
    demand: Demand, candidates: Candidates, now_s: float, tried: Collection[str], excluded: Mapping[str, str]
) -> dict[str, str]:
    places = np.flatnonzero(~candidates.allowed)
    if len(places) > MAX_EXCLUSIONS:  # keep those that reported last; many others are gone permanently
        places = places[np.argsort(-candidates.at.received_s[places], kind="stable")[:MAX_EXCLUSIONS]]
    out = [candidates.sites[place] for place in places]
    return {
        site.name: excluded.get(site.name)
        or why_not(demand, site, now_s, tried)
        or (NOT_HEARD if site.identity.models[demand.model].state is ModelState.READY else ASLEEP)
        for site in out
    }
