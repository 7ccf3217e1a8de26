"""The bound on orders: a stricter limit on the longest waits never makes the mean better, and FCFS keeps to
all.
"""

from __future__ import annotations

import numpy as np
import pytest

from bench.studies.least_wait import crowd, first_come, online, table
from mico.simulation.queries import Query


def overload(seed: int) -> list[Query]:
    random = np.random.default_rng(seed)
    lengths = np.maximum(1, random.exponential(50.0, 150)).astype(int).tolist()
    arrivals = np.cumsum(random.exponential(1.0, 150)).tolist()
    return [Query(n, at, 0, length) for n, (at, length) in enumerate(zip(arrivals, lengths, strict=True))]


def test_first_come_waits_for_the_work_that_came_before() -> None:
    of = crowd([Query(n, 0.0, 0, 10) for n in range(4)], np.full(4, 10.0), slots=0, per_second=0.5)
    assert first_come(of).tolist() == pytest.approx([2.0, 4.0, 6.0, 8.0])


def test_who_may_not_wait_at_all_is_served_as_it_came() -> None:
    queries = overload(0)
    of = crowd(queries, np.array([float(query.response_tokens) for query in queries]), 2, 0.8)
    assert online(of, np.zeros(len(queries)), of.size).tolist() == pytest.approx(first_come(of).tolist())


@pytest.mark.parametrize("seed", range(2))
def test_more_asked_of_the_longest_waits_costs_the_mean(seed: int) -> None:
    queries = overload(seed)
    lengths = np.array([query.response_tokens for query in queries], dtype=float)
    found = dict(table(crowd(queries, lengths, slots=2, per_second=0.8)))
    fcfs, free = found["first come first served"], found["nothing asked"]
    assert free.mean <= found["p99 wait as FCFS"].mean * 1.001
    assert free.mean <= found["longest wait as FCFS"].mean * 1.001
    times = [found[f"each up to {times} times as in FCFS"].mean for times in (2.0, 1.5, 1.2)]
    assert times == sorted(times)
    assert times[-1] < fcfs.mean
    assert found["longest wait as FCFS"].longest_s <= 1.2 * fcfs.longest_s
