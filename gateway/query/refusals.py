"""Find the sites ruled out for a query by context length, weights, regions, features or its own limits."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gateway.domain import Caller, Lane, Query, Site, SiteIdentity, SiteState
from gateway.errors import BadRequest, Forbidden, MicoError
from gateway.failure import AttemptFailure, FailureCause
from gateway.routing.demand import Demand
from gateway.routing.failover import same_weights
from gateway.routing.filters import beyond_limits, is_stale

AWAY = (SiteState.DOWN, SiteState.STALE)
"""States of sites that may return soon. A joining site is stale until its first report arrives."""
MAX_AWAY_S = {Lane.INTERACTIVE: 600.0, Lane.BATCH: 3_600.0}
"""A site whose last report is older is not waited for: it is still listed, but may be gone permanently."""


def refusal_of(
    query: Query, demand: Demand, needs: frozenset[str], sites: Sequence[Site], now_s: float
) -> MicoError | None:
    """Return the error for a query that none of its model's sites can ever take, None if one may.

    `needs`: the features that a site must have to begin the answer.
    """
    return (
        region_error(query.caller, query.model, sites)
        or _limits_error(demand, sites)
        or _inability_error(query, needs, sites, now_s)
    )


def may_come_back(query: Query, tried: Collection[str], sites: Sequence[Site], now_s: float) -> bool:
    """Return whether an untried site that is down or stale now may serve the query."""
    return any(
        (each.state in AWAY or (each.state is SiteState.READY and is_stale(each.load, now_s)))
        for each in _heard_of(query, sites, now_s)
        if each.name not in tried
    )


def able_is_away(
    query: Query, failure: AttemptFailure, limit_tokens: int, sites: Sequence[Site], now_s: float
) -> bool:
    """Return whether another site, which takes no work now but may later, may have the ability that `failure`
    says its site lacks: for CONTEXT_LENGTH, a context of more than `limit_tokens`.
    """
    longer_than = limit_tokens if failure.cause is FailureCause.CONTEXT_LENGTH else -1
    return any(
        site.identity.models[query.model].context_tokens > longer_than
        for site in _heard_of(query, sites, now_s)
        if site.name != failure.site and (site.state is not SiteState.READY or is_stale(site.load, now_s))
    )


def _heard_of(query: Query, sites: Sequence[Site], now_s: float) -> list[Site]:
    """Return the sites that serve the query's model in its key's regions and reported within MAX_AWAY_S."""
    since_s, regions = now_s - MAX_AWAY_S[query.lane], query.caller.regions
    serving = [site for site in sites if query.model in site.identity.models]
    return [
        site
        for site in serving
        if site.load.received_s >= since_s and (regions is None or site.identity.region in regions)
    ]


def unable_sites(
    model_id: str, limit_tokens: int, begun_by: SiteIdentity | None, sites: Sequence[Site]
) -> dict[str, str]:
    """Return the sites that serve a model but can't take a query, each with the reason.

    `limit_tokens`: the longest context that was too short for the prompt, 0 if none was. `begun_by`: the site
    that began the answer, None before that.
    """
    excluded = too_short_sites(model_id, limit_tokens, sites) if limit_tokens else {}
    return excluded | (sites_of_other_weights(model_id, begun_by, sites) if begun_by is not None else {})


def too_short_sites(model_id: str, limit_tokens: int, sites: Sequence[Site]) -> dict[str, str]:
    """Return the sites whose context is not longer than `limit_tokens`, which the prompt did not fit."""
    served = {site.name: site.identity.models.get(model_id) for site in sites}
    short = [name for name, model in served.items() if model and model.context_tokens <= limit_tokens]
    return dict.fromkeys(short, "its context is too short")


def sites_of_other_weights(model_id: str, begun_by: SiteIdentity, sites: Sequence[Site]) -> dict[str, str]:
    """Return the sites whose weights differ from those that began the answer. An answer begins with its
    Opening, which tells the client the revision, even if its first token has no text yet.
    """
    different = [site.name for site in sites if not same_weights(begun_by, site.identity, model_id)]
    return dict.fromkeys(different, "has other weights than those that began the answer")


def region_error(caller: Caller, model: str, sites: Sequence[Site]) -> Forbidden | None:
    """Return the error for a key that may use none of the regions with a site of the model, or None."""
    serving = [site for site in sites if model in site.identity.models]
    if caller.regions is None or caller.sites_of(serving):
        return None
    regions = {site.identity.region for site in serving}
    where = ", ".join(sorted(regions))
    return Forbidden(f"this key may not use the regions of {model}: {where}", param="model")


def _inability_error(
    query: Query, needs: frozenset[str], sites: Sequence[Site], now_s: float
) -> BadRequest | None:
    """Return the error if no site of the model has all features of `needs`, None if one has. Sites that have
    not reported within MAX_AWAY_S are ignored.
    """
    models = [site.identity.models[query.model] for site in _heard_of(query, sites, now_s)]
    if not models or any(needs <= model.features for model in models):
        return None
    lacking = needs - frozenset().union(*(model.features for model in models))
    return BadRequest(
        f"No site that serves {query.model} has all of: {', '.join(sorted(lacking or needs))}."
        " /v1/models lists what models can do.",
        param="model",
    )


def _limits_error(demand: Demand, sites: Sequence[Site]) -> BadRequest | None:
    """Return the error if every site of the model is beyond the limits of the request, else None."""
    serving = [site for site in sites if demand.model in site.identity.models]
    ruled_out = {site.name: beyond_limits(demand, site) for site in serving}
    if demand.limits is None or not serving or None in ruled_out.values():
        return None
    listed = "; ".join(f"{site} {reason}" for site, reason in sorted(ruled_out.items()))
    return BadRequest(
        f"No site that serves {demand.model} is within the limits of the request: {listed}.",
        code="no_site_within_limits",
    )
