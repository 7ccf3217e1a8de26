"""Laws of simulated machines, which production's scaler starts and stops while queries come."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.scaling.plan import PoolPlan, ScalingPlan
from mico.simulation.day import DAY_S, times_s
from mico.simulation.federation import Federation, Outage
from mico.simulation.machines import Scaling, with_spares
from mico.simulation.queries import Query, Record
from mico.simulation.specification import sites_of
from tests.support.simulated import simulate

USD_PER_HOUR = 6.0


def pool(fewest: int, most: int) -> PoolPlan:
    return PoolPlan("aws", "group", most, fewest, USD_PER_HOUR, region="r")


def plan(**pools: PoolPlan) -> ScalingPlan:
    return ScalingPlan(pool=pools, up_after_s=10.0, down_after_s=60.0, every_s=5.0)


def crowd(seconds: float, per_second: float) -> list[Query]:
    return [Query(i, i / per_second, 100, 200) for i in range(int(seconds * per_second))]


def scaled(
    queries: list[Query], sites: str, pools: ScalingPlan, start_s: float, *lost: Outage
) -> tuple[list[Record], Federation]:
    specs = tuple(with_spares(sites_of(sites), pools))
    outages = tuple(
        replace(each, site=spec.name) for each in lost for spec in specs if spec.region == each.site
    )
    return simulate(queries, specs, scaling=Scaling(pools, start_s), outages=outages)


def test_a_pool_grows_with_its_load_and_a_new_machine_serves_after_its_start() -> None:
    queries = crowd(120, 3)
    records, federation = scaled(queries, "1x4~5=a", plan(a=pool(1, 5)), 30.0)
    assert federation.machines is not None
    assert federation.machines.pools["a"].most > 1
    begun_s = {}
    for record in records:
        begun_s.setdefault(record.site, record.query.arrival_s + record.first_token_s)
    assert len(begun_s) > 1
    assert all(at_s > 30.0 for site, at_s in begun_s.items() if site != "s0000")
    hours = (queries[-1].arrival_s + records[-1].finish_s) / 3600
    assert hours * USD_PER_HOUR < federation.machines.usd() < 5 * hours * USD_PER_HOUR


def test_a_pool_shrinks_to_its_fewest_and_the_rest_costs_nothing() -> None:
    late = [Query(n, 500.0 + 400.0 * n, 10, 10) for n in range(3)]
    _, federation = scaled(late, "4x4~5=a", plan(a=pool(1, 4)), 30.0)
    assert federation.machines is not None
    assert len(federation.machines.pools["a"].serving) == 1
    whole = 4 * 1300 / 3600 * USD_PER_HOUR
    assert federation.machines.usd() < whole / 2


def test_while_a_cloud_is_lost_another_grows_and_the_lost_machines_cost_nothing() -> None:
    queries, pools = crowd(220, 2), plan(a=pool(2, 2), b=pool(1, 6))
    records, federation = scaled(queries, "2x4~5=a,1x4~50=b", pools, 20.0, Outage("a", 60.0, 160.0))
    calm_records, calm = scaled(queries, "2x4~5=a,1x4~50=b", pools, 20.0)
    assert not [record for record in (*records, *calm_records) if record.finish_s != record.finish_s]
    assert federation.machines is not None and calm.machines is not None
    assert federation.machines.pools["b"].most > calm.machines.pools["b"].most
    paid = federation.machines.pools["a"].hours(), calm.machines.pools["a"].hours()
    assert paid[1] - paid[0] == pytest.approx(2 * 100 / 3600, rel=0.1)
    back = [
        record for record in records if record.query.arrival_s > 180 and record.site in {"s0000", "s0001"}
    ]
    assert back, "the machines come back"


@settings(max_examples=8, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(0, 4),
    st.floats(0.2, 4),
    st.floats(0, 30),
    st.tuples(st.floats(1, 30), st.floats(1, 30)),
)
def test_every_query_ends_and_no_pool_has_more_machines_than_its_most(
    fewest: int, more: int, per_second: float, start_s: float, lost: tuple[float, float]
) -> None:
    pools = plan(a=pool(fewest, fewest + more))
    outage = Outage("a", lost[0], sum(lost))
    sites = f"{fewest}x4=a,1x4=rest"
    records, federation = scaled(crowd(30, per_second), sites, pools, start_s, outage)
    assert not [record for record in records if record.finish_s != record.finish_s]
    assert federation.machines is not None
    assert federation.machines.pools["a"].most <= fewest + more
    for site in federation.sites.values():
        assert (len(site.running), site.pending, site.kv_used) == (0, 0, 0)


def test_a_day_has_nine_times_as_many_arrivals_by_day_as_by_night() -> None:
    arrivals_s = times_s(200_000, np.random.default_rng(0))
    assert (np.diff(arrivals_s) >= 0).all() and arrivals_s[0] >= 0 and arrivals_s[-1] <= DAY_S
    hours = np.histogram(arrivals_s, bins=24, range=(0, DAY_S))[0]
    by_night, by_day = hours[1:3].mean(), hours[13:15].mean()
    assert by_day / by_night == pytest.approx(9.0, rel=0.1)
