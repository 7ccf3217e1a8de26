"""The sites that are ruled out for a query: by length, by what began it, by regions or its own limits."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.domain import Query, Site, SiteIdentity
from gateway.errors import BadRequest, Forbidden, MicoError
from gateway.routing.demand import Demand
from gateway.routing.failover import same_weights
from gateway.routing.filters import beyond_limits


def refusal_of(query: Query, demand: Demand, sites: Sequence[Site]) -> MicoError | None:
    """Return the error for a query that no site may ever take, of all sites that serve its model."""
    return _region_error(query, sites) or _limits_error(demand, sites)


def too_short_sites(model_id: str, limit_tokens: int, sites: Sequence[Site]) -> dict[str, str]:
    """Return the sites that would refuse a prompt which did not fit a context of `limit_tokens`."""
    served = {site.name: site.identity.models.get(model_id) for site in sites}
    short = [name for name, model in served.items() if model and model.context_tokens <= limit_tokens]
    return dict.fromkeys(short, "its context is too short")


def sites_of_other_weights(model_id: str, begun_by: SiteIdentity, sites: Sequence[Site]) -> dict[str, str]:
    """Return the sites that would continue the answer as another model. An answer has begun once it was
    opened: by then the client has the revision, and a token that shows no text yet is of those weights, too.
    """
    different = [site.name for site in sites if not same_weights(begun_by, site.identity, model_id)]
    return dict.fromkeys(different, "has other weights than those that began the answer")


def _region_error(query: Query, sites: Sequence[Site]) -> Forbidden | None:
    """Return the error for a key that may use none of the regions where the model is."""
    model, allowed = query.model, query.caller.regions
    regions = {site.identity.region for site in sites if model in site.identity.models}
    if allowed is None or regions & allowed:
        return None
    where = ", ".join(sorted(regions))
    return Forbidden(f"this key may not use the regions of {model}: {where}", param="model")


def _limits_error(demand: Demand, sites: Sequence[Site]) -> BadRequest | None:
    """Return the error for limits of the request that no site can ever keep."""
    serving = [site for site in sites if demand.model in site.identity.models]
    ruled_out = {site.name: beyond_limits(demand, site) for site in serving}
    if demand.limits is None or not serving or None in ruled_out.values():
        return None
    listed = "; ".join(f"{site} {reason}" for site, reason in sorted(ruled_out.items()))
    return BadRequest(
        f"No site that serves {demand.model} is within the limits of the request: {listed}.",
        code="no_site_within_limits",
    )
