"""The routing policies, of one signature. Production, benchmarks and the simulator run the same code."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from gateway.domain import Lane
from gateway.routing.candidates import Candidates, Choice, Policy
from gateway.routing.demand import Demand
from gateway.routing.fleet import Numbers, least
from gateway.wording import several

CROWDING = 16.0
"""The cost that a query imposes on the other requests of a site with one request per slot, in multiples of
the query's decode time. It is three times as much at two requests per slot, and close to 0 while most slots
are free.

The decode time is that of the fastest candidate, so that crowding has the same weight on fast and slow sites.
With each site's own decode time, fast sites would build up queues while slow ones have free slots. Once all
have queues, slow sites get the long answers, which a wait delays least per token. Measured:
docs/decisions/routing-cost.md.
"""
SCARCE = 0.8
"""Requests per slot, over all candidates, from which free slots are scarce and crowding counts in full. Below
it, requests that a query would crowd find free slots elsewhere. Measured: docs/decisions/routing-cost.md.
"""
FIRST_TOKEN = 6.0
"""The extra weight of a second before the first token, relative to a second of the completion time."""
LEAVING = 2.0
"""The cost of leaving the site that has the prompt cached, in iterations of time to first token. Estimates of
two sites differ by as much through noise. Measured: docs/decisions/prefix-affinity.md.
"""
LEFT_IN_FULL = 6.0
"""LEAVING grows with the share of the prompt that is computed again, up to a sixth of the prompt."""
REPORTS_EVERY_S = 1.5
"""A report older than this means that one was missed: a site of a small fleet reports every second."""
STALE_PENALTY = 1.0
"""Seconds added per second of a report's age beyond that."""
CROWDING_WEIGHT, FIRST_TOKEN_WEIGHT, EVICTION_WEIGHT, LEAVING_WEIGHT = map(
    np.array, (CROWDING, FIRST_TOKEN, 1.0 + FIRST_TOKEN, LEAVING * (1.0 + FIRST_TOKEN))
)
"""The weights as arrays: multiplying a short vector by an array takes two thirds of the time of a float."""
USD_PER_SECOND = {Lane.INTERACTIVE: np.array(0.001), Lane.BATCH: np.array(0.0001)}
"""The value of one second of waiting, in dollars, which converts prices to seconds. Nobody waits for a batch
line, so price weighs more, and its first token has no extra weight.
"""


def mico(demand: Demand, candidates: Candidates, turn: int) -> Choice:
    """Pick the least cost: completion time, plus late first token, crowding, price and missed reports."""
    found, at = candidates.estimates, candidates.at
    cost_s = found.finish_s + _cost_to_others(demand, candidates)
    due_s = candidates.now_s - REPORTS_EVERY_S
    if least(at.quiet_until_s) < due_s:
        cost_s += STALE_PENALTY * np.maximum(0.0, due_s - at.quiet_until_s)
    cost_s += found.price_usd / USD_PER_SECOND[demand.lane]
    if demand.lane is Lane.INTERACTIVE:
        cost_s += FIRST_TOKEN_WEIGHT * found.first_token_s
    cost_s /= at.weight
    place = candidates.least(cost_s, turn)
    wait_s, first_s = found.wait_s.item(place), found.first_token_s.item(place)
    finish_s = found.finish_s.item(place)
    waits = f"waits {wait_s:.2f} s, " if wait_s > 0 else ""
    promise = f"first token in {first_s:.2f} s, done in {finish_s:.2f} s"
    if (cached := demand.cached.at(candidates.sites[place].name)) >= 1.0:
        promise += f", {several(cached, 'prompt token')} cached"
    crowded = f"{several(at.requests.item(place), 'request')} on {several(at.slots.item(place), 'slot')}"
    return Choice(place, f"earliest finish, crowding counted: {waits}{promise}, {crowded}", cost_s)


def round_robin(demand: Demand, candidates: Candidates, turn: int) -> Choice:
    places = candidates.places
    return Choice(int(places[turn % len(places)]), "next in turn")


def least_requests(demand: Demand, candidates: Candidates, turn: int) -> Choice:
    per_slot = requests_per_slot(candidates)
    cost = per_slot / candidates.at.weight
    place = candidates.least(cost, turn)
    return Choice(place, f"fewest requests per slot: {per_slot[place]:.2f}", cost)


def power_of_two(demand: Demand, candidates: Candidates, turn: int) -> Choice:
    """Pick the less loaded of two sites drawn by `turn` (Mitzenmacher 2001)."""
    places, per_slot = candidates.places, requests_per_slot(candidates)
    first = _scramble(turn) % len(places)
    second = (first + 1 + _scramble(turn + 1) % max(1, len(places) - 1)) % len(places)
    drawn = int(places[first]), int(places[second])
    names = " and ".join(candidates.sites[place].name for place in drawn)
    return Choice(min(drawn, key=lambda place: float(per_slot[place])), f"the less loaded of {names}")


def least_tokens(demand: Demand, candidates: Candidates, turn: int) -> Choice:
    """Pick the least sum of predicted tokens (M_k of the MICO paper, section 3.3), for any site size."""
    tokens = candidates.at.token_load
    place = candidates.least(tokens, turn)
    return Choice(place, f"fewest predicted tokens: {tokens[place]:.0f}", tokens)


def token_balanced(demand: Demand, candidates: Candidates, turn: int) -> Choice:
    """Pick the least predicted tokens in proportion to speed: a window of one query (see window.py)."""
    per_speed = candidates.at.token_load * candidates.estimates.iteration_s / candidates.at.slots
    place = candidates.least(per_speed, turn)
    return Choice(
        place, f"fewest predicted tokens for its speed: {per_speed[place]:.2f} s of work", per_speed
    )


def shortest_wait(demand: Demand, candidates: Candidates, turn: int) -> Choice:
    first_token_s = candidates.estimates.first_token_s
    place = candidates.least(first_token_s, turn)
    return Choice(place, f"soonest first token: {first_token_s[place]:.2f} s", first_token_s)


def _cost_to_others(demand: Demand, candidates: Candidates) -> Numbers:
    """Return the cost in seconds `[sites]` that a query imposes on the other requests of each site.

    Decoding takes one slot, whereas a prefill delays all slots. Prompt tokens that are cached reduce the
    query's work, and with it the cost. Tokens that a site computes although another candidate has them
    cached add to the cost in two ways: they delay the site's requests, and they evict other prefixes, which
    delays later first tokens by as much. Leaving the site with the cached prompt has a cost of its own,
    because estimates of two sites differ by some iterations through noise.
    """
    at, found = candidates.at, candidates.estimates
    decode_s = np.asarray(demand.response_tokens * candidates.least_of(found.iteration_s))
    if not demand.cached.by_site:
        own: Numbers = np.asarray(CROWDING * _scarcity(demand, candidates) * float(decode_s)) * at.crowding
        return own
    crowding = CROWDING_WEIGHT * at.crowding
    new_tokens, all_slots_s = found.new_tokens, at.all_slots_per_token_s
    again_tokens = new_tokens - np.asarray(candidates.least_of(new_tokens))
    # More than 0, to avoid a division by 0 if a query takes no time.
    alone_s = np.asarray(float(decode_s) / (1.0 + FIRST_TOKEN) + 1e-9)
    prompt_tokens = np.asarray(float(demand.prompt_tokens))
    work_left = (alone_s + all_slots_s * new_tokens) / (alone_s + all_slots_s * prompt_tokens)
    evicted_s = EVICTION_WEIGHT * (at.per_token_s * again_tokens)
    left = np.minimum(1.0, again_tokens * np.asarray(LEFT_IN_FULL / max(1.0, demand.prompt_tokens)))
    whole: Numbers = crowding * (decode_s * work_left + all_slots_s * again_tokens) + evicted_s
    whole += LEAVING_WEIGHT * found.iteration_s * left
    return whole


def _scarcity(demand: Demand, candidates: Candidates) -> float:
    """Return the factor of crowding, 0 to 1: how scarce free slots are over all candidates.

    The slots in use are the requests of the sites, or, if more, the requests expected at the current arrival
    rate (Little's law), so that a burst on idle sites is spread by speed. Queries that continue a prompt
    find no free slot with their prefix elsewhere, so their share is a lower bound of the factor.
    """
    arriving, at, allowed = demand.arriving, candidates.at, candidates.allowed
    soon = arriving.tokens_per_s * candidates.least_of(candidates.estimates.iteration_s)
    per_slot = max(soon, float(at.requests.dot(allowed))) / float(at.slots.dot(allowed))
    return max(arriving.returning, min(1.0, (per_slot / SCARCE) ** 3))


def requests_per_slot(candidates: Candidates) -> Numbers:
    return candidates.at.requests / candidates.at.slots


def _scramble(turn: int) -> int:
    """Hash a counter (Knuth's multiplier): reproducible draws without state."""
    return (turn * 2654435761 & 0xFFFFFFFF) >> 7


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "mico": mico,
        "token_balanced": token_balanced,
        "round_robin": round_robin,
        "least_requests": least_requests,
        "power_of_two": power_of_two,
        "least_tokens": least_tokens,
        "shortest_wait": shortest_wait,
    }
)

JOINT_POLICIES = frozenset({"mico", "token_balanced"})
"""The policies under which a burst on full sites is assigned as one window."""
