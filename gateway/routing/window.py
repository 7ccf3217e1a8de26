"""A window of queries assigned jointly: the MICO paper's algorithm (section 3.3), linear in the queries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

import numpy as np

from gateway.routing.demand import Demand
from gateway.routing.filters import may
from gateway.routing.fleet import Fleet

BUCKETS = 10
GATHER_S = 0.003
"""Of a burst, what comes within so long is assigned jointly."""


class Gathered(NamedTuple):
    """`place` is called once, with a site's name or None: decide it alone."""

    demand: Demand
    place: Callable[[str | None], None]


class Window:
    """What comes in a burst while every site is full, until it is assigned jointly.

    A query that nobody came shortly before, or that a free slot waits for, is not kept.
    """

    def __init__(self) -> None:
        self._gathered: list[Gathered] = []
        self._came_s = -inf

    def keeps(self, demand: Demand, fleet: Fleet, now_s: float) -> bool:
        """Whether a query that comes now should wait for others. Call it once for each."""
        follows, self._came_s = now_s - self._came_s <= GATHER_S, now_s
        at = fleet.figures
        return follows and not np.count_nonzero(may(demand, fleet, at, now_s) & (at.held < at.slots))

    def add(self, gathered: Gathered) -> bool:
        """Whether it is the first: then `close` is due in `GATHER_S`."""
        self._gathered.append(gathered)
        return len(self._gathered) == 1

    def close(self, fleet: Fleet, now_s: float) -> None:
        """Longest first, so that each site hears of what takes longest before the rest."""
        gathered, self._gathered = self._gathered, []
        sites: list[str | None] = [None] * len(gathered)
        order = sorted(range(len(gathered)), key=lambda index: -gathered[index].demand.response_tokens)
        try:
            sites = together([each.demand for each in gathered], fleet, now_s)
        finally:  # whatever went wrong, nobody waits for a window that has closed
            for index in order:
                gathered[index].place(sites[index])


def together(demands: Sequence[Demand], fleet: Fleet, now_s: float) -> list[str | None]:
    """Each demand's site where they are assigned jointly, None where fewer want the same than there are slots
    for it: what each of a few adds to the KV of a site, and to its queue, the policy knows better.

    A prompt counts as the response tokens that a site could generate in the time it takes.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, demand in enumerate(demands):
        alike.setdefault((demand.model, demand.needs, demand.regions), []).append(index)
    sites: list[str | None] = [None] * len(demands)
    at = fleet.figures
    for indices in alike.values():
        places = np.flatnonzero(may(demands[indices[0]], fleet, at, now_s))
        if not len(places) or len(indices) < at.slots[places].sum():
            continue
        speeds = (at.slots * at.weight / at.iteration_s)[places]
        of_prompt = float((at.per_token_s[places] * speeds).mean())
        work = [
            demands[index].response_tokens + of_prompt * demands[index].prompt_tokens for index in indices
        ]
        tokens = (at.running_tokens + at.pending_tokens)[places]
        loads = tokens + at.prefill_s[places] * speeds
        chosen = assign(work, speeds.tolist(), loads.tolist())
        for index, place in zip(indices, chosen, strict=True):
            sites[index] = fleet.sites[int(places[place])].name
    return sites


def assign(
    lengths: Sequence[float],
    speeds: Sequence[float],
    loads: Sequence[float] | None = None,
    *,
    buckets: int = BUCKETS,
) -> list[int]:
    """For each query the index of its site. `lengths`: predicted tokens; `loads`: M_k before this window.

    Queries are grouped by bucket of length, longest group first. A group is spread evenly, in proportion to
    the sites' speeds; one that does not come out even borrows from the next. Within a group the site with the
    least M_k for its speed is served first, so that it gets the longest.
    """
    tokens = list(loads) if loads is not None else [0.0] * len(speeds)
    sites = [0] * len(lengths)
    for group in _groups(lengths, len(speeds), buckets):
        order = sorted(range(len(speeds)), key=lambda site: tokens[site] / speeds[site])
        for query, site in zip(group, _turns(len(group), speeds, order), strict=True):
            sites[query] = site
            tokens[site] += lengths[query]
    return sites


def _groups(lengths: Sequence[float], sites: int, buckets: int) -> Iterator[list[int]]:
    """Queries by bucket, longest first, each group filled up from the next to a multiple of the sites."""
    by_bucket: list[list[int]] = [[] for _ in range(buckets)]
    width = (max(lengths, default=0.0) or 1.0) / buckets  # of lines that will be refused nothing is expected
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
    """`count` turns in rounds over the sites in `order`; each gets its share by speed, give or take one."""
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
