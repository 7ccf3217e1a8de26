"""A window of queries assigned jointly: the MICO paper's algorithm (section 3.3), linear in the queries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

BUCKETS = 10


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
    width = max(lengths, default=1.0) / buckets
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
