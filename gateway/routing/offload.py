"""Which pending queries an idle site should take from others. The negotiation is federation/offloading.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gateway.domain import Credit, Site
from gateway.routing.demand import Demand
from gateway.routing.estimate import estimate
from gateway.routing.filters import why_not

MOST_MOVES = 3
"""A query changes its site at most so often: no ping-pong, whatever the estimates say."""
LEAST_GAIN_S = 0.05
LEAST_GAIN_SHARE = 0.2
"""A move must save this much time, and this share of the wait: estimates err, and moving is not free."""


class Pending(NamedTuple):
    """An attempt that was assigned to `site` and has not started there, as far as this gateway knows."""

    attempt_id: str
    site: str
    demand: Demand
    moves: int


def wins(bidder: Site, pending: Sequence[Pending], sites: Mapping[str, Site], now_s: float) -> list[Pending]:
    """The attempts that would finish sooner at the bidder, as many as it has room for, greatest gain first.

    A site starts short queries first, so a pending attempt waits behind those of its site that are shorter.
    """
    room = bidder.identity.slots - bidder.load.running - bidder.load.pending - bidder.credit.requests
    if room <= 0:
        return []
    gains = []
    for site, waiting in _queues(bidder, pending, sites, now_s).items():
        for rank, each in enumerate(waiting):
            here = estimate(each.demand, sites[site], now_s, share_ahead=rank / len(waiting))
            there = estimate(each.demand, bidder, now_s)
            gain_s = here.finish_s - there.finish_s - bidder.rtt_s
            if gain_s > max(LEAST_GAIN_S, LEAST_GAIN_SHARE * here.wait_s):
                gains.append((gain_s, each))
    gains.sort(key=lambda pair: -pair[0])
    return _that_start_at_once(bidder, [each for _, each in gains[:room]], now_s)


def _queues(
    bidder: Site, pending: Sequence[Pending], sites: Mapping[str, Site], now_s: float
) -> dict[str, list[Pending]]:
    """What may move, by the site it waits at, in the order it is expected to start there."""
    queues: dict[str, list[Pending]] = {}
    for each in sorted(pending, key=lambda each: each.demand.response_tokens):
        stays = each.site == bidder.name or each.site not in sites or each.moves >= MOST_MOVES
        if not stays and why_not(each.demand, bidder, now_s) is None:
            queues.setdefault(each.site, []).append(each)
    return queues


def _that_start_at_once(bidder: Site, chosen: Sequence[Pending], now_s: float) -> list[Pending]:
    """Each is counted against the bidder before the next is looked at."""
    taken = []
    for each in chosen:
        if estimate(each.demand, bidder, now_s).wait_s == 0:
            bidder = replace(bidder, credit=_and_one(bidder.credit, each.demand))
            taken.append(each)
    return taken


def _and_one(credit: Credit, demand: Demand) -> Credit:
    return Credit(
        credit.requests + 1,
        credit.prompt_tokens + demand.prompt_tokens,
        credit.response_tokens + demand.response_tokens,
    )
