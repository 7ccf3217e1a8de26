"""Laws of the fleet's columns and of the joint window."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain import Credit, IterationCost, LoadReport, Model, Site, SiteIdentity, SiteState
from gateway.routing.decide import MAX_ESTIMATES, decide
from gateway.routing.demand import Demand
from gateway.routing.fleet import Fleet
from gateway.routing.policies import POLICIES
from gateway.routing.prefixes import Cached
from gateway.routing.window import WINDOW_S, AssignmentWindow, WindowEntry, assign, assign_jointly

NOW = 10.0
DEMAND = Demand("m", prompt_tokens=50, response_tokens=80.0, kv_tokens=250)
NAMES = [f"s{i}" for i in range(6)]


@st.composite
def named_sites(draw: st.DrawFn) -> Site:
    running = draw(st.lists(st.integers(1, 300), max_size=8))
    models = {"m": Model("m", "", 4096, 0, "")} if draw(st.booleans()) else {}
    return Site(
        SiteIdentity(draw(st.sampled_from(NAMES)), "", "c", "r", models, 8, 10_000),
        draw(st.sampled_from([SiteState.READY, SiteState.DRAINING])),
        LoadReport(
            seq=1,
            received_s=draw(st.floats(0, NOW)),
            running=len(running),
            kv_free_tokens=8_000,
            iteration=IterationCost(base_s=draw(st.floats(0.001, 0.1))),
            running_remaining=tuple(sorted(running)),
        ),
        Credit(draw(st.integers(0, 9))),
    )


@given(st.lists(named_sites(), min_size=1, max_size=30), st.sets(st.sampled_from(NAMES)))
def test_a_fleet_kept_up_to_date_decides_like_one_made_anew(news: list[Site], gone: set[str]) -> None:
    kept = Fleet()
    for site in news:
        kept.put(site)
    latest = {site.name: site for site in news}
    for name in gone & set(latest):
        kept.remove(name)
        del latest[name]
    made = Fleet.of(kept.sites)
    assert {site.name: site for site in kept.sites} == latest
    assert all(np.array_equal(a, b) for a, b in zip(kept.figures, made.figures, strict=True))
    assert np.array_equal(kept.remaining, made.remaining)
    for policy in POLICIES.values():
        assert decide(DEMAND, kept, policy, now_s=NOW, turn=3) == decide(
            DEMAND, made, policy, now_s=NOW, turn=3
        )


def test_of_many_sites_the_best_are_told_and_the_chosen_one_among_them() -> None:
    many = [replace(idle(f"s{i:03d}"), rtt_s=i / 1000) for i in range(100)]
    placed = decide(DEMAND, Fleet.of(many), POLICIES["round_robin"], now_s=0.0, turn=70)
    assert placed.site is many[70]
    assert [each.site for each in placed.estimates] == [f"s{i:03d}" for i in [*range(MAX_ESTIMATES - 1), 70]]


def test_a_burst_on_reports_a_second_old_spreads_by_slots_and_speed() -> None:
    """500 queries at once: nobody is herded onto, and a site half as fast takes less than one as fast."""
    sites = [
        idle("a", slots=16),
        idle("b", slots=16),
        idle("c", slots=32),
        idle("slow", slots=16, slower=2.0),
    ]
    fleet, taken = Fleet.of(sites), dict.fromkeys(["a", "b", "c", "slow"], 0)
    for turn in range(500):
        chosen = decide(DEMAND, fleet, POLICIES["mico"], now_s=1.0, turn=turn).site
        assert chosen is not None
        taken[chosen.name] += 1
        n = taken[chosen.name]
        fleet.put(replace(chosen, credit=Credit(n, 50.0 * n, 80.0 * n)))
    assert abs(taken["a"] - taken["b"]) <= 2
    assert 1.6 < taken["c"] / taken["a"] < 2.4
    assert 0.4 * taken["a"] < taken["slow"] < taken["a"]


def idle(name: str, *, slots: int = 8, slower: float = 1.0) -> Site:
    identity = SiteIdentity(name, "", "c", "r", {"m": Model("m", "", 4096, 0, "")}, slots, 100_000)
    cost = IterationCost(base_s=0.02 * slower)
    return Site(
        identity, SiteState.READY, LoadReport(1, 0.0, kv_free_tokens=100_000, iteration=cost), rtt_s=0.01
    )


lengths = st.lists(st.floats(1, 1000), max_size=200)


@given(lengths, st.lists(st.floats(1, 10), min_size=1, max_size=9))
def test_a_window_gives_each_query_one_site_and_each_site_its_share(
    queries: list[float], speeds: list[float]
) -> None:
    sites = assign(queries, speeds)
    assert len(sites) == len(queries)
    for site, speed in enumerate(speeds):
        share = len(queries) * speed / sum(speeds)
        assert abs(sites.count(site) - share) <= 10  # one for each group at most


@given(lengths, st.integers(1, 9))
def test_among_equal_sites_every_full_round_of_a_group_goes_to_each_once(
    queries: list[float], count: int
) -> None:
    sites = assign(queries, [1.0] * count)
    counts = [sites.count(site) for site in range(count)]
    assert max(counts) - min(counts) <= 1


@given(st.lists(st.floats(1, 1000), min_size=60, max_size=200), st.integers(2, 6))
def test_a_window_balances_predicted_tokens(queries: list[float], count: int) -> None:
    """No site gets more than the longest bucket's width per round above another."""
    sites = assign(queries, [1.0] * count)
    tokens = [sum(q for q, at in zip(queries, sites, strict=True) if at == site) for site in range(count)]
    assert max(tokens) - min(tokens) <= 3 * max(queries)


def test_a_site_with_work_of_before_gets_the_shorter_ones() -> None:
    assert assign([100.0, 1.0], [1.0, 1.0], [50.0, 0.0]) == [1, 0]
    assert assign([100.0, 1.0], [1.0, 1.0], [0.0, 50.0]) == [0, 1]


@pytest.mark.parametrize(
    "policy", ["least_tokens", "token_balanced", "shortest_wait", "mico", "least_requests"]
)
def test_an_idle_site_is_preferred_to_a_busy_equal(policy: str) -> None:
    busy = idle("busy")
    load = replace(busy.load, running=8, running_remaining=(90,) * 8, token_load=720.0)
    placed = decide(
        DEMAND, Fleet.of([replace(busy, load=load), idle("idle")]), POLICIES[policy], now_s=0.0, turn=0
    )
    assert placed.site is not None
    assert placed.site.name == "idle"


def full(name: str, *, slower: float = 1.0) -> Site:
    site = idle(name, slower=slower)
    return replace(site, load=replace(site.load, running=8, running_remaining=(90,) * 8, token_load=720.0))


def test_a_window_keeps_only_what_follows_closely_onto_full_sites() -> None:
    window, crowded = AssignmentWindow(), Fleet.of([full("a"), full("b")])
    assert not window.should_wait(DEMAND, crowded, 1.0), "nobody came before it"
    assert window.should_wait(DEMAND, crowded, 1.0 + WINDOW_S / 2)
    assert not window.should_wait(DEMAND, crowded, 2.0), "the burst is over"
    assert not window.should_wait(DEMAND, Fleet.of([full("a"), idle("b")]), 2.0), "a slot is free"
    assert window.should_wait(replace(DEMAND, model="x"), Fleet.of([idle("a")]), 2.0), "but not of this model"


@given(st.lists(st.tuples(st.floats(1, 900), st.sampled_from(["m", "n", "nobody's"])), max_size=90))
def test_what_a_window_kept_is_placed_once_where_it_may_go(asked: list[tuple[float, str]]) -> None:
    n = Model("n", "", 4096, 0, "")
    other = replace(full("other"), identity=replace(full("other").identity, models={"n": n}))
    fleet, window, placed = (
        Fleet.of([full("a"), full("b", slower=2.0), other]),
        AssignmentWindow(),
        list[str | None](),
    )
    firsts = [
        window.add(WindowEntry(replace(DEMAND, model=model, response_tokens=tokens), placed.append))
        for tokens, model in asked
    ]
    window.close(fleet, 0.0)
    window.close(fleet, 0.0)
    assert len(placed) == len(asked)
    assert firsts == [index == 0 for index in range(len(asked))]
    counts = {model: sum(asks == model for _, asks in asked) for model in ("m", "n")}
    slots = {"m": 16, "n": 8}
    jointly = {model: count if count >= slots[model] else 0 for model, count in counts.items()}
    assert sum(site in {"a", "b"} for site in placed) == jointly["m"]
    assert placed.count("other") == jointly["n"]


def test_a_window_follows_speed_and_what_a_site_has_to_do() -> None:
    sites = assign_jointly([DEMAND] * 300, Fleet.of([full("fast"), full("slow", slower=2.0)]), 0.0)
    assert 185 <= sites.count("fast") <= 215


def test_nobody_waits_for_a_window_that_could_not_be_assigned() -> None:
    window, placed = AssignmentWindow(), list[str | None]()
    for _ in range(9):
        window.add(WindowEntry(replace(DEMAND, response_tokens=float("nan")), placed.append))
    with pytest.raises(ValueError):
        window.close(Fleet.of([full("a")]), 0.0)
    assert placed == [None] * 9


@given(st.lists(st.floats(1, 9), min_size=1, max_size=5), st.data())
def test_caches_exchange_queries_of_like_length_and_never_the_shares_of_sites(
    speeds: list[float], data: st.DataObject
) -> None:
    places = st.dictionaries(st.integers(0, len(speeds) - 1), st.floats(1, 1_000), max_size=2)
    cached = data.draw(st.lists(places, min_size=1, max_size=60))
    lengths = [100.0] * len(cached)
    before, after = assign(lengths, speeds), assign(lengths, speeds, cached=cached)
    assert Counter(after) == Counter(before)
    assert assign(lengths, speeds, cached=[{} for _ in lengths]) == before

    def found(sites: list[int]) -> float:
        return sum(each.get(site, 0.0) for each, site in zip(cached, sites, strict=True))

    assert found(after) >= found(before) / 2, "the longest first: half of the best at least"


def test_a_burst_on_full_sites_finds_its_beginnings() -> None:
    fleet = Fleet.of([full("a"), full("b")])
    count = 2 * 8
    homes = ["ab"[number // 2 % 2] for number in range(count)]
    demands = [replace(DEMAND, cached=Cached({home: 40.0})) for home in homes]
    assert assign_jointly(demands, fleet, 0.0) == homes
    common = [replace(DEMAND, cached=Cached({home: 40.0}, 40.0)) for home in homes]
    assert assign_jointly(common, fleet, 0.0) == assign_jointly([DEMAND] * count, fleet, 0.0)
