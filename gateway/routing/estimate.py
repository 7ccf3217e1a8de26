"""A forecast on one site: when would this demand start there, when would it finish, what would it cost.

A site waits for slots and for KV, not for sums of tokens, so the wait follows the predicted remaining lengths
of what runs there. Figures are the site's own last report plus this gateway's assignments since then. A
report's age never shortens a wait: what may have finished meanwhile is not counted as finished.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from gateway.domain import Estimate, Site
from gateway.routing.demand import Demand

UNKNOWN_SECONDS_PER_TOKEN = 0.05
"""Assumed of a site that has measured nothing yet; it warms up before it joins, so this is a last resort."""


class Ahead(NamedTuple):
    """What waits at a site and starts before a demand."""

    requests: int
    prompt_tokens: float
    response_tokens: float

    @staticmethod
    def at(site: Site, share: float) -> Ahead:
        """`share` of what the site reported as pending and of what was assigned since."""
        load, credit = site.load, site.credit
        return Ahead(
            round((load.pending + credit.requests) * share),
            (load.pending_prompt_tokens + credit.prompt_tokens) * share,
            (load.pending_response_tokens + credit.response_tokens) * share,
        )


def estimate(demand: Demand, site: Site, now_s: float, *, share_ahead: float = 1.0) -> Estimate:
    """Expected seconds from now as the client sees them. Constant time: at most 64 values of the report.

    `share_ahead`: the part of what waits at the site that starts before the demand; all of it for a new one.
    """
    load, identity = site.load, site.identity
    ahead = Ahead.at(site, share_ahead)
    rows = min(identity.slots, load.running + ahead.requests + 1)
    iteration_s = seconds_per_iteration(site, rows, identity.kv_capacity_tokens - load.kv_free_tokens)
    wait_s = _iterations_until_free(demand, site, ahead) * iteration_s
    prefill_s = iteration_s + load.iteration.per_token_s * (demand.prompt_tokens + ahead.prompt_tokens)
    first_token_s = site.rtt_s + wait_s + prefill_s
    price = demand.prompt_tokens * identity.input_usd_per_mtok
    price += demand.response_tokens * identity.output_usd_per_mtok
    return Estimate(
        site=site.name,
        wait_s=wait_s,
        first_token_s=first_token_s,
        finish_s=first_token_s + demand.response_tokens * iteration_s,
        price_usd=price / 1e6,
        kv_tokens=demand.kv_tokens,
        load_age_s=max(0.0, now_s - load.received_s),
    )


def seconds_per_iteration(site: Site, rows: int, kv_tokens: int) -> float:
    """What one token more costs each of `rows`: by the site's fitted cost, else by what it measured last."""
    fitted = site.load.iteration.seconds(rows, rows, kv_tokens)
    return fitted or site.load.seconds_per_iteration or UNKNOWN_SECONDS_PER_TOKEN


def _iterations_until_free(demand: Demand, site: Site, ahead: Ahead) -> float:
    """Until a slot and the KV reservation are free: a running request frees both when it ends."""
    load, slots = site.load, site.identity.slots
    for_slot = load.running + ahead.requests + 1 - slots
    must_finish = max(for_slot, _must_finish_for_kv(demand, site, ahead))
    if must_finish <= 0:
        return 0.0
    remaining = load.running_remaining
    if must_finish <= load.running and remaining:
        return float(remaining[min(len(remaining), ceil(must_finish / load.running_weight)) - 1])
    return (sum(remaining) * load.running_weight + ahead.response_tokens) / max(1, slots)


def _must_finish_for_kv(demand: Demand, site: Site, ahead: Ahead) -> int:
    """How many of the running requests must end before the demand's reservation fits."""
    load, capacity = site.load, site.identity.kv_capacity_tokens
    wanted = demand.kv_tokens + ahead.prompt_tokens + ahead.response_tokens
    missing = wanted + load.kv_reserved_tokens - load.kv_free_tokens
    if missing <= 0 or capacity <= 0:
        return 0
    per_request = (capacity - load.kv_free_tokens + load.kv_reserved_tokens) / max(1, load.running)
    return min(load.running + ahead.requests, ceil(missing / max(1.0, per_request)))
