"""Assign a window of queries jointly: the MICO paper's algorithm (section 3.3), in time linear in queries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

import numpy as np

from gateway.routing.demand import Demand
from gateway.routing.filters import allowed_sites
from gateway.routing.fleet import Fleet
from gateway.routing.prefixes import Cached

BUCKETS = 10
WINDOW_S = 0.003
"""Queries of a burst that arrive within this time, in seconds, are assigned jointly."""


class WindowEntry(NamedTuple):
    """A query that waits to be assigned. `place` is called once, with the name of the assigned site, or with
    None if the query is to be decided alone.
    """

    demand: Demand
    place: Callable[[str | None], None]


class AssignmentWindow:
    """Collects queries that arrive in a burst while every site is full, and assigns them jointly.

    A query does not wait if none arrived within WINDOW_S before it, or if a slot is free for it.
    """

    def __init__(self) -> None:
        self._entries: list[WindowEntry] = []
        self._last_arrival_s = -inf

    def should_wait(self, demand: Demand, fleet: Fleet, now_s: float) -> bool:
        """Return whether a query that arrives now should wait for others. Must be called once per query."""
        follows, self._last_arrival_s = now_s - self._last_arrival_s <= WINDOW_S, now_s
        at = fleet.figures
        free = at.requests < at.slots
        return follows and not np.count_nonzero(allowed_sites(demand, fleet, at, now_s) & free)

    def add(self, entry: WindowEntry) -> bool:
        """Add a query. Return True for the first one, after which `close` must be called in WINDOW_S."""
        self._entries.append(entry)
        return len(self._entries) == 1

    def close(self, fleet: Fleet, now_s: float) -> None:
        """Place every query, longest first, so that each site receives its longest queries first."""
        entries, self._entries = self._entries, []
        sites: list[str | None] = [None] * len(entries)
        order = sorted(range(len(entries)), key=lambda index: -entries[index].demand.response_tokens)
        try:
            sites = assign_jointly([each.demand for each in entries], fleet, now_s)
        finally:  # also on an error: no query may wait for a window that has closed
            for index in order:
                entries[index].place(sites[index])


def assign_jointly(demands: Sequence[Demand], fleet: Fleet, now_s: float) -> list[str | None]:
    """Return the site of each demand, or None for demands of a kind that is fewer than its sites have slots.
    The policy places a few demands better, as it considers each site's KV memory and queue.

    A prompt counts as the response tokens that a site could generate in the time of the prompt's prefill.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, demand in enumerate(demands):
        alike.setdefault((demand.model, demand.needs, demand.regions, demand.limits), []).append(index)
    sites: list[str | None] = [None] * len(demands)
    at = fleet.figures
    for indices in alike.values():
        places = np.flatnonzero(allowed_sites(demands[indices[0]], fleet, at, now_s))
        if not len(places) or len(indices) < at.slots[places].sum():
            continue
        speeds = (at.slots * at.weight / at.iteration_s)[places]
        of_prompt = float((at.per_token_s[places] * speeds).mean())
        work = [
            demands[index].response_tokens + of_prompt * demands[index].prompt_tokens for index in indices
        ]
        tokens = (at.running_tokens + at.pending_tokens)[places]
        loads = tokens + at.prefill_s[places] * speeds
        index_of: dict[int | None, int] = {place: index for index, place in enumerate(places.tolist())}
        cached = [_cached_tokens(demands[index].cached, fleet, index_of) for index in indices]
        chosen = assign(work, speeds.tolist(), loads.tolist(), cached=cached)
        for index, place in zip(indices, chosen, strict=True):
            sites[index] = fleet.sites[int(places[place])].name
    return sites


def assign(
    lengths: Sequence[float],
    speeds: Sequence[float],
    loads: Sequence[float] | None = None,
    *,
    buckets: int = BUCKETS,
    cached: Sequence[Mapping[int, float]] = (),
) -> list[int]:
    """Return the index of the site of each query. `lengths`: predicted tokens per query. `loads`: M_k of each
    site before this window. `cached`: for each query, the tokens that sites have cached, by site index.

    Queries are grouped by bucket of length, longest group first. A group is distributed in proportion to the
    sites' speeds, after it is filled from the next group to a multiple of the sites. Within a group, the site
    with the least M_k relative to its speed is served first and so gets the longest query, unless sites are
    exchanged so that queries go where their prefix is cached.
    """
    tokens = list(loads) if loads is not None else [0.0] * len(speeds)
    sites = [0] * len(lengths)
    for group in _groups(lengths, len(speeds), buckets):
        order = sorted(range(len(speeds)), key=lambda site: tokens[site] / speeds[site])
        turns = list(_turns(len(group), speeds, order))
        if cached:
            turns = _exchanged(turns, [cached[query] for query in group])
        for query, site in zip(group, turns, strict=True):
            sites[query] = site
            tokens[site] += lengths[query]
    return sites


def _exchanged(turns: list[int], cached: Sequence[Mapping[int, float]]) -> list[int]:
    """Exchange sites within a group of queries of similar length, so that queries go to sites that have their
    prefix cached, longest cached prefix first. Each site keeps its number of queries.
    """
    wishes = sorted(
        ((tokens, index, site) for index, each in enumerate(cached) for site, tokens in each.items()),
        key=lambda wish: -wish[0],
    )
    if not wishes:
        return turns
    left, granted = Counter(turns), dict[int, int]()
    for _, index, site in wishes:
        if left[site] and index not in granted:
            granted[index] = site
            left[site] -= 1
    taken, others = Counter(granted.values()), []
    for site in turns:
        if taken[site]:
            taken[site] -= 1
        else:
            others.append(site)
    rest = iter(others)
    return [granted[index] if index in granted else next(rest) for index in range(len(turns))]


def _cached_tokens(cached: Cached, fleet: Fleet, index_of: Mapping[int | None, int]) -> dict[int, float]:
    """Return the cached tokens by site index, for the sites that have more than `cached.elsewhere`."""
    return {
        index_of[place]: tokens
        for site, tokens in cached.by_site.items()
        if tokens > cached.elsewhere and (place := fleet.place(site)) in index_of
    }


def _groups(lengths: Sequence[float], sites: int, buckets: int) -> Iterator[list[int]]:
    """Yield the queries in groups, one per bucket, longest first. Each group is filled from the next to a
    multiple of the number of sites.
    """
    by_bucket: list[list[int]] = [[] for _ in range(buckets)]
    width = (max(lengths, default=0.0) or 1.0) / buckets  # lines that will be refused have length 0
    for query, length in enumerate(lengths):
        by_bucket[min(buckets - 1, int(length / width))].append(query)
    by_bucket.reverse()
    queries = [query for group in by_bucket for query in group]
    at = 0
    for end in accumulate(map(len, by_bucket)):
        if end > at:
            whole_rounds = -(-(end - at) // sites) * sites
            yield queries[at : at + whole_rounds]
            at += whole_rounds


def _turns(count: int, speeds: Sequence[float], order: Sequence[int]) -> Iterator[int]:
    """Yield `count` sites, in rounds over `order`. Each gets its share by speed, give or take one."""
    exact = [count * speed / sum(speeds) for speed in speeds]
    left = [int(share) for share in exact]
    short = count - sum(left)
    for site in sorted(order, key=lambda site: left[site] - exact[site])[:short]:
        left[site] += 1
    going = [site for site in order if left[site]]
    while going:
        for site in going:
            left[site] -= 1
            yield site
        going = [site for site in going if left[site]]
