"""Laws of a fleet of a thousand sites: a burst spreads by speed, and a retry avoids what may be lost, too."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain import Credit, IterationCost, LoadReport, Model, Site, SiteIdentity, SiteState
from gateway.federation.directory import Directory
from gateway.routing.decide import NOT_HEARD, decide
from gateway.routing.demand import Demand
from gateway.routing.filters import STALE_AFTER_S
from gateway.routing.fleet import Fleet
from gateway.routing.policies import POLICIES, REPORTS_EVERY_S
from gateway.routing.prefixes import Cached
from gateway.routing.traffic import Traffic

SITES, BURST = 1_000, 5_000
SPEEDS = (1.0, 1.3, 1.7, 2.2, 3.0)
"""Times that sites take for an iteration, in relation to the fastest."""
NOW = 100.0


def identity(name: str, slots: int) -> SiteIdentity:
    model = Model("m", "r", 8192, 0, "o", frozenset())
    return SiteIdentity(name, "b", "c", "r", {"m": model}, slots=slots, kv_capacity_tokens=slots * 8192)


def busy(slots: int, slower: float, share: float, heard_s: float) -> LoadReport:
    """Return the report of a site whose slots are taken to this share, each by 200 tokens to come."""
    running = round(share * slots)
    return LoadReport(
        seq=1,
        received_s=heard_s,
        running=running,
        kv_free_tokens=slots * 8192 - 400 * running,
        iteration=IterationCost(0.015 * slower, 0.0002 * slower, 0.00003 * slower, 2e-8 * slower),
        running_remaining=(200,) * running,
    )


def jain(values: list[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(each * each for each in values))


def spread(policy: str, slots: int, age_s: float) -> dict[str, float]:
    """Assign a burst to idle sites whose reports are so old; return the tokens that each site got."""
    directory, random, traffic = Directory(), Random(7), Traffic()
    for number, slower in zip(range(SITES), cycle(SPEEDS), strict=False):
        name = f"s{number:04d}"
        directory.join(identity(name, slots), NOW - 2.0)
        directory.report(name, busy(slots, slower, 0.0, NOW - age_s), Credit())
    got = dict.fromkeys((site.name for site in directory.sites), 0.0)
    for turn in range(BURST):
        tokens = random.uniform(150, 250)
        demand = traffic.arrive(Demand("m", 100, tokens, 500), NOW)
        site = decide(demand, directory.fleet, POLICIES[policy], now_s=NOW, turn=turn).site
        assert site is not None
        got[site.name] += tokens
        before = site.credit
        credit = Credit(before.requests + 1, before.prompt_tokens + 100, before.response_tokens + tokens)
        directory.set_credit(site.name, credit)
    return got


@pytest.mark.parametrize(
    ("policy", "slots", "at_least"),
    [("mico", 16, 0.95), ("mico", 4, 0.92), ("token_balanced", 16, 0.95), ("token_balanced", 4, 0.95)],
)
def test_a_burst_meets_reports_of_a_second_ago_and_spreads_by_speed(
    policy: str, slots: int, at_least: float
) -> None:
    """The default policy gives slow sites more than their share where slots are few: each is worth more than
    a place in the queue of a fast one.
    """
    got = spread(policy, slots, age_s=1.0)
    shares = [tokens * slower for tokens, slower in zip(got.values(), cycle(SPEEDS), strict=False)]
    assert jain(shares) >= at_least
    assert got == spread(policy, slots, age_s=0.0), "what was assigned since counts, not the age of a report"


def chosen_at_once(gateways: int, told: int) -> list[str]:
    """Return the sites that so many gateways choose by the same reports, each for one query.

    No two sites are alike. `told`: how many gateways each takes for the number of all.
    """
    sites = [
        Site(identity(f"s{n:04d}", 16), SiteState.READY, busy(16, 1.0 + n / SITES, 0.5, NOW))
        for n in range(SITES)
    ]
    fleet, demand = Fleet.of(sites), Demand("m", 100, 200.0, 500)
    found = []
    for number in range(gateways):
        turn = 1_000_003 * number
        placed = decide(demand, fleet, POLICIES["mico"], now_s=NOW, turn=turn, gateways=told)
        assert placed.site is not None
        found.append(placed.site.name)
    return found


def test_gateways_that_know_the_same_do_not_all_choose_the_same_site() -> None:
    assert len(set(chosen_at_once(50, told=1))) == 1, "each alone would take the best"
    found = chosen_at_once(50, told=50)
    assert len(set(found)) >= 40
    assert max(found) < f"s{SITES // 4:04d}", "one of the faster sites, all the same"


@given(st.integers(0, 2**40), st.integers(2, 100))
def test_what_a_prompt_finds_in_a_cache_is_compared_by_every_gateway(turn: int, gateways: int) -> None:
    sites = [Site(identity(f"s{n:02d}", 4), SiteState.READY, busy(4, 1.0, 0.0, NOW)) for n in range(40)]
    demand = Demand("m", 4000, 20.0, 4100, cached=Cached({"s33": 4000.0}))
    placed = decide(demand, Fleet.of(sites), POLICIES["mico"], now_s=NOW, turn=turn, gateways=gateways)
    assert placed.site is not None and placed.site.name == "s33"


ages = st.lists(st.floats(0, STALE_AFTER_S), min_size=2, max_size=12)


@given(ages, st.sampled_from([0.0, 3.0]), st.sampled_from(sorted(POLICIES)), st.integers(0, 9))
def test_a_retry_avoids_sites_that_have_not_reported_lately_as_long_as_others_are_left(
    age_s: list[float], quiet_s: float, policy: str, turn: int
) -> None:
    """A site that may be quiet for longer, too: it may be lost as well."""
    reports = [replace(busy(4, 1.0, 0.0, NOW - each), quiet_s=quiet_s) for each in age_s]
    sites = [Site(identity(f"s{n}", 4), SiteState.READY, each) for n, each in enumerate(reports)]
    demand, fleet = Demand("m", 100, 200.0, 500), Fleet.of(sites)
    found = decide(demand, fleet, POLICIES[policy], now_s=NOW, turn=turn, tried={"s0"}, is_retry=True)
    assert found.site is not None and found.site.name != "s0"
    lately = [site.name for site in sites[1:] if NOW - site.load.received_s <= REPORTS_EVERY_S]
    assert not lately or found.site.name in lately
    silent = {site.name for site in sites[1:] if site.name not in lately}
    assert {name for name, why in found.excluded.items() if why == NOT_HEARD} == (silent if lately else set())
    first = decide(demand, fleet, POLICIES[policy], now_s=NOW, turn=turn)
    assert NOT_HEARD not in first.excluded.values()


@given(st.floats(0, 10), st.floats(0, 3), st.sampled_from(sorted(POLICIES)))
def test_a_site_that_may_be_quiet_for_longer_is_stale_as_much_later(
    age_s: float, quiet_s: float, policy: str
) -> None:
    report = replace(busy(4, 1.0, 0.0, NOW - age_s), quiet_s=quiet_s)
    fleet = Fleet.of([Site(identity("s", 4), SiteState.READY, report)])
    found = decide(Demand("m", 100, 200.0, 500), fleet, POLICIES[policy], now_s=NOW, turn=0)
    over_s = age_s - STALE_AFTER_S - quiet_s
    assert abs(over_s) < 1e-9 or (found.site is None) == (over_s > 0)
    assert ("load report" in found.excluded.get("s", "")) == (found.site is None)
