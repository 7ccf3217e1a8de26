"""A forecast on one site: when would this demand start there, when would it finish, what would it cost.

A site waits for slots and for KV, not for sums of tokens, so the wait follows the predicted remaining lengths
of what runs there. Figures are the site's own last report plus this gateway's assignments since then. A
report's age never shortens a wait: what may have finished meanwhile is not counted as finished.
"""

from __future__ import annotations

from math import ceil

from gateway.domain import Estimate, Site
from gateway.routing.demand import Demand

UNKNOWN_SECONDS_PER_TOKEN = 0.05
"""Assumed of a site that has measured nothing yet; it warms up before it joins, so this is a last resort."""


def estimate(demand: Demand, site: Site, now_s: float) -> Estimate:
    """Expected seconds from now as the client sees them. Constant time: at most 64 values of the report."""
    load, identity = site.load, site.identity
    ahead = load.pending + site.credit.requests
    rows = min(identity.slots, load.running + ahead + 1)
    used_kv = identity.kv_capacity_tokens - load.kv_free_tokens
    iteration_s = seconds_per_iteration(site, rows, used_kv)
    wait_s = _tokens_until_free(demand, site, ahead) * iteration_s
    prompt_ahead = load.pending_prompt_tokens + site.credit.prompt_tokens
    prefill_s = iteration_s + load.iteration.per_token_s * (demand.prompt_tokens + prompt_ahead)
    age_s = max(0.0, now_s - load.received_s)
    first_token_s = site.rtt_s + wait_s + prefill_s
    mtok = (
        demand.prompt_tokens * identity.input_usd_per_mtok,
        demand.response_tokens * identity.output_usd_per_mtok,
    )
    return Estimate(
        site=site.name,
        wait_s=wait_s,
        first_token_s=first_token_s,
        finish_s=first_token_s + demand.response_tokens * iteration_s,
        price_usd=sum(mtok) / 1e6,
        kv_tokens=demand.kv_tokens,
        load_age_s=age_s,
    )


def seconds_per_iteration(site: Site, rows: int, kv_tokens: int) -> float:
    """What one token more costs each of `rows`: by the site's fitted cost, else by what it measured last."""
    fitted = site.load.iteration.seconds(rows, rows, kv_tokens)
    return fitted or site.load.seconds_per_iteration or UNKNOWN_SECONDS_PER_TOKEN


def _tokens_until_free(demand: Demand, site: Site, ahead: int) -> float:
    """Iterations until a slot and the KV reservation are free, if `ahead` requests start before."""
    load = site.load
    must_finish = max(
        load.running + ahead + 1 - site.identity.slots, _must_finish_for_kv(demand, site, ahead)
    )
    if must_finish <= 0:
        return 0.0
    remaining = load.running_remaining
    if must_finish <= load.running and remaining:
        return float(remaining[min(len(remaining), ceil(must_finish / load.running_weight)) - 1])
    work = sum(remaining) * load.running_weight + load.pending_response_tokens + site.credit.response_tokens
    return work / max(1, site.identity.slots)


def _must_finish_for_kv(demand: Demand, site: Site, ahead: int) -> int:
    """How many of the running requests must end before the demand's reservation fits."""
    load, capacity = site.load, site.identity.kv_capacity_tokens
    waiting = (
        load.pending_prompt_tokens
        + load.pending_response_tokens
        + site.credit.prompt_tokens
        + site.credit.response_tokens
    )
    missing = demand.kv_tokens + waiting + load.kv_reserved_tokens - load.kv_free_tokens
    if missing <= 0 or capacity <= 0:
        return 0
    per_request = max(1.0, (capacity - load.kv_free_tokens + load.kv_reserved_tokens) / max(1, load.running))
    return min(load.running + ahead, ceil(missing / per_request))
