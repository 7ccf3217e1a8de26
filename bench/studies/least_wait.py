"""Compute the least wait per token that any order could reach, by its limit on the longest waits.

    python -m bench.studies.least_wait [--trace poisson] [--sites 3] [--load 1.1] [--forecast]

Knows every arrival and length beforehand, and takes the slots of all sites for one pool that starts work at
the pace of its capacity: a linear programme over how many of each size that came in each interval start when.
`--forecast`: sizes are the forecast ones, and those within a tenth of all count as equal.
A wait within an interval counts as none, so all is somewhat better than could be. Needs scipy.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_matrix, hstack, vstack

from bench.matrix import Source, forecasts_of, queries_of
from mico.simulation.compare import capacity
from mico.simulation.queries import Query
from mico.simulation.specification import sites_of
from mico.simulation.workloads import at_rate
from site_engine.core.request_queue import PROMPT_TOKEN_WORK

Numbers = NDArray[np.float64]
CLASSES = 10
INTERVALS = 10
"""In the longest wait of FCFS."""
TAIL = 0.01
TIMES = (1.2, 1.5, 2.0)


class Crowd(NamedTuple):
    """Queries in order of arrival. `size`: an order's knowledge of their lengths."""

    arrival_s: Numbers
    tokens: Numbers
    work: Numbers
    size: Numbers
    per_second: float  # work
    ahead: float  # work that has started and isn't done when all slots are full


class Starts(NamedTuple):
    """One variable for each class, arrival interval and delay: the number of queries that start so much
    later.
    """

    group: NDArray[np.intp]
    came: NDArray[np.intp]
    start: NDArray[np.intp]
    wait_s: Numbers
    work: Numbers  # of one
    per_token: Numbers  # the wait of one
    counts: Numbers  # of each group


def crowd(queries: Sequence[Query], lengths: Numbers, slots: int, per_second: float) -> Crowd:
    """Make a crowd. `lengths`: of the answers, as an order knows them; `per_second`: queries that the sites
    can answer.
    """
    tokens = np.array([query.response_tokens for query in queries], dtype=float)
    prompt_work = PROMPT_TOKEN_WORK * np.array([query.prompt_tokens for query in queries])
    work, sizes = tokens + prompt_work, lengths * (lengths + prompt_work)
    ahead = slots * float((work**2).mean() / (2 * work.mean()))
    arrival_s = np.array([query.arrival_s for query in queries])
    return Crowd(arrival_s, tokens, work, sizes, per_second * float(work.mean()), ahead)


def first_come(of: Crowd) -> Numbers:
    """Return the wait of each query until its work fits beside that of those before it."""
    waits, free_s = np.zeros(len(of.work)), -np.inf
    for place, (arrival_s, work) in enumerate(zip(of.arrival_s, of.work, strict=True)):
        free_s = max(free_s, arrival_s - of.ahead / of.per_second) + work / of.per_second
        waits[place] = max(0.0, free_s - arrival_s)
    return waits


def online(of: Crowd, max_wait_s: Numbers, size: Numbers) -> Numbers:
    """Return the waits if nobody knows the future: queries that have waited `max_wait_s` go first, in that
    order, else the smallest.
    """
    due_s, count, came, free_s = of.arrival_s + max_wait_s, len(of.work), 0, -np.inf
    by_size: list[tuple[float, int]] = []
    by_due: list[tuple[float, int]] = []
    waits = np.full(count, np.nan)
    for begun in range(count):
        while came < count and (came == begun or of.arrival_s[came] <= free_s):
            heappush(by_size, (float(size[came]), came))
            heappush(by_due, (float(due_s[came]), came))
            came += 1
        for heap in (by_size, by_due):
            while not np.isnan(waits[heap[0][1]]):
                heappop(heap)
        first = (by_due if by_due[0][0] <= free_s else by_size)[0][1]
        free_s = max(free_s, of.arrival_s[first] - of.ahead / of.per_second)
        free_s += of.work[first] / of.per_second
        waits[first] = max(0.0, free_s - of.arrival_s[first])
    return waits


def starts(of: Crowd, interval_s: float, intervals: int) -> Starts:
    """Enumerate the variables; the longest 2% are a class of their own."""
    came = (of.arrival_s / interval_s).astype(np.intp)
    ranks = np.argsort(np.argsort(of.size, kind="stable")) / len(of.size)
    classes = np.where(ranks >= 1 - 2 * TAIL, CLASSES, (ranks * CLASSES).astype(int))
    groups, place, counts = np.unique(came * (CLASSES + 1) + classes, return_inverse=True, return_counts=True)
    work = np.bincount(place, of.work) / counts
    inverse = np.array([(1 / of.tokens[classes == each]).mean() for each in range(CLASSES + 1)])
    later = intervals - groups // (CLASSES + 1)
    group = np.repeat(np.arange(len(groups)), later)
    waited = np.concatenate([np.arange(each) for each in later])
    of_class, came = groups[group] % (CLASSES + 1), groups[group] // (CLASSES + 1)
    wait_s = waited * interval_s
    return Starts(
        group, came, came + waited, wait_s, work[group], wait_s * inverse[of_class], counts.astype(float)
    )


class Bound(NamedTuple):
    mean: float
    p99: float
    p99_wait_s: float
    longest_s: float


def least(
    of: Crowd,
    each: Starts,
    interval_s: float,
    *,
    p99_wait_s: float = np.inf,
    max_wait_s: Numbers | float = np.inf,
) -> Bound:
    """Minimise the mean wait per token. `p99_wait_s`: at most one in a hundred waits longer; `max_wait_s`: no
    query of these variables does.
    """
    intervals, many = int(each.start.max()) + 1, len(each.wait_s)
    steps = np.arange(intervals)
    # starts ahead of the capacity, one more variable an interval: before + started - capacity
    balance = coo_matrix((each.work, (each.start, np.arange(many))), (intervals, many))
    change = coo_matrix((np.ones(intervals - 1), (steps[1:], steps[:-1])), (intervals, intervals))
    change = change - coo_matrix((np.ones(intervals), (steps, steps)), (intervals, intervals))
    late = np.concatenate([each.wait_s > p99_wait_s, np.zeros(intervals)])[None, :]
    all_start = coo_matrix((np.ones(many), (each.group, np.arange(many))), (len(each.counts), many))
    highest = np.where(each.wait_s > max_wait_s + 1e-6, 0.0, np.inf)
    found: Any = linprog(
        np.concatenate([each.per_token, np.zeros(intervals)]),
        A_ub=vstack([hstack([balance, change]), coo_matrix(late)]).tocsr(),
        b_ub=[*np.full(intervals, of.per_second * interval_s), TAIL * len(of.work)],
        A_eq=hstack([all_start, coo_matrix((len(each.counts), intervals))]).tocsr(),
        b_eq=each.counts,
        bounds=[*((0.0, most) for most in highest), *([(0.0, of.ahead)] * intervals)],
        method="highs-ipm",
    )
    if found.status:
        raise SystemExit(f"no order was found: {found.message}")
    number = found.x[:many]
    return Bound(
        float(number @ each.per_token) / len(of.work),
        _p99(each.per_token, number),
        _p99(each.wait_s, number),
        float(each.wait_s[number > 1e-6].max()),
    )


def _p99(values: Numbers, number: Numbers) -> float:
    order = np.argsort(values)
    passed = np.cumsum(number[order])
    return float(values[order][np.searchsorted(passed, (1 - TAIL) * passed[-1] - 1e-3)])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", default="poisson")
    parser.add_argument("--part", type=int, default=0, help="as in bench.matrix")
    parser.add_argument("--sites", default="3")
    parser.add_argument("--load", type=float, default=1.1)
    parser.add_argument("--data", type=Path, default=Path("data"), help="has the corpus, and traces/")
    parser.add_argument("--forecast", action="store_true", help="not by length but by its forecast")
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    source, specs = Source(arguments.data, 4000, 3), sites_of(arguments.sites)
    most = min(spec.kv_tokens for spec in specs)
    every = queries_of(arguments.trace, arguments.part, source)
    fitting = [query for query in every if query.prompt_tokens + query.response_tokens <= most]
    per_second = capacity(fitting, specs)
    queries = at_rate(fitting, arguments.load * per_second)
    lengths = np.array([query.response_tokens for query in queries], dtype=float)
    if arguments.forecast:
        forecasts = forecasts_of(arguments.trace, arguments.part, source, "shipped")
        lengths = np.array([forecasts[query.number].typical for query in queries])
    of = crowd(queries, lengths, sum(spec.slots for spec in specs), per_second)
    print("| | mean wait s/token | p99 | p99 wait s | longest wait s |\n|---|---|---|---|---|")
    for name, found in table(of):
        figures = f"{found.mean:.4f} | {found.p99:.3f} | {found.p99_wait_s:.1f} | {found.longest_s:.1f}"
        print(f"| {name} | {figures} |")


def table(of: Crowd) -> Iterator[tuple[str, Bound]]:
    waits = first_come(of)
    interval_s = float(waits.max()) / INTERVALS
    intervals = ceil((of.arrival_s[-1] + 1.6 * waits.max()) / interval_s) + 2
    each = starts(of, interval_s, intervals)
    fair = np.zeros(intervals)  # the longest wait of an interval's arrivals
    np.maximum.at(fair, (of.arrival_s / interval_s).astype(np.intp), waits)
    fcfs = bound_of(of, waits)
    yield "first come first served", fcfs
    yield "nothing asked", least(of, each, interval_s)
    yield "p99 wait as FCFS", least(of, each, interval_s, p99_wait_s=fcfs.p99_wait_s)
    yield "longest wait as FCFS", least(of, each, interval_s, max_wait_s=float(waits.max()) + interval_s)
    for times in TIMES:
        found = least(of, each, interval_s, max_wait_s=times * fair[each.came] + interval_s)
        yield f"each up to {times} times as in FCFS", found
    for times in (1.0, *TIMES):
        yield (
            f"the same up to {times} times, the future unknown",
            bound_of(of, online(of, times * waits, of.size)),
        )
    yield (
        "nothing asked, the future unknown",
        bound_of(of, online(of, np.full_like(waits, np.inf), of.size)),
    )
    longest = of.size >= np.quantile(of.size, 1 - TAIL)
    others = first_come(of._replace(work=np.where(longest, 0.0, of.work)))
    size, max_wait_s = np.where(longest, np.inf, of.size), np.where(longest, np.inf, 1.5 * others)
    yield "1.5 times, the longest 1% when nobody else waits", bound_of(of, online(of, max_wait_s, size))


def bound_of(of: Crowd, waits: Numbers) -> Bound:
    per_token = waits / of.tokens
    p99, p99_wait_s = (float(np.quantile(each, 1 - TAIL)) for each in (per_token, waits))
    return Bound(float(per_token.mean()), p99, p99_wait_s, float(waits.max()))


if __name__ == "__main__":
    main()
