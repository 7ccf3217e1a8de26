"""Choose the pending queries to move to an idle site. `federation/offloading.py` negotiates the moves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from gateway.domain import Lane, ModelState, Site
from gateway.routing.demand import Demand, credit_with
from gateway.routing.estimate import estimates, of_demands
from gateway.routing.failover import MAX_MOVES
from gateway.routing.filters import why_not
from gateway.routing.fleet import Figures, Numbers, figures, remaining_row
from gateway.routing.prefixes import Cached

MIN_GAIN_S = 0.05
MIN_GAIN_SHARE = 0.2
"""A move must save MIN_GAIN_S and MIN_GAIN_SHARE of the wait: estimates have errors, and moves a cost."""
ROUND_TRIPS = 1.5
"""Round trips to the donor that a move costs: one to request the release, and half of one that the donor's
estimate includes although the pending query is already there. The bidder's estimate includes its own.
"""
ROUNDING_S = 1e-6
"""The most by which two ways of summing the same seconds differ."""


class Sites(Protocol):
    """Access to the sites of one gateway by name."""

    def site(self, name: str) -> Site | None: ...


class Pending(NamedTuple):
    """An attempt assigned to `site` that has not started there, as far as this gateway knows. `moves`: how
    often its query has moved. `excluded`: the sites that can't take it.
    """

    attempt_id: str
    site: str
    demand: Demand
    moves: int
    excluded: frozenset[str] = frozenset()


class Offer(NamedTuple):
    """The pending queries of one site, and how soon another site must finish each for a move to be worth it.

    `beaten_by`, one entry per query: the prompt tokens, the response tokens, the latest finish elsewhere, in
    seconds from now, at which a move may be worth it, and the prompt tokens that each site has cached.
    """

    donor: Site
    beaten_by: Sequence[tuple[float, float, float, Cached]]


def offer(donor: Site, demands: Iterable[Demand]) -> Offer:
    """Build the offer of a site where `demands` are pending.

    The latest finishes hold whichever of the demands move: the k-th shortest has at most (k - 1)/k of the
    queue before it.
    """
    by_length = sorted(demands, key=lambda demand: demand.response_tokens)
    size = of_demands((each, donor.name) for each in by_length)
    here = estimates(size, *_columns([(donor, k / (k + 1)) for k in range(len(by_length))]))
    latest_s = (here.finish_s - _min_gain_s(here.wait_s) - ROUND_TRIPS * donor.rtt_s).tolist()
    rows = zip(by_length, here.wait_s.tolist(), latest_s, strict=True)
    return Offer(
        donor,
        [
            (each.prompt_tokens, each.response_tokens, by_s, each.cached)
            for each, wait_s, by_s in rows
            if wait_s > 0
        ],
    )


def _min_gain_s(wait_s: Numbers) -> Numbers:
    """Return the least gain, in seconds, for which a move is worth it."""
    return np.maximum(MIN_GAIN_S, MIN_GAIN_SHARE * wait_s)


_bid_figures = itemgetter(
    *map(Figures._fields.index, ("prefill_s", "per_token_s", "per_kv_token_s", "iteration_s"))
)
"""Picks the figures of a `Bid` from those of a site."""


class Bid(NamedTuple):
    """A site with a free slot, and the time in seconds of a query that starts there at once."""

    bidder: str
    start_s: float  # until the first token of an empty prompt
    per_token_s: float
    per_kv_token_s: float
    iteration_s: float

    @classmethod
    def of(cls, site: Site) -> Bid | None:
        """Return the bid of a site, None if no slot is free."""
        if _free_slots(site) <= 0:
            return None
        prefill_s, *costs_s = _bid_figures(figures(site, site.credit))
        return cls(site.name, prefill_s - ROUNDING_S, *costs_s)


def _free_slots(site: Site) -> int:
    return max(1, site.identity.slots) - site.load.running - site.load.pending - site.credit.requests


def promising(bid: Bid, offers: Iterable[Offer]) -> list[str]:
    """Return the donors with a query that would gain by moving to the bidder if it started there at once.

    Compares plain numbers for speed, as bids are frequent and most fail here.
    """
    bidder, start_s, per_token_s, per_kv_s, iteration_s = bid
    found = []
    for each in offers:
        for prompt, response, by_s, cached in each.beaten_by:
            each_s = iteration_s + per_kv_s * prompt
            new = prompt - cached.at(bidder)
            if by_s > start_s + per_token_s * new + per_kv_s * prompt + response * each_s:
                found.append(each.donor.name)
                break
    return found


def is_crowded(at: Figures, place: int) -> bool:
    """Return whether one more query would have to wait at a site. Only such a site can offer queries."""
    return has_to_wait(*(float(each[place]) for each in (at.too_many, at.kv_room_tokens, at.kv_each_tokens)))


def has_to_wait(too_many: float, kv_room_tokens: float, kv_each_tokens: float) -> bool:
    return too_many > 0.0 or kv_room_tokens < kv_each_tokens


def wins(bidder: str, pending: Sequence[Pending], sites: Sites, now_s: float) -> list[Pending]:
    """Return the attempts to move to the bidder: those that would finish sooner there, as its room allows.

    Interactive queries come first, ordered by gain per response token: by the gain alone, a few long queries,
    which wait longest, would take the slots of a small site from many short ones. Batch lines follow, ordered
    by gain, as a batch ends when its longest line does.
    """
    site = sites.site(bidder)
    if site is None or (room := _free_slots(site)) <= 0:
        return []
    movable = [each for each in pending if _may_move(each, site, sites, now_s)]
    if not movable:
        return []
    gains_s, starts_at_once = _gains_s(site, movable, sites)
    if len(movable) == 1 and not starts_at_once[0]:
        return []
    lines = np.array([each.demand.lane is Lane.BATCH for each in movable])
    tokens = np.array([each.demand.response_tokens for each in movable])
    worth = gains_s / np.where(lines, 1.0, np.maximum(1.0, tokens))
    order = np.lexsort((-worth, np.where(gains_s > 0, lines, 2)))[: int((gains_s > 0).sum())]
    return _that_start_at_once(site, _that_fit(site, room, [movable[index] for index in order.tolist()]))


def _may_move(each: Pending, bidder: Site, sites: Sites, now_s: float) -> bool:
    if each.site == bidder.name or each.moves >= MAX_MOVES or sites.site(each.site) is None:
        return False
    if why_not(each.demand, bidder, now_s, each.excluded) is not None:
        return False
    return bidder.identity.models[each.demand.model].state is ModelState.READY


def _gains_s(bidder: Site, movable: Sequence[Pending], sites: Sites) -> tuple[Numbers, NDArray[np.bool_]]:
    """Return the seconds that each move would save by itself, after round trips, or 0 if it is not worth it,
    and whether the attempt would start at once.
    """
    donors = {each.site: donor for each in movable if (donor := sites.site(each.site)) is not None}
    size_here = of_demands((each.demand, each.site) for each in movable)
    size_there = of_demands((each.demand, bidder.name) for each in movable)
    here = estimates(size_here, *_columns([(donors[site], share) for site, share in _shares_ahead(movable)]))
    there = estimates(size_there, *_columns([(bidder, 1.0)]))
    way_s = ROUND_TRIPS * np.array([donors[each.site].rtt_s for each in movable])
    gains_s = here.finish_s - there.finish_s - way_s
    worth_it = (here.wait_s > 0.0) & (gains_s > _min_gain_s(here.wait_s))
    return np.where(worth_it, gains_s, 0.0), there.wait_s <= 0.0


def _shares_ahead(movable: Sequence[Pending]) -> list[tuple[str, float]]:
    """Return the site of each attempt and the share of its queue that starts before it, shortest first."""
    shares = [("", 0.0)] * len(movable)
    queues: dict[str, list[int]] = {}
    for index in sorted(range(len(movable)), key=lambda i: movable[i].demand.response_tokens):
        queues.setdefault(movable[index].site, []).append(index)
    for site, queue in queues.items():
        for rank, index in enumerate(queue):
            shares[index] = (site, rank / len(queue))
    return shares


def _that_fit(bidder: Site, room: int, ordered: Sequence[Pending]) -> list[Pending]:
    """Return the attempts, in order, whose choices fit the `room` slots. An attempt with more choices than
    the site has slots takes all of them.
    """
    chosen: list[Pending] = []
    for each in ordered:
        if room <= 0:
            break
        slots = min(each.demand.choices, max(1, bidder.identity.slots))
        if slots <= room:
            chosen.append(each)
            room -= slots
    return chosen


def _that_start_at_once(bidder: Site, chosen: list[Pending]) -> list[Pending]:
    """Return the leading attempts that would start at once, each counted as credit before the next."""
    if not chosen:
        return []
    credit, rows = bidder.credit, []
    for each in chosen:
        rows.append(figures(bidder, credit, 1.0))
        credit = credit_with(credit, each.demand)
    size = of_demands((each.demand, bidder.name) for each in chosen)
    remaining = np.tile(remaining_row(bidder), (len(chosen), 1))
    waits = estimates(size, Figures(*np.array(rows).T), remaining).wait_s > 0
    return chosen[: int(waits.argmax())] if waits.any() else chosen


def _columns(sites: Sequence[tuple[Site, float]]) -> tuple[Figures, Numbers]:
    """Return the figures and remaining lengths of sites, each with its share of the queue ahead."""
    values = np.array([figures(site, site.credit, share) for site, share in sites])
    return Figures(*values.T), np.array([remaining_row(site) for site, _ in sites])
