"""Decides how many lines of batches the sites can start now, and on which site each line runs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from gateway.domain import Site, SiteState
from gateway.routing.failover import NATIVE
from gateway.routing.filters import is_stale
from gateway.routing.window import assign

QUEUED_SHARE: Final = 0.25
"""Lines that wait at a native site, as a share of its slots, so that no slot idles until the next report. An
interactive query goes before them all there, and takes the slot of a running line if no other is free."""
RESERVED_SHARE: Final = 0.25
"""Share of slots left to interactive queries at a site that can't take a slot back from a batch."""

MAX_AT_ONCE: Final = 4096
"""Lines that one replica runs at once however many slots the sites have: each takes memory here."""


class SiteCapacity(NamedTuple):
    """`lines`: the number of lines that the site can start now."""

    site: Site
    lines: int


class Sharing(NamedTuple):
    """How batches share this process and the sites of one of them.

    `replica`: number of batches that run in this process. `sites`: number of batches, this one included, that
    start lines at the sites of this one. `taken`: sites left to batches that are late.
    """

    replica: int = 1
    sites: int = 1
    taken: frozenset[str] = frozenset()


def available(
    sites: Sequence[Site], model: str, starting: Mapping[str, int], now_s: float
) -> list[SiteCapacity]:
    """Return the sites that can start lines for `model`. `starting`: lines already on their way, by site."""
    capacities = [
        SiteCapacity(site, startable_lines(site) - starting.get(site.name, 0))
        for site in sites
        if can_serve(site, model, now_s)
    ]
    return [capacity for capacity in capacities if capacity.lines > 0]


def startable_lines(site: Site) -> int:
    """Return how many lines the site can start, by its last report and what was assigned since."""
    load = site.load
    return _most_lines(site) - load.running - load.pending - site.credit.requests


def lines_at_once(sites: Sequence[Site], model: str) -> int:
    """Return how many lines may run: as many as all sites of a model take, within 1 and MAX_AT_ONCE."""
    taken = sum(_most_lines(site) for site in sites if model in site.identity.models)
    return max(1, min(taken, MAX_AT_ONCE))


def lines_of_batch(sites: Sequence[Site], model: str, sharing: Sharing, at_least: int) -> int:
    """Return how many lines of one batch may run: its share of what its sites take, within its share of
    MAX_AT_ONCE; `at_least` is for all batches of this replica.
    """
    share = min(lines_at_once(sites, model) // sharing.sites, MAX_AT_ONCE // sharing.replica)
    return max(at_least // sharing.replica, share)


def lines_waiting(sites: Sequence[Site], model: str) -> int:
    """Return how many queries wait at the sites of a model, by their last reports."""
    return sum(site.load.pending for site in sites if model in site.identity.models)


def _most_lines(site: Site) -> int:
    slots = site.identity.slots
    if site.identity.engine == NATIVE:
        return slots + max(1, int(slots * QUEUED_SHARE))
    return slots - max(1, int(slots * RESERVED_SHARE)) if slots > 1 else slots


def fair_share(capacities: Sequence[SiteCapacity], batches: int) -> int:
    """Return how many lines one of several batches may start: an equal share of all, rounded up."""
    return -(-sum(lines for _, lines in capacities) // max(1, batches))


def assign_sites(lengths: Sequence[float], capacities: Sequence[SiteCapacity]) -> list[str]:
    """Return the site name for each line, by the paper's joint assignment weighted by capacity.

    `lengths`: expected response tokens per line.
    """
    loads = [site.load.token_load + site.credit.response_tokens for site, _ in capacities]
    places = assign(lengths, [float(lines) for _, lines in capacities], loads)
    return [capacities[place].site.name for place in places]


def can_serve(site: Site, model: str, now_s: float) -> bool:
    """Return whether lines may be sent to the site, once it has room."""
    return (
        site.state is SiteState.READY
        and site.weight > 0
        and not is_stale(site.load, now_s)
        and model in site.identity.models
        and model not in site.pinned_off
    )
