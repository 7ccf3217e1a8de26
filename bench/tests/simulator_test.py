"""The benchmark of the simulator, in small: each query of each part is answered."""

from __future__ import annotations

from bench.simulator import arrivals, burst, loss, size


def test_drawn_queries_are_the_same_again_and_come_in_order() -> None:
    first, again = (list(arrivals(1_500, 100.0, 1)) for _ in range(2))
    assert [query for query, _ in first] == [query for query, _ in again]
    times_s = [query.arrival_s for query, _ in first]
    assert times_s == sorted(times_s)
    assert [query.number for query, _ in first] == list(range(1_500))


def test_every_query_of_every_part_is_answered() -> None:
    found = size(200, sites=10, gateways=5)
    assert (found["answered"], len(found["cpu_ms_and_peak_mib_by_part"])) == (200, 20)
    lost = loss(300, sites=12)
    assert lost["lost"] == 0
    assert sum(lost["by_tries"].values()) == 300
    assert lost["by_tries"][2] > 0, "some of the lost sites had work"
    assert 0.5 < burst(10, 4, "mico", seed=7)["jain_of_share_over_speed"] <= 1.0
