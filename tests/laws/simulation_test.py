"""Laws of the simulated federation, over arbitrary queries, sites and settings."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isnan
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.domain import IterationCost, Lane
from gateway.routing.policies import POLICIES
from mico.simulation.clock import Clock
from mico.simulation.estimators import expectations, point_forecast
from mico.simulation.federation import Federation, Outage, Setting, load_report
from mico.simulation.metrics import ORDERS, jain
from mico.simulation.queries import Query
from mico.simulation.row import ENDLESS, Row
from mico.simulation.site import TOKEN_BUDGET, SimulatedSite
from mico.simulation.specification import SiteSpec, capacity_qps, sites_of
from mico.simulation.view import View
from mico.simulation.workloads import at_rate
from site_engine.core.page_pool import PagePool
from site_engine.core.remaining_curve import RemainingCurve, RemainingPoint
from site_engine.core.request import Request
from site_engine.core.request_queue import AdmissionQueue, least_work
from site_engine.core.scheduler import Scheduler
from tests.support.simulated import LEARNERS, federations, simulate, specs, workloads


@settings(max_examples=60, deadline=None)
@given(
    workloads,
    federations,
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from(sorted(ORDERS)),
    st.sampled_from(sorted(LEARNERS)),
    st.booleans(),
    st.integers(1, 3),
)
def test_every_query_ends_once_and_nothing_is_left_at_a_site(  # noqa: PLR0917  # hypothesis passes by place
    queries: list[Query],
    sites: tuple[SiteSpec, ...],
    policy: str,
    order: str,
    estimator: str,
    offload: bool,
    gateways: int,
) -> None:
    records, federation = simulate(
        queries, sites, policy=policy, order=order, estimator=estimator, offload=offload, gateways=gateways
    )
    assert [record.query for record in records] == queries
    for record in records:
        assert 0 < record.first_token_s <= record.finish_s
        assert record.attempts == record.moves + 1
    for site in federation.sites.values():
        assert (len(site.running), site.pending, site.kv_used) == (0, 0, 0)


@given(
    st.lists(st.tuples(st.integers(0, 900), st.floats(1, 900)), min_size=1, unique_by=lambda point: point[0]),
    st.lists(st.integers(0, 1500), min_size=1),
)
def test_a_row_expects_what_any_request_would(points: list[tuple[int, float]], produced: list[int]) -> None:
    curve = RemainingCurve(tuple(RemainingPoint(at, expected, 1) for at, expected in sorted(points)))
    row = Row("r", 1, curve)
    for row.produced in produced:
        assert row.expected_remaining() == pytest.approx(curve.expected(row.produced))


@settings(max_examples=30, deadline=None)
@given(workloads, federations, st.sampled_from(sorted(POLICIES)))
def test_a_run_repeats_exactly(queries: list[Query], sites: tuple[SiteSpec, ...], policy: str) -> None:
    first, again = (simulate(queries, sites, policy=policy)[0] for _ in range(2))
    assert [(r.first_token_s, r.finish_s, r.site) for r in first] == [
        (r.first_token_s, r.finish_s, r.site) for r in again
    ]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 10_000), st.integers(1, 500), specs)
def test_a_query_alone_takes_its_iterations_and_a_round_trip(
    prompt: int, answer: int, site: SiteSpec
) -> None:
    (record,), _ = simulate([Query(0, 0.0, prompt, answer)], (site,))
    cost, seconds, left, held = site.cost, site.rtt_s, prompt, 0
    while left:
        chunk = min(left, 2048)
        seconds += cost.seconds(1, chunk, held)
        left, held = left - chunk, held + chunk
    assert record.first_token_s == pytest.approx(seconds)
    seconds += sum(cost.seconds(1, 1, prompt + 1 + step) for step in range(answer - 1))
    assert record.finish_s == pytest.approx(seconds)


def test_a_nearer_gateways_queries_see_the_smaller_round_trip() -> None:
    """Queries come to the gateways in turn; each is answered before the next comes."""
    queries = [Query(i, 10.0 * i, 100, 20) for i in range(6)]
    records, _ = simulate(queries, tuple(sites_of("1x8~5+250")), gateways=2)
    alone, _ = simulate(queries[:1], tuple(sites_of("1x8~5")))
    assert len(records) == len(queries)
    for record in records:
        further_s = 0.245 * (record.query.number % 2)
        assert record.first_token_s == pytest.approx(alone[0].first_token_s + further_s)
        assert record.finish_s == pytest.approx(alone[0].finish_s + further_s)


def test_a_report_comes_to_each_gateway_after_half_its_own_round_trip() -> None:
    queries = [Query(i, 10.0 * i, 100, 20) for i in range(6)]
    _, federation = simulate(queries, tuple(sites_of("1x8~5+250+5")), gateways=3)
    near, far, other = (each.view.directory.sites[0].load for each in federation.gateways)
    assert near.seq == far.seq
    assert far.received_s == pytest.approx(near.received_s + 0.1225)
    assert other == near


@pytest.mark.parametrize("policy", ["mico", "shortest_wait"])
def test_each_gateway_takes_the_site_that_is_near_to_it(policy: str) -> None:
    queries = [Query(i, 10.0 * i, 100, 20) for i in range(6)]
    records, _ = simulate(queries, tuple(sites_of("1x8~5+250,1x8~250+5")), gateways=2, policy=policy)
    assert [record.site for record in records] == ["s0000", "s0001"] * 3


@settings(max_examples=30, deadline=None)
@given(workloads, federations)
def test_one_round_trip_for_all_is_the_same_as_that_for_each(
    queries: list[Query], sites: tuple[SiteSpec, ...]
) -> None:
    each = tuple(replace(site, rtts_s=(site.rtt_s, site.rtt_s)) for site in sites)
    assert simulate(queries, each, gateways=2)[0] == simulate(queries, sites, gateways=2)[0]


@settings(max_examples=30, deadline=None)
@given(workloads, federations, st.integers(2, 4), st.booleans())
def test_gateways_that_share_a_view_do_what_they_would_with_one_each(
    queries: list[Query], sites: tuple[SiteSpec, ...], gateways: int, loses: bool
) -> None:
    more = {"gateways": gateways, "outages": (Outage(sites[0].name, 5.0, 12.0),) * loses}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "mico.simulation.federation.views_of",
            lambda specs, count, clock: [View(specs, clock) for _ in range(count)],
        )
        each, _ = simulate(queries, sites, **more)
    shared, _ = simulate(queries, sites, **more)
    assert repr(shared) == repr(each)  # a refused query has times that are not numbers


@settings(max_examples=40, deadline=None)
@given(workloads, federations, st.floats(0, 20), st.floats(3, 20))
def test_a_lost_site_loses_no_query_while_another_stands(
    queries: list[Query], sites: tuple[SiteSpec, ...], from_s: float, lasting_s: float
) -> None:
    standing = SiteSpec.of("z", 4, 1.0, 0.01, 20_000)
    lost = Outage(sites[0].name, from_s, from_s + lasting_s)
    records, federation = simulate(queries, (*sites, standing), outages=(lost,))
    assert len(records) == len(queries)
    assert not any(isnan(record.finish_s) for record in records)
    assert all(site.kv_used == 0 for site in federation.sites.values())


@pytest.mark.parametrize("quiet_report_every_s", [1.0, 4.0])
def test_a_third_of_the_sites_is_lost_silently_and_no_query_uses_up_its_tries(
    quiet_report_every_s: float,
) -> None:
    """A retry avoids what may be lost, too, however seldom sites without news report."""
    sites = tuple(sites_of("60"))
    lost = tuple(Outage(site.name, 3.0, 9.0) for site in sites[::3])
    queries = [Query(i, float(i), 60, 100) for i in range(1500)]
    queries = at_rate(queries, 0.6 * capacity_qps(list(sites), 60, 100))
    records, _ = simulate(queries, sites, outages=lost, quiet_report_every_s=quiet_report_every_s)
    assert not any(isnan(record.finish_s) for record in records)
    assert 1 < max(record.attempts - record.moves for record in records) < 4


@pytest.mark.parametrize("lasting_s", [1.0, 3.0, 5.0])
def test_a_site_that_was_lost_serves_again(lasting_s: float) -> None:
    queries = [Query(i, 2.0 * i, 100, 20) for i in range(10)]
    sites = tuple(sites_of("1x8@1~5,1x8@3~100"))
    records, _ = simulate(queries, sites, outages=(Outage("s0000", 1.0, 1.0 + lasting_s),))
    assert {record.site for record in records} == {"s0000", "s0001"}
    assert records[-1].site == "s0000"


def test_a_site_serves_no_more_rows_than_it_has_slots_and_no_more_tokens_than_its_kv() -> None:
    queries = [Query(i, 0.0, 100, 60) for i in range(40)]
    site = SiteSpec.of("a", 5, 1.0, 0.0, 700)
    seen: list[tuple[int, int]] = []
    setting = Setting((site,), POLICIES["mico"], *ORDERS["fcfs"])
    federation = Federation(setting, expectations(queries, [point_forecast(10, "far too short")] * 40))
    only = federation.sites["a"]
    for tick in range(2000):
        federation.clock.at(tick * 0.05, lambda: seen.append((len(only.running), only.kv_used)))
    federation.run(queries)
    assert max(running for running, _ in seen) == 5
    assert max(used for _, used in seen) <= 700
    assert only.preemptions > 0


class Sent(NamedTuple):
    arrived_s: float
    prompt_tokens: int
    answer_tokens: int


def first_tokens_of_the_engine(requests: list[Sent], slots: int) -> tuple[dict[str, int], list[float]]:
    """In which iteration of a second each the engine's scheduler has the first token of each computed, and
    the token load while each of the first iterations runs, as the engine reports it.
    """
    queue = AdmissionQueue(starving_after_s=inf)
    first: dict[str, int] = {}
    loads: list[float] = []
    left: dict[str, int] = {}
    scheduler = Scheduler(PagePool(200_000, 1), queue, slots=slots, token_budget=TOKEN_BUDGET)
    coming = list(enumerate(requests))
    for now_s in range(2000):
        while coming and coming[0][1].arrived_s <= now_s:
            number, (arrived_s, prompt, answer) = coming.pop(0)
            request = Request(str(number), [0] * prompt, remaining=RemainingCurve.exactly(answer))
            request.arrived_s, request.max_tokens, left[request.id] = arrived_s, ENDLESS, answer
            queue.push(request)
        plan = scheduler.plan(float(now_s))
        unread = sum(len(each.tokens) - each.computed for each in scheduler.running)
        remaining = sum(each.expected_remaining() for each in scheduler.running)
        loads.append(remaining + unread + queue.prompt_tokens + queue.response_tokens)
        scheduler.advance(plan)
        for request in [entry.request for entry in plan.chunks if entry.samples]:
            first.setdefault(request.id, now_s + 1)
            request.tokens.append(0)
            left[request.id] -= 1
            if not left[request.id]:
                scheduler.release(request)
    return first, loads


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6000), st.integers(1, 40)), max_size=12),
    st.integers(1, 6),
)
def test_a_site_has_first_tokens_and_token_load_in_the_iterations_in_which_the_engine_would(
    others: list[tuple[int, int, int]], slots: int
) -> None:
    """The first request runs all the time, so that every iteration begins at a full second."""
    requests = [Sent(0.0, 1, 1500), *(Sent(at + 0.5, *sizes) for at, *sizes in sorted(others))]
    first: dict[str, int] = {}
    clock = Clock()
    site = SimulatedSite(
        SiteSpec("a", slots + 1, IterationCost(base_s=1.0), 0.0, 200_000),
        clock,
        score=least_work,
        starving_after_s=inf,
        on_first_token=lambda row: first.update({row.id: site.iterations}),
        on_end=lambda row: None,
        on_change=lambda site: None,
    )
    for number, (arrived_s, prompt, answer) in enumerate(requests):
        curve = RemainingCurve.exactly(answer)
        row = Row(str(number), prompt, curve, typical=curve.typical(), response_tokens=answer)
        clock.at(arrived_s, site.submit, row)
    loads: list[float] = []
    for now_s in range(100):
        clock.at(now_s + 0.25, lambda: loads.append(load_report(site, 1, 0.0).token_load))
    clock.run()
    first_there, loads_there = first_tokens_of_the_engine(requests, slots + 1)
    assert first == first_there
    assert loads == loads_there[: len(loads)]


@settings(max_examples=30, deadline=None)
@given(workloads, federations, st.integers(0, 2**40), st.booleans())
def test_lines_of_batches_end_too_and_hold_nobody_up(
    queries: list[Query], sites: tuple[SiteSpec, ...], lines: int, offload: bool
) -> None:
    mixed = [replace(q, lane=Lane.BATCH) if lines >> q.number & 1 else q for q in queries]
    records, federation = simulate(mixed, sites, offload=offload)
    assert len(records) == len(mixed)
    assert all(0 < record.first_token_s <= record.finish_s for record in records)
    for site in federation.sites.values():
        assert (len(site.running), site.pending, site.kv_used) == (0, 0, 0)


def test_a_chat_takes_the_slot_of_a_line_which_goes_on_later() -> None:
    long = [Query(i, 0.0, 10, 2000, lane=Lane.BATCH) for i in range(8)]
    chat = Query(8, 1.0, 10, 20)
    records, federation = simulate([*long, chat], (SiteSpec.of("a", 4, 1.0, 0.0),))
    assert records[8].finish_s < 1.0
    assert federation.sites["a"].preemptions == 1
    assert all(record.finish_s > 30 for record in records[:8])


def test_a_bound_query_is_answered_in_its_region_only() -> None:
    near, far = sites_of("1x4@1~5=us,1x4@1~200=eu")
    queries = [
        Query(i, 0.01 * i, 10, 50, regions=frozenset({"eu"}) if i % 3 == 0 else None) for i in range(60)
    ]
    records, _ = simulate(queries, (near, far))
    assert {record.site for record in records[::3]} == {far.name}
    assert near.name in {record.site for record in records}


def test_load_is_a_share_of_what_the_sites_can_do() -> None:
    """At 85% of capacity the last query of equal ones ends soon after it came; at 150% a queue builds up."""
    sites = tuple(sites_of("2x8@1~10,1x16@2~50"))
    queries = [Query(i, float(i), 60, 100) for i in range(1500)]
    lag_s = {}
    for load in (0.85, 1.5):
        paced = at_rate(queries, load * capacity_qps(list(sites), 60, 100))
        records, _ = simulate(paced, sites)
        lag_s[load] = sum(record.finish_s for record in records[-100:]) / 100
    assert lag_s[0.85] < 6 < 2 * 6 < lag_s[1.5]


def test_longest_first_lets_the_longest_of_a_burst_start_first() -> None:
    queries = [Query(i, 0.0, 10, 10 + 10 * i) for i in range(20)]
    records, _ = simulate(queries, (SiteSpec.of("a", 1, 1.0, 0.0),), order="longest")
    waits = [record.first_token_s for record in records[:-1]]
    assert waits[1:] == sorted(waits[1:], reverse=True)


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=20))
def test_jain_is_one_only_if_all_fare_alike(latencies: list[float]) -> None:
    index = jain(latencies)
    assert 1 / len(latencies) - 1e-9 <= index <= 1 + 1e-9
    assert jain([2.0] * len(latencies)) == pytest.approx(1.0)
    assert ORDERS["fcfs"][1] == inf


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 60)), min_size=1, max_size=6), st.integers(1, 3))
def test_training_fills_the_time_between_tokens_where_no_query_waits(
    arrivals: list[tuple[float, int]], slots: int
) -> None:
    """Prompts and waiting queries have the device at once: nobody starts later for training by more than the
    slices of an iteration.
    """
    queries = [Query(i, at_s, 1, answer) for i, (at_s, answer) in enumerate(sorted(arrivals))]
    spec = SiteSpec("a", slots, IterationCost(base_s=0.01), 0.02, 50_000)
    records, alone = simulate(queries, (spec,))
    beside, federation = simulate(queries, (replace(spec, trains_between_s=0.05),))
    site, without = federation.sites["a"], alone.sites["a"]
    assert site.busy_s - site.trained_s == pytest.approx(site.iterations * 0.01)
    assert without.trained_s == 0.0
    tokens = sum(query.response_tokens - 1 for query in queries)
    assert 0.0 <= site.trained_s <= tokens * 0.04 + 1e-9
    if len(queries) == 1:
        (one,), (other,) = records, beside
        assert one.first_token_s == other.first_token_s
        assert other.finish_s - one.finish_s == pytest.approx(tokens * 0.04)
