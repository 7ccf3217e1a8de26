"""Estimate when a demand would start and finish on each site, and its price there.

A demand waits for slots and for KV memory, not for sums of tokens, so the wait is computed from the predicted
remaining lengths of the running requests. The figures are the sites' last reports, plus this gateway's
assignments since then, minus the requests whose end it has received. The age of a report never shortens a
wait: requests that may have finished since the report still count as running.

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
    """The tokens of one demand, or of one demand for each site. `cached_tokens`: the prompt tokens that need
    no prefill; the float 0.0 if no site has any cached.
    """

    prompt_tokens: Numbers | float
    response_tokens: Numbers | float
    kv_tokens: Numbers | float
    cached_tokens: Numbers | float


class Estimates(NamedTuple):
    """Expected seconds from now, as seen by the client; the price in dollars. `[sites]` each."""

    wait_s: Numbers
    first_token_s: Numbers
    iteration_s: Numbers
    finish_s: Numbers
    price_usd: Numbers
    new_tokens: Numbers  # prompt tokens that are not cached; a scalar if no site has any cached


def estimates(size: Sizes, at: Figures, remaining: Numbers) -> Estimates:
    """Return the estimates for each site. `remaining` `[sites, REMAINING_VALUES]`: see `remaining_row`."""
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
    """Return whether a single demand would start at once on every site."""
    kv_tokens = size.kv_tokens
    return isinstance(kv_tokens, float) and kv_tokens <= least(at.kv_room_tokens) and most(at.too_many) <= 0.0


def price_usd(size: Sizes, at: Figures) -> Numbers:
    """Return the price `[sites]` in dollars: `Prices.nano_usd` for vectors, without rounding."""
    prompt, response, cached = size.prompt_tokens, size.response_tokens, size.cached_tokens
    read_tokens = response * (prompt + 0.5 * response)
    usd: Numbers = np.asarray(prompt) * at.input_usd_per_token
    if not isinstance(cached, float):
        usd -= cached * at.cached_discount_usd_per_token
    usd += np.asarray(response) * at.output_usd_per_token
    usd += np.asarray(read_tokens) * at.context_usd_per_token
    return usd


def _iterations_until_free(size: Sizes, at: Figures, remaining: Numbers) -> Numbers:
    """Return the iterations until a slot and the KV reservation are free. A running request frees both when
    it ends.

    `_must_end` requests must end first. If these are more than the running ones, the work of all is assumed
    to be spread evenly over the slots. A site orders its queue by size, so only a part of the pending
    requests starts before a small demand and takes KV and time. If all were counted, small demands would
    avoid long queues, in which they overtake others, and would crowd each other elsewhere.
    """
    ahead = np.minimum(1.0, _order(size) * at.per_pending_size)
    must_end = _must_end(size, at, at.kv_room_tokens + (1.0 - ahead) * at.pending_kv_tokens)
    place = np.minimum(np.ceil(must_end / at.per_remaining), REMAINING_VALUES).astype(np.intp) - 1
    of_running = remaining[np.arange(len(remaining)), np.maximum(place, 0)]
    evenly = (at.running_tokens + ahead * at.pending_tokens) / at.slots
    iterations = np.where(must_end <= at.running, np.minimum(evenly, of_running), evenly)
    return np.where(must_end > 0.0, iterations, 0.0)


def _must_end(size: Sizes, at: Figures, kv_room_tokens: Numbers) -> Numbers:
    """Return the number of requests that must end before a slot and the demand's KV memory are free."""
    for_kv = np.minimum((size.kv_tokens - kv_room_tokens) / at.kv_each_tokens, at.requests)
    must_end: Numbers = np.maximum(at.too_many, for_kv)
    return must_end


def _order(size: Sizes) -> Numbers:
    """Return `fleet.size` for vectors."""
    length = np.maximum(1.0, size.response_tokens)
    ordered: Numbers = np.sqrt(length * (length + PROMPT_TOKEN_WORK * size.prompt_tokens))
    return ordered


def sizes(demand: Demand, fleet: Fleet) -> Sizes:
    """Return the sizes of a demand at every site of a fleet."""
    tokens = float(demand.prompt_tokens), demand.response_tokens, float(demand.kv_tokens)
    return Sizes(*tokens, _cached_tokens(demand.cached, fleet))  # floats: faster with vectors than integers


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
    """Return the estimates of the sites at `places`, in the form that is kept with a decision."""
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
    """Return the sizes of many demands, each paired with the name of the site it is estimated for."""
    rows: NDArray[np.float64] = np.array(
        [
            (each.prompt_tokens, each.response_tokens, each.kv_tokens, each.cached.at(site))
            for each, site in demands
        ],
        dtype=float,
    ).reshape(-1, 4)
    return Sizes(*rows.T)
