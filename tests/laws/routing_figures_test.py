"""Laws of the vectors that a decision compares: each site counts as if it were alone."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain import Credit, IterationCost, LoadReport, Model, Site, SiteIdentity, SiteState
from gateway.routing.decide import decide
from gateway.routing.demand import Demand
from gateway.routing.estimate import estimates, sizes
from gateway.routing.filters import allowed_sites, why_not
from gateway.routing.fleet import Fleet, figures, kv_tokens, least, most
from gateway.routing.policies import mico
from gateway.routing.prefixes import Cached
from tests.support.single_estimate import estimate

NOW = 100.0
MODELS = {"m": Model("m", "r", 8192, 0, "o", frozenset())}


def site(*, slots: int, running: int, pending: int, kv_free: int, age_s: float, weight: float) -> Site:
    load = LoadReport(
        seq=1,
        received_s=NOW - age_s,
        running=running,
        pending=pending,
        kv_free_tokens=kv_free,
        iteration=IterationCost(0.02, 0.0002, 0.00003, 2e-8),
        running_remaining=tuple(range(1, running + 1)),
        pending_prompt_tokens=100 * pending,
        pending_response_tokens=150.0 * pending,
    )
    identity = SiteIdentity("s", "b", "c", "r", MODELS, slots=slots, kv_capacity_tokens=100_000)
    return Site(identity, SiteState.READY, load, Credit(), rtt_s=0.1 * age_s, weight=weight)


@given(extra=st.integers(0, 50_000), free=st.integers(0, 150_000), running=st.integers(0, 20))
def test_memory_that_is_lent_counts_as_a_sites_own(extra: int, free: int, running: int) -> None:
    lent = site(slots=8, running=running, pending=1, kv_free=free, age_s=1.0, weight=1.0)
    lent = replace(lent, load=replace(lent.load, kv_extra_tokens=extra))
    own = replace(lent.identity, kv_capacity_tokens=kv_tokens(lent))
    assert figures(lent, Credit()) == figures(
        replace(lent, identity=own, load=replace(lent.load, kv_extra_tokens=0)), Credit()
    )


sites = st.lists(
    st.builds(
        site,
        slots=st.integers(1, 20),
        running=st.integers(0, 20),
        pending=st.sampled_from([0, 0, 3]),
        kv_free=st.integers(0, 100_000),
        age_s=st.floats(0, 4),
        weight=st.sampled_from([0.0, 1.0, 2.0]),
    ),
    min_size=1,
    max_size=8,
).map(lambda found: [replace(s, identity=replace(s.identity, name=f"s{n}")) for n, s in enumerate(found)])
demands = st.builds(
    Demand,
    st.just("m"),
    st.integers(0, 5000),
    st.floats(0, 500),
    st.integers(0, 60_000),
    cached=st.dictionaries(st.sampled_from(["s0", "s1", "s9"]), st.floats(0, 5000)).map(Cached),
)


@given(sites, demands)
def test_every_site_is_estimated_as_if_it_were_alone(fleet: list[Site], demand: Demand) -> None:
    """Where no site has anyone waiting, waits are not computed: that changes none."""
    placed = decide(demand, Fleet.of(fleet), mico, now_s=NOW, turn=0)
    alone = {each.name: estimate(demand, each, NOW) for each in fleet}
    assert placed.estimates or placed.site is None
    for found in placed.estimates:
        assert without_cost(found) == without_cost(alone[found.site])
    of_all, one = Fleet.of(fleet), sizes(demand, Fleet.of(fleet))
    in_full = one._replace(kv_tokens=np.full(len(fleet), one.kv_tokens))
    for quick, slow in zip(
        *(estimates(s, of_all.figures, of_all.remaining) for s in (one, in_full)), strict=True
    ):
        np.testing.assert_array_equal(quick, slow)


def without_cost(found: object) -> tuple[object, ...]:
    """Return an estimate without what the policy compared."""
    return tuple(getattr(found, name) for name in found.__struct_fields__ if name != "cost")


@given(sites, demands, st.sets(st.sampled_from(["s0", "s1"])))
def test_a_site_may_serve_when_nothing_speaks_against_it(
    found: list[Site], demand: Demand, tried: set[str]
) -> None:
    fleet = Fleet.of(found)
    mask = allowed_sites(demand, fleet, fleet.figures, NOW, tried)
    close = [abs(NOW - s.load.received_s - 3.0) < 1e-9 for s in found]
    expected = [why_not(demand, s, NOW, tried) is None for s in found]
    assert all(at or one == other for at, one, other in zip(close, mask.tolist(), expected, strict=True))
    before = fleet.serving("m", frozenset()).tolist()
    assert before == [True] * len(found)  # the cached mask is not written to


@given(st.lists(st.floats(-10, 10) | st.sampled_from([inf, -inf])))
def test_the_least_and_the_most_of_a_vector(values: list[float]) -> None:
    assert least(np.array(values, dtype=float)) == min(values, default=inf)
    assert most(np.array(values, dtype=float)) == max(values, default=-inf)
