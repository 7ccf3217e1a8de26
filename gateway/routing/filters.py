"""Select the sites that can serve a demand, and explain why the others can't."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from gateway.domain import LoadReport, ModelState, Site, SiteState
from gateway.prices import NANO_USD, prices_of
from gateway.routing.demand import Demand
from gateway.routing.fleet import Figures, Fleet, least

STALE_AFTER_S = 3.0
"""Three missed reports, as sites report at least once a second in a small fleet."""


def allowed_sites(
    demand: Demand, fleet: Fleet, at: Figures, now_s: float, tried: Collection[str] = ()
) -> NDArray[np.bool_]:
    """Return a mask `[sites]` of the sites for which `why_not` returns None.

    Of these, only the sites with the best state of the model remain: awake, else waking, else asleep.
    """
    serving = fleet.serving(demand.model, demand.needs, demand.regions)
    fresh_s = now_s - STALE_AFTER_S
    found = serving.copy() if least(at.quiet_until_s) >= fresh_s else serving & (at.quiet_until_s >= fresh_s)
    for name in tried:
        place = fleet.place(name)
        if place is not None:
            found[place] = False
    if demand.limits is not None:
        for place in np.flatnonzero(found).tolist():
            found[place] = beyond_limits(demand, fleet.sites[place]) is None
    if asleep := fleet.asleep(demand.model):
        _leave_asleep(found, {fleet.place(name): model.state for name, model in asleep.items()})
    return found


def _leave_asleep(found: NDArray[np.bool_], asleep: Mapping[int | None, ModelState]) -> None:
    """Keep only the places with the best state of the model, in the order of ModelState. `asleep`: the state
    at the places where the model is not ready.
    """
    states = {place: asleep.get(place, ModelState.READY) for place in np.flatnonzero(found).tolist()}
    best = next((state for state in ModelState if state in states.values()), None)
    for place, state in states.items():
        found[place] = state is best


def why_not(demand: Demand, site: Site, now_s: float, tried: Collection[str] = ()) -> str | None:
    """Return the reason why a site can't take the demand, None if it can. `tried`: sites that failed the
    query before.
    """
    if site.name in tried:
        return "failed this query before"
    if site.state is not SiteState.READY:
        return site.state.value
    if site.weight <= 0:
        return "weight 0"
    if is_stale(site.load, now_s):
        return f"load report {now_s - site.load.received_s:.1f} s old"
    return _model_why_not(demand, site)


def is_stale(load: LoadReport, now_s: float) -> bool:
    return now_s - load.received_s > STALE_AFTER_S + load.quiet_s


def _model_why_not(demand: Demand, site: Site) -> str | None:
    model = site.identity.models.get(demand.model)
    if model is None:
        return "does not serve the model"
    if demand.regions is not None and site.identity.region not in demand.regions:
        return f"this key may not use region {site.identity.region}"
    if demand.model in site.pinned_off:
        return "model pinned off by an operator"
    if not demand.needs <= model.features:
        return "lacks " + ", ".join(sorted(demand.needs - model.features))
    return beyond_limits(demand, site)


def beyond_limits(demand: Demand, site: Site) -> str | None:
    """Return the reason why the request's own limits rule the site out, None if they do not."""
    limits, identity = demand.limits, site.identity
    if limits is None:
        return None
    if limits.regions is not None and identity.region not in limits.regions:
        return f"is in {identity.region}"
    if limits.sites is not None and site.name not in limits.sites:
        return "is another site"
    if limits.max_usd is None:
        return None
    cached_tokens = round(demand.cached.at(site.name))
    nano_usd = prices_of(identity, site.load).nano_usd(
        demand.prompt_tokens, cached_tokens, round(demand.response_tokens)
    )
    usd = nano_usd / NANO_USD
    return f"is expected to cost {usd:.2g} USD" if usd > limits.max_usd else None
