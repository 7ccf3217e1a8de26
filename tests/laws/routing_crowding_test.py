"""Laws of what a query costs the others at a site: crowding, and how scarce free slots are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain import Site
from gateway.routing.decide import decide
from gateway.routing.demand import Arriving, Demand
from gateway.routing.fleet import Fleet
from gateway.routing.policies import mico
from gateway.routing.prefixes import NOTHING_CACHED, Cached
from gateway.routing.traffic import MAX_MODELS, MIN_QUERIES, RECENT, Traffic
from tests.laws.routing_test import DEMAND, NOW, federation, site

A_BURST = Arriving(tokens_per_s=1e9)
CONVERSATIONS = Arriving(returning=1.0)


@pytest.mark.parametrize(
    ("running", "arriving", "chosen"),
    [
        (4, Arriving(), "fast"),
        (4, Arriving(tokens_per_s=100.0), "fast"),  # two slots of 0.02 s a token
        (7, Arriving(), "slow"),
        (4, A_BURST, "slow"),
        (4, CONVERSATIONS, "slow"),
    ],
)
def test_a_fast_site_is_spared_only_where_free_slots_are_scarce(
    running: int, arriving: Arriving, chosen: str
) -> None:
    """The slow site has one request fewer; others find a free slot anyway while half of all are free."""
    fast = site("fast", seconds=0.02, running=(100,) * running)
    slow = site("slow", seconds=0.03, running=(100,) * (running - 1))
    demand = replace(DEMAND, arriving=arriving)
    placed = decide(demand, Fleet.of([fast, slow]), mico, now_s=NOW, turn=0)
    assert placed.site is not None
    assert placed.site.name == chosen


@pytest.mark.parametrize(("running", "chosen"), [(0, "home"), (1, "home"), (4, "other")])
def test_a_short_turn_stays_unless_another_site_is_better_by_more_than_estimates_are_off(
    running: int, chosen: str
) -> None:
    """Though its prefill takes no time, and the other site is idle and a tenth faster."""
    home, other = site("home", seconds=0.022, running=(12,) * running), site("other", seconds=0.02)
    turn = replace(DEMAND, prompt_tokens=100, response_tokens=12.0, kv_tokens=112)
    for cached, name in ((NOTHING_CACHED, "other"), (Cached({"home": 40.0}), chosen)):
        placed = decide(replace(turn, cached=cached), Fleet.of([home, other]), mico, now_s=NOW, turn=0)
        assert placed.site is not None
        assert placed.site.name == name


@given(federation(), st.integers(1, 64), st.integers(0, 100))
def test_free_slots_elsewhere_never_make_a_site_dearer(sites: list[Site], slots: int, turn: int) -> None:
    """What a query costs the others at a site falls with the slots that are free at all candidates."""
    slow = site("slow", slots=slots, seconds=1.0)  # which leaves the fastest pace as it is
    alone = decide(DEMAND, Fleet.of(sites), mico, now_s=NOW, turn=turn)
    joined = decide(DEMAND, Fleet.of([*sites, slow]), mico, now_s=NOW, turn=turn)
    for before, after in zip(alone.estimates, joined.estimates, strict=False):
        assert before.cost is not None
        assert after.cost is not None
        assert after.cost <= before.cost * (1 + 1e-9)


def arrivals(gaps_s: list[float], tokens: float = 100.0) -> list[Demand]:
    """Return queries in turn, each so long after the one before."""
    traffic, now_s, found = Traffic(), 0.0, []
    for gap_s in gaps_s:
        now_s += gap_s
        found.append(traffic.arrive(replace(DEMAND, response_tokens=tokens), now_s))
    return found


@given(st.floats(0.001, 10.0), st.floats(1.0, 10_000.0), st.integers(MIN_QUERIES, 3 * RECENT))
def test_a_steady_stream_is_measured_as_it_is(gap_s: float, tokens: float, count: int) -> None:
    last = arrivals([gap_s] * count, tokens)[-1]
    assert last.arriving.tokens_per_s == pytest.approx(tokens / gap_s, rel=1e-6)


def test_few_queries_do_not_tell_how_fast_they_arrive() -> None:
    assert all(each.arriving == Arriving() for each in arrivals([0.0] * (MIN_QUERIES - 1)))


def test_a_burst_is_known_after_its_first_queries_and_forgotten_after_it() -> None:
    before, burst, after = [1.0] * RECENT, [0.0] * RECENT, [1.0] * RECENT
    found = [each.arriving.tokens_per_s for each in arrivals([*before, *burst, *after])]
    assert found[2 * RECENT - 1] > 1e6
    assert found[-1] == pytest.approx(100.0, rel=0.1)


def test_models_that_come_and_go_take_no_memory_for_ever() -> None:
    traffic = Traffic()
    for number in range(MAX_MODELS + 10):
        traffic.arrive(replace(DEMAND, model=f"m{number}"), 0.0)
    assert len(traffic) == MAX_MODELS


def test_the_models_of_a_gateway_have_their_own_traffic() -> None:
    traffic = Traffic()
    for _ in range(RECENT):
        traffic.arrive(replace(DEMAND, model="other"), 0.0)
    assert traffic.arrive(DEMAND, 0.0).arriving == Arriving()


@given(st.lists(st.booleans(), min_size=1, max_size=100))
def test_the_share_of_queries_that_return_is_a_mean_of_the_last(returns: list[bool]) -> None:
    traffic, cached = Traffic(), Cached({"a": 50.0})
    for each in returns:
        share = traffic.arrive(replace(DEMAND, cached=cached) if each else DEMAND, 0.0).arriving.returning
    if len(returns) <= RECENT:
        assert share == pytest.approx(sum(returns) / len(returns))
    assert 0.0 <= share <= 1.0
