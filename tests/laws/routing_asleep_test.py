"""A query wakes a model only where none is awake, and where waking it is cheapest."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gateway.domain import ModelState, Site
from gateway.routing.decide import decide
from gateway.routing.fleet import Fleet
from gateway.routing.policies import POLICIES, mico
from tests.laws.routing_test import DEMAND, NOW, federation, site


def with_state(s: Site, state: ModelState, wake_s: float = 0.0) -> Site:
    model = replace(s.identity.models["m"], state=state, wake_s=wake_s)
    return replace(s, identity=replace(s.identity, models={"m": model}))


@given(federation(), st.data(), st.sampled_from(sorted(POLICIES)), st.integers(0, 10**9))
def test_a_query_wakes_a_model_only_where_none_is_awake(
    sites: list[Site], data: st.DataObject, name: str, turn: int
) -> None:
    """As if the sites where it sleeps less deeply were all; a site that is excluded counts for nothing."""
    states = data.draw(st.lists(st.sampled_from(ModelState), min_size=len(sites), max_size=len(sites)))
    tried = data.draw(st.sets(st.sampled_from([s.name for s in sites]), max_size=len(sites) - 1))
    fleet = Fleet.of(sites)
    mixed = [with_state(s, state, 3.0) for s, state in zip(sites, states, strict=True)]
    for each in mixed:
        fleet.put(each)
    best = next(state for state in ModelState if any(state is s for s in left(states, sites, tried)))
    alone = [each for each, state in zip(mixed, states, strict=True) if state is best]
    chosen = decide(DEMAND, fleet, POLICIES[name], now_s=NOW, turn=turn, tried=tried)
    expected = decide(DEMAND, Fleet.of(alone), POLICIES[name], now_s=NOW, turn=turn, tried=tried)
    assert chosen.site is not None and expected.site is not None
    assert (chosen.site.name, chosen.estimates) == (expected.site.name, expected.estimates)
    for each in sites:
        fleet.put(each)
    assert decide(DEMAND, fleet, mico, now_s=NOW, turn=turn) == decide(
        DEMAND, Fleet.of(sites), mico, now_s=NOW, turn=turn
    )


def left(states: list[ModelState], sites: list[Site], tried: set[str]) -> list[ModelState]:
    return [state for state, s in zip(states, sites, strict=True) if s.name not in tried]


def test_a_model_that_sleeps_everywhere_wakes_where_that_is_cheapest() -> None:
    fast = with_state(site("fast", seconds=0.001), ModelState.SLEEPING, wake_s=9.0)
    slow = with_state(site("slow", seconds=0.02), ModelState.SLEEPING, wake_s=0.5)
    found = decide(DEMAND, Fleet.of([fast, slow]), mico, now_s=NOW, turn=0)
    assert found.site is not None and found.site.name == "slow"
    waits = {each.site: each.wait_s for each in found.estimates}
    assert waits == {"fast": 9.0, "slow": 0.5}
    awake = with_state(site("awake", seconds=0.05), ModelState.READY)
    found = decide(DEMAND, Fleet.of([fast, slow, awake]), mico, now_s=NOW, turn=0)
    assert found.site is not None and found.site.name == "awake"
    assert set(found.excluded.values()) == {"the model sleeps there, and is awake or waking elsewhere"}
