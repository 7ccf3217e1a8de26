"""Laws of deciding, over arbitrary sites and demands."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.batches.capacity import startable_lines
from gateway.domain import (
    Credit,
    IterationCost,
    Lane,
    LoadReport,
    Model,
    Sampling,
    Site,
    SiteIdentity,
    SiteState,
)
from gateway.errors import MicoError, UpstreamLost
from gateway.failure import AttemptFailure, FailureCause, Resume
from gateway.routing.decide import decide
from gateway.routing.demand import Arriving, Demand
from gateway.routing.failover import MAX_MOVES, FailedTry, tries
from gateway.routing.filters import STALE_AFTER_S
from gateway.routing.fleet import PROMPT_TOKEN_WORK, Fleet, size
from gateway.routing.policies import POLICIES, mico
from gateway.routing.prefixes import NOTHING_CACHED, Cached
from gateway.scaling.sizing import busy_machines
from predictor.forecast import Forecast
from site_engine.core import request_queue
from site_engine.core.remaining_curve import RemainingCurve, RemainingPoint
from site_engine.core.request import Request
from tests.support.single_estimate import estimate

NOW = 1000.0
DEMAND = Demand("m", prompt_tokens=50, response_tokens=80.0, kv_tokens=250)


def site(
    name: str = "a",
    *,
    age_s: float = 0.0,
    quiet_s: float = 0.0,
    seconds: float = 0.01,
    slots: int = 8,
    running: tuple[int, ...] = (),
    pending: int = 0,
    credit: int = 0,
    kv_used: int = 0,
    price: float = 0.0,
    rtt_s: float = 0.01,
) -> Site:
    identity = SiteIdentity(
        name=name,
        boot_id="b",
        cloud="c",
        region="r",
        models={"m": Model("m", "rev", 4096, 0, "o", frozenset({"chat"}))},
        slots=slots,
        kv_capacity_tokens=10_000,
        output_usd_per_mtok=price,
    )
    load = LoadReport(
        seq=1,
        received_s=NOW - age_s,
        quiet_s=quiet_s,
        running=len(running),
        pending=pending,
        kv_free_tokens=10_000 - kv_used,
        iteration=IterationCost(base_s=seconds, per_row_s=seconds / 50),
        running_remaining=tuple(sorted(running)),
        pending_prompt_tokens=50 * pending,
        pending_response_tokens=80.0 * pending,
    )
    return Site(identity, SiteState.READY, load, Credit(credit, 50.0 * credit, 80.0 * credit), rtt_s=rtt_s)


loads = st.builds(
    site,
    seconds=st.floats(0.001, 0.2),
    slots=st.integers(1, 64),
    running=st.lists(st.integers(1, 1000), max_size=64).map(tuple),
    pending=st.integers(0, 200),
    credit=st.integers(0, 200),
    kv_used=st.integers(0, 10_000),
    age_s=st.floats(0, STALE_AFTER_S),
    quiet_s=st.floats(0, 3),
    price=st.floats(0, 50),
    rtt_s=st.floats(0, 0.5),
)


def federation(least: int = 1) -> st.SearchStrategy[list[Site]]:
    def named(sites: list[Site]) -> list[Site]:
        return [replace(s, identity=replace(s.identity, name=f"s{i}")) for i, s in enumerate(sites)]

    return st.lists(loads, min_size=least, max_size=8).map(named)


VARIANTS = tuple(f"v{number}" for number in range(6))


def serving(s: Site, models: Iterable[str]) -> Site:
    found = {each: replace(s.identity.models["m"], id=each, parent="m") for each in models}
    return replace(s, identity=replace(s.identity, models=s.identity.models | found))


@given(federation(), st.sampled_from(sorted(POLICIES)), st.integers(0, 10**9))
def test_variants_share_what_their_site_has(sites: list[Site], name: str, turn: int) -> None:
    """The load of a site counts once, however many models share it."""
    many, demand = [serving(s, VARIANTS) for s in sites], replace(DEMAND, model="v3")
    alone = decide(DEMAND, Fleet.of(sites), POLICIES[name], now_s=NOW, turn=turn)
    shared = decide(demand, Fleet.of(many), POLICIES[name], now_s=NOW, turn=turn)
    assert alone.site is not None and shared.site is not None
    assert (alone.site.name, alone.estimates) == (shared.site.name, shared.estimates)
    assert busy_machines(sites) == busy_machines(many)
    assert [startable_lines(s) for s in sites] == [startable_lines(s) for s in many]


changes = st.lists(st.tuples(st.integers(0, 7), st.sets(st.sampled_from(VARIANTS))), max_size=12)


@given(federation(), changes, st.sampled_from(VARIANTS))
def test_models_that_come_and_go_leave_the_fleet_as_if_made_anew(
    sites: list[Site], changes: list[tuple[int, set[str]]], model: str
) -> None:
    fleet, now = Fleet.of(sites), list(sites)
    for place, models in changes:
        assert fleet.serving(model, frozenset()).tolist() == [model in s.identity.models for s in now]
        few = fleet.few_serving(model, frozenset(), most=2)
        served = [s for s in now if model in s.identity.models]
        assert few == [s.name for s in served if s.state is SiteState.READY and len(served) <= 2]
        at = place % len(now)
        now[at] = serving(sites[at], models)
        fleet.put(now[at])
    assert fleet.serving(model, frozenset()).tolist() == Fleet.of(now).serving(model, frozenset()).tolist()


@given(federation(), st.sampled_from(sorted(POLICIES)), st.integers(0, 10**9))
def test_a_decision_names_one_site_and_estimates_every_candidate(
    sites: list[Site], name: str, turn: int
) -> None:
    placed = decide(DEMAND, Fleet.of(sites), POLICIES[name], now_s=NOW, turn=turn)
    assert placed.site in sites
    assert [e.site for e in placed.estimates] == [s.name for s in sites]
    costs = {e.site: e.cost for e in placed.estimates if e.cost is not None}
    assert not costs or costs[placed.site.identity.name] == min(costs.values())
    assert bool(costs) == (name not in {"round_robin", "power_of_two"})
    assert placed.reason
    assert not re.search(r"\b1 (requests|slots)\b", placed.reason)
    assert placed == decide(DEMAND, Fleet.of(sites), POLICIES[name], now_s=NOW, turn=turn)


@given(federation(2), st.integers(0, 7), st.floats(0, 1), st.integers(0, 2000), st.integers(0, 100))
def test_a_cached_prompt_speaks_for_its_site_and_against_computing_it_again(
    sites: list[Site], place: int, share: float, prompt_tokens: int, turn: int
) -> None:
    demand = replace(DEMAND, prompt_tokens=prompt_tokens, arriving=Arriving(returning=1.0))
    fleet = Fleet.of([_with_prefill(each) for each in sites])
    name = sites[place % len(sites)].name
    without = decide(demand, fleet, mico, now_s=NOW, turn=turn)
    cached = Cached({name: share}).times(prompt_tokens)
    knowing = decide(replace(demand, cached=cached), fleet, mico, now_s=NOW, turn=turn)
    assert without.site is not None
    assert without.site.name != name or knowing.site == without.site
    for before, after in zip(without.estimates, knowing.estimates, strict=True):
        assert before.cost is not None
        assert after.cost is not None
        assert after.cost <= before.cost if after.site == name else after.cost >= before.cost


def _with_prefill(site: Site) -> Site:
    iteration = replace(site.load.iteration, per_token_s=3e-5)
    return replace(site, load=replace(site.load, iteration=iteration))


def test_a_site_with_the_prompt_is_crowded_less_by_it() -> None:
    """The prefill that the others at a busy site are spared outweighs two more of them there."""
    busy = _with_prefill(site("busy", seconds=0.02, slots=16, running=(100,) * 8))
    quiet = _with_prefill(site("quiet", seconds=0.02, slots=16, running=(100,) * 6))
    demand = replace(DEMAND, prompt_tokens=3000, kv_tokens=3500)
    cached = Cached({"busy": 0.9}).times(3000)
    for known, name in ((demand, "quiet"), (replace(demand, cached=cached), "busy")):
        placed = decide(known, Fleet.of([busy, quiet]), mico, now_s=NOW, turn=0)
        assert placed.site is not None
        assert placed.site.name == name


@pytest.mark.parametrize(
    ("cached_tokens", "running", "chosen"), [(2900, 0, "other"), (2900, 6, "full"), (0, 6, "other")]
)
def test_a_prompt_is_computed_again_at_an_idle_site_but_not_at_a_busy_one(
    cached_tokens: int, running: int, chosen: str
) -> None:
    """What is computed again delays those who are there, which a short wait for the cache outweighs."""
    full = _with_prefill(site("full", running=(60,) * 8))
    other = _with_prefill(site("other", running=(60,) * running))
    cached = Cached({"full": cached_tokens / 3000}).times(3000)
    demand = replace(DEMAND, prompt_tokens=3000, response_tokens=20.0, kv_tokens=3500, cached=cached)
    placed = decide(demand, Fleet.of([full, other]), mico, now_s=NOW, turn=0)
    assert placed.site is not None
    assert placed.site.name == chosen, [(e.site, e.cost) for e in placed.estimates]


@pytest.mark.parametrize(
    ("lane", "cached_tokens", "running", "chosen"),
    [
        (Lane.BATCH, 2900, 2, "holder"),
        (Lane.BATCH, 2900, 8, "assigned"),
        (Lane.BATCH, 0, 2, "assigned"),
        (Lane.INTERACTIVE, 2900, 2, "assigned"),
    ],
)
def test_a_line_of_a_batch_leaves_its_assigned_site_for_its_beginning_and_a_free_slot(
    lane: Lane, cached_tokens: int, running: int, chosen: str
) -> None:
    holder = _with_prefill(site("holder", running=(60,) * running))
    fleet = Fleet.of([_with_prefill(site("assigned", running=(60,) * 2)), holder, site("other")])
    cached = Cached({"holder": cached_tokens / 3000}).times(3000) if cached_tokens else NOTHING_CACHED
    demand = replace(DEMAND, prompt_tokens=3000, kv_tokens=3500, lane=lane, cached=cached)
    placed = decide(demand, fleet, mico, now_s=NOW, turn=0, preferred_site="assigned")
    assert placed.site is not None
    assert placed.site.name == chosen


@given(federation(), loads, st.integers(0, 100))
def test_a_worse_site_changes_nothing(sites: list[Site], worse: Site, turn: int) -> None:
    best = decide(DEMAND, Fleet.of(sites), mico, now_s=NOW, turn=turn)
    assert best.site is not None
    slowest = max(e.finish_s for e in best.estimates)
    dear = max(s.identity.output_usd_per_mtok for s in sites)
    identity = replace(worse.identity, name="worse", output_usd_per_mtok=dear + 1)
    crowded = 1 + max((s.load.running + s.load.pending + s.credit.requests) / s.identity.slots for s in sites)
    pending = worse.load.pending + int(crowded * identity.slots)
    load = replace(
        worse.load,
        iteration=IterationCost(base_s=1.0),  # slower than any other
        pending=pending,
        pending_prompt_tokens=50 * pending,
        pending_response_tokens=80.0 * pending,  # who says that its queue is no work is not worse
    )
    worse = replace(worse, identity=identity, load=load, rtt_s=slowest + 1 + STALE_AFTER_S)
    joined = decide(DEMAND, Fleet.of([*sites, worse]), mico, now_s=NOW, turn=turn)
    assert joined.site is not None
    assert joined.site.name != "worse"


@given(loads, st.integers(1, 64), st.integers(0, 10_000), st.floats(0, 0.01))
def test_the_rest_of_prompts_that_run_is_waited_for(
    s: Site, running: int, rest: int, per_token_s: float
) -> None:
    """One token of each that runs is in every iteration's time."""
    cost = replace(s.load.iteration, per_token_s=per_token_s)
    load = replace(s.load, iteration=cost, running=running, running_remaining=(9,) * running)
    without, with_rest = (
        estimate(DEMAND, replace(s, load=replace(load, unread_tokens=unread)), NOW)
        for unread in (running, running + rest)
    )
    assert with_rest.first_token_s == pytest.approx(without.first_token_s + per_token_s * rest)
    assert with_rest.finish_s == pytest.approx(without.finish_s + per_token_s * rest)
    assert estimate(DEMAND, replace(s, load=load), NOW) == without  # an engine that does not say


@given(loads, st.floats(0, STALE_AFTER_S / 2))
def test_age_never_makes_a_site_look_better(s: Site, more_s: float) -> None:
    older = replace(s, load=replace(s.load, received_s=s.load.received_s - more_s))
    fresh, aged = estimate(DEMAND, s, NOW), estimate(DEMAND, older, NOW)
    assert aged.wait_s >= fresh.wait_s
    assert aged.finish_s >= fresh.finish_s
    assert aged.load_age_s >= fresh.load_age_s


@given(loads, st.integers(1, 50))
def test_more_assigned_work_never_shortens_the_wait(s: Site, more: int) -> None:
    credit = Credit(
        s.credit.requests + more, s.credit.prompt_tokens + 50 * more, s.credit.response_tokens + 80 * more
    )
    before, after = estimate(DEMAND, s, NOW), estimate(DEMAND, replace(s, credit=credit), NOW)
    assert after.first_token_s >= before.first_token_s * (1 - 1e-9)
    assert after.finish_s >= before.finish_s * (1 - 1e-9)


@given(loads)
def test_an_idle_site_has_no_wait_and_a_full_one_has(s: Site) -> None:
    idle = site(slots=s.identity.slots)
    assert estimate(DEMAND, idle, NOW).wait_s == 0
    full = site(slots=s.identity.slots, running=(10,) * s.identity.slots, kv_used=5000)
    assert estimate(DEMAND, full, NOW).wait_s > 0


@given(st.integers(9, 200), st.lists(st.floats(1, 500), min_size=2, max_size=2))
def test_in_a_long_queue_who_is_smaller_waits_less_and_nobody_longer_than_for_all(
    pending: int, lengths: list[float]
) -> None:
    long = replace(site(running=(100,) * 8, pending=pending), rtt_s=0.0)
    waits = [
        estimate(replace(DEMAND, response_tokens=each), long, NOW).wait_s for each in (*sorted(lengths), 80.0)
    ]
    assert 0 < waits[0] <= waits[1] <= waits[2]
    if lengths[0] < 40:
        assert waits[0] < waits[2]


def test_deciding_orders_what_waits_as_a_site_does() -> None:
    assert PROMPT_TOKEN_WORK == request_queue.PROMPT_TOKEN_WORK
    request = Request("r", [1] * 700, remaining=RemainingCurve((RemainingPoint(0, 30.0, 30),)))
    request.max_tokens = 10_000
    assert size(700, 30.0) == pytest.approx(exp(request_queue.least_work(request, 0.0) / 2))


def test_a_site_waits_for_kv_even_with_slots_to_spare() -> None:
    tight = site(slots=8, running=(100, 200), kv_used=9_900)
    assert estimate(DEMAND, tight, NOW).wait_s > 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"state": SiteState.DRAINING}, "draining"),
        ({"state": SiteState.DOWN}, "down"),
        ({"weight": 0.0}, "weight 0"),
        ({"pinned_off": frozenset({"m"})}, "model pinned off by an operator"),
    ],
)
def test_who_may_not_serve_is_told_why(change: dict[str, object], reason: str) -> None:
    placed = decide(DEMAND, Fleet.of([replace(site(), **change)]), mico, now_s=NOW, turn=0)  # type: ignore[arg-type]
    assert placed.site is None
    assert placed.excluded == {"a": reason}


def test_a_stale_idle_site_is_never_chosen_over_a_fresh_busy_one() -> None:
    stale = site("stale", age_s=STALE_AFTER_S + 0.1)
    busy = site("busy", running=(500,) * 8, pending=20)
    placed = decide(DEMAND, Fleet.of([stale, busy]), mico, now_s=NOW, turn=0)
    assert placed.site is busy
    assert "load report" in placed.excluded["stale"]


def test_what_a_site_lacks_excludes_it() -> None:
    demand = replace(DEMAND, needs=frozenset({"logprobs"}))
    assert decide(demand, Fleet.of([site()]), mico, now_s=NOW, turn=0).excluded == {"a": "lacks logprobs"}
    assert decide(replace(DEMAND, model="x"), Fleet.of([site()]), mico, now_s=NOW, turn=0).excluded == {
        "a": "does not serve the model"
    }


@given(st.integers(1, 6), st.integers(1, 40))
def test_equal_sites_share_a_burst_equally(count: int, burst: int) -> None:
    sites = {f"s{i}": site(f"s{i}") for i in range(count)}
    taken = dict.fromkeys(sites, 0)
    for turn in range(burst):
        chosen = decide(DEMAND, Fleet.of(sites.values()), mico, now_s=NOW, turn=turn).site
        assert chosen is not None
        taken[chosen.name] += 1
        n = taken[chosen.name]
        sites[chosen.name] = replace(chosen, credit=Credit(n, 50.0 * n, 80.0 * n))
    assert max(taken.values()) - min(taken.values()) <= 1


def test_a_demand_reserves_its_90_percent_quantile_within_its_cap() -> None:
    forecast = Forecast((0, 100, 1000), (0.5, 0.5), "test")
    free = Demand.of("m", 10, forecast, Sampling())
    capped = Demand.of("m", 10, forecast, Sampling(max_tokens=20))
    assert free.kv_tokens == 10 + forecast.quantile(0.9)
    assert capped.kv_tokens == 10 + 20
    assert Demand.of("m", 10, forecast, Sampling(max_tokens=20, n=3)).kv_tokens == 10 + 3 * 20
    resumed = Demand.of("m", 10, forecast, Sampling(max_tokens=20), delivered=15)
    assert (resumed.prompt_tokens, resumed.kv_tokens) == (25, 10 + 20)


causes = st.sampled_from(
    sorted({*FailureCause} - {FailureCause.CONTEXT_LENGTH, FailureCause.INVALID, FailureCause.RELEASED})
)


@given(st.integers(1, 6), st.lists(causes, min_size=6, max_size=6), st.data())
def test_tries_are_bounded_and_repeat_no_site_but_one_that_was_lost_once(
    most: int, breaks: list[FailureCause], data: st.DataObject
) -> None:
    plan = tries(Sampling(), most)
    this = next(plan)
    used: dict[str, list[FailureCause]] = {f"s{number}": [] for number in range(6)}
    with pytest.raises(MicoError):
        for number, cause in enumerate(breaks, 1):
            assert (this.number, this.failures) == (number, number - 1)
            assert this.tried == {site for site, of in used.items() if of not in ([], [FailureCause.LOST])}
            site = data.draw(st.sampled_from(sorted(used.keys() - this.tried)))
            used[site].append(cause)
            this = plan.send(FailedTry(AttemptFailure(site, cause, "broke"), None))
    assert sum(map(len, used.values())) == most


@given(st.integers(1, MAX_MOVES))
def test_to_be_released_is_no_failure_and_leads_to_the_bidder(moves: int) -> None:
    plan = tries(Sampling(), 1)
    this = next(plan)
    for move in range(1, moves + 1):
        this = plan.send(
            FailedTry(AttemptFailure("a", FailureCause.RELEASED, "released", preferred_site="b"), None)
        )
        assert (this.number, this.moves, this.preferred_site, this.tried) == (
            move + 1,
            move,
            "b",
            frozenset(),
        )
    with pytest.raises(MicoError):
        plan.send(FailedTry(AttemptFailure("b", FailureCause.LOST, "gone"), None))


@given(st.tuples(st.integers(0, 9)), st.integers(0, 20))
def test_what_was_delivered_goes_with_the_next_try(token_ids: tuple[int, ...], chars: int) -> None:
    plan = tries(Sampling(), 3)
    next(plan)
    delivered = Resume(token_ids, "a" * chars, 1)
    assert plan.send(FailedTry(AttemptFailure("a", FailureCause.LOST, "gone"), delivered)).resume == delivered


@pytest.mark.parametrize("sampling", [Sampling(n=2), Sampling(logprobs=0), Sampling(echo=True)])
def test_what_can_not_be_resumed_is_refused_honestly(sampling: Sampling) -> None:
    plan = tries(sampling, 3)
    next(plan)
    with pytest.raises(UpstreamLost, match="gone"):
        plan.send(FailedTry(AttemptFailure("a", FailureCause.LOST, "gone"), Resume((1,), "a", 1)))


def test_more_free_memory_than_a_site_has_makes_it_no_faster() -> None:
    def with_free(tokens: int) -> Site:
        busy = site("busy", running=(500,) * 8, pending=9)
        cost = IterationCost(base_s=0.1, per_kv_token_s=1e-6)
        return replace(busy, load=replace(busy.load, kv_free_tokens=tokens, iteration=cost))

    assert estimate(DEMAND, with_free(2**32 - 1), NOW) == estimate(DEMAND, with_free(10_000), NOW)


def test_a_line_of_a_batch_goes_where_it_is_cheap_a_chat_where_it_starts_soon() -> None:
    near = site("near", price=8.0, rtt_s=0.01)
    far = site("far", price=2.0, rtt_s=0.4)
    for lane, wanted in ((Lane.INTERACTIVE, "near"), (Lane.BATCH, "far")):
        placed = decide(replace(DEMAND, lane=lane), Fleet.of([near, far]), mico, now_s=NOW, turn=0)
        assert placed.site is not None
        assert placed.site.name == wanted
