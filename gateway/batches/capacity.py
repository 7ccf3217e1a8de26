"""How many lines of batches the sites have room for now, and which line goes where. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from gateway.domain import Site, SiteState
from gateway.routing.failover import NATIVE
from gateway.routing.filters import STALE_AFTER_S
from gateway.routing.window import assign

AHEAD_SHARE: Final = 0.25
"""Lines that wait at one of our own sites, so that no slot idles until the next report: there an interactive
query goes before them all, and takes the slot of a running line where there is no other."""
KEPT_FREE_SHARE: Final = 0.25
"""Slots left to interactive queries at a site that can't take one back from a batch."""


def room(
    sites: Sequence[Site], model: str, starting: Mapping[str, int], now_s: float
) -> list[tuple[Site, int]]:
    """The sites that could start lines for this model, with how many. `starting`: those on their way."""
    free = [(site, spare(site) - starting.get(site.name, 0)) for site in sites if _may(site, model, now_s)]
    return [(site, lines) for site, lines in free if lines > 0]


def spare(site: Site) -> int:
    slots, load = site.identity.slots, site.load
    held = load.running + load.pending + site.credit.requests
    if site.identity.engine == NATIVE:
        return slots + max(1, int(slots * AHEAD_SHARE)) - held
    return slots - max(1, int(slots * KEPT_FREE_SHARE)) - held if slots > 1 else slots - held


def share(free: Sequence[tuple[Site, int]], sharers: int) -> int:
    """How many lines one of several batches may start: what is free, divided, at least one."""
    return -(-sum(lines for _, lines in free) // max(1, sharers))


def spread(lengths: Sequence[float], free: Sequence[tuple[Site, int]]) -> list[str]:
    """For each line of a window the site it should run on: the paper's joint assignment, where a site counts
    by what it has free.
    """
    loads = [site.load.token_load + site.credit.response_tokens for site, _ in free]
    places = assign(lengths, [float(lines) for _, lines in free], loads)
    return [free[place][0].name for place in places]


def _may(site: Site, model: str, now_s: float) -> bool:
    return (
        site.state is SiteState.READY
        and site.weight > 0
        and now_s - site.load.received_s <= STALE_AFTER_S
        and model in site.identity.models
        and model not in site.pinned_off
    )
