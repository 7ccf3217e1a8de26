"""Estimate when a demand would start and finish on each site, and its price there.

A demand waits for slots and for KV, not for sums of tokens, so the wait follows the predicted remaining
lengths of the running requests. The figures are the sites' last reports plus this gateway's assignments since
then, less the requests of which it has the end. The age of a report never shortens a wait: others that may
have finished meanwhile are not counted as finished.

Every function takes one demand and many sites, or many demands and one site, or as many demands as sites.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gateway.decision import Estimate
from gateway.domain import Site
from gateway.routing.demand import Demand
from gateway.routing.fleet import (
    PROMPT_TOKEN_WORK,
    REMAINING_VALUES,
    Figures,
    Fleet,
    Numbers,
    least,
    most,
)
from gateway.routing.prefixes import Cached


class Sizes(NamedTuple):
    """The tokens of one demand, or of one demand for each site. `cached_tokens` of the prompt need no
    prefill: one number, 0.0, for a prompt that is new everywhere.
    """

    prompt_tokens: Numbers | float
    response_tokens: Numbers | float
    kv_tokens: Numbers | float
    cached_tokens: Numbers | float


class Estimates(NamedTuple):
    """Expected seconds from now as the client sees them. `[sites]` each."""

    wait_s: Numbers
    first_token_s: Numbers
    iteration_s: Numbers
    finish_s: Numbers
    price_usd: Numbers
    new_tokens: Numbers  # of the prompt, which are not cached; one number if that is new everywhere


def estimates(size: Sizes, at: Figures, remaining: Numbers) -> Estimates:
    """Return one estimate for each site. `remaining` is `[sites, REMAINING_VALUES]`."""
    prompt, response = np.asarray(size.prompt_tokens), np.asarray(size.response_tokens)  # faster than floats
    cached = size.cached_tokens
    new_tokens = prompt if isinstance(cached, float) else prompt - cached
    more_s = at.per_kv_token_s * prompt
    iteration_s = at.iteration_s + more_s
    if _fits_everywhere(size, at):
        wait_s = np.zeros(len(at.slots))
    else:
        wait_s = _iterations_until_free(size, at, remaining) * iteration_s
    first_token_s = at.prefill_s + more_s + wait_s + at.per_token_s * new_tokens
    finish_s = first_token_s + response * iteration_s
    price = price_usd(size, at)
    return Estimates(wait_s, first_token_s, iteration_s, finish_s, price, new_tokens)


def _fits_everywhere(size: Sizes, at: Figures) -> bool:
    """Return whether one demand waits at no site."""
    kv_tokens = size.kv_tokens
    return isinstance(kv_tokens, float) and kv_tokens <= least(at.kv_room_tokens) and most(at.too_many) <= 0.0


def price_usd(size: Sizes, at: Figures) -> Numbers:
    """Compute `Prices.nano_usd` for vectors, in dollars and not rounded."""
    prompt, response, cached = size.prompt_tokens, size.response_tokens, size.cached_tokens
    read_tokens = response * (prompt + 0.5 * response)
    usd: Numbers = np.asarray(prompt) * at.input_usd_per_token
    if not isinstance(cached, float):
        usd -= cached * at.cached_discount_usd_per_token
    usd += np.asarray(response) * at.output_usd_per_token
    usd += np.asarray(read_tokens) * at.context_usd_per_token
    return usd


def _iterations_until_free(size: Sizes, at: Figures, remaining: Numbers) -> Numbers:
    """Return the iterations until a slot and the KV reservation are free. A running request frees both at its
    end.

    `_must_end` requests must end first; those beyond the running ones pass through the slots evenly. Only a
    part of the pending requests starts before a demand that is smaller than most, and takes KV and time: if
    all were counted, small demands would avoid long queues, in which they overtake the others, and crowd each
    other.
    """
    ahead = np.minimum(1.0, _order(size) * at.per_pending_size)
    must_end = _must_end(size, at, at.kv_room_tokens + (1.0 - ahead) * at.pending_kv_tokens)
    place = np.minimum(np.ceil(must_end / at.per_remaining), REMAINING_VALUES).astype(np.intp) - 1
    of_running = remaining[np.arange(len(remaining)), np.maximum(place, 0)]
    evenly = (at.running_tokens + ahead * at.pending_tokens) / at.slots
    iterations = np.where(must_end <= at.running, np.minimum(evenly, of_running), evenly)
    return np.where(must_end > 0.0, iterations, 0.0)


def _must_end(size: Sizes, at: Figures, kv_room_tokens: Numbers) -> Numbers:
    """Return the number of requests that must end before a slot and the demand's KV are free."""
    for_kv = np.minimum((size.kv_tokens - kv_room_tokens) / at.kv_each_tokens, at.requests)
    must_end: Numbers = np.maximum(at.too_many, for_kv)
    return must_end


def _order(size: Sizes) -> Numbers:
    """Compute `fleet.size` for vectors."""
    length = np.maximum(1.0, size.response_tokens)
    ordered: Numbers = np.sqrt(length * (length + PROMPT_TOKEN_WORK * size.prompt_tokens))
    return ordered


def sizes(demand: Demand, fleet: Fleet) -> Sizes:
    """Return the sizes of a demand at every site of a fleet."""
    tokens = float(demand.prompt_tokens), demand.response_tokens, float(demand.kv_tokens)
    return Sizes(*tokens, _cached_tokens(demand.cached, fleet))  # vectors times floats: faster than integers


def _cached_tokens(cached: Cached, fleet: Fleet) -> Numbers | float:
    if not cached.by_site:
        return 0.0
    tokens = np.zeros(len(fleet.sites))
    if cached.elsewhere:
        tokens += cached.elsewhere
    for site, count in cached.by_site.items():
        place = fleet.place(site)
        if place is not None:
            tokens[place] = count
    return tokens


def estimates_at(
    places: NDArray[np.intp],
    sites: Sequence[Site],
    found: Estimates,
    demand: Demand,
    now_s: float,
    *,
    cost: Numbers | None = None,
) -> tuple[Estimate, ...]:
    """Return the estimates of some of the sites, as they are kept with a decision."""
    compared = [found.wait_s, found.first_token_s, found.finish_s, found.price_usd]
    if cost is not None:
        compared.append(cost)
    if len(places) < len(sites):
        compared = [each.take(places) for each in compared]
    cached, kv_tokens = demand.cached, demand.kv_tokens
    kept = []
    for place, wait_s, first_token_s, finish_s, price_usd, *costs in zip(
        places.tolist(), *(each.tolist() for each in compared), strict=True
    ):
        site = sites[place]
        name, age_s = site.name, max(0.0, now_s - site.load.received_s)
        expected = cached.at(name), *costs
        kept.append(Estimate(name, wait_s, first_token_s, finish_s, price_usd, kv_tokens, age_s, *expected))
    return tuple(kept)


def of_demands(demands: Iterable[tuple[Demand, str]]) -> Sizes:
    """Return the sizes of many demands, each with the name of its site of a vector."""
    rows: NDArray[np.float64] = np.array(
        [
            (each.prompt_tokens, each.response_tokens, each.kv_tokens, each.cached.at(site))
            for each, site in demands
        ],
        dtype=float,
    ).reshape(-1, 4)
    return Sizes(*rows.T)
