"""Laws of quotas: however replicas share one, and whatever each knows, together they never use more."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.domain import Caller
from gateway.errors import AboveQuota, BudgetSpent, Overloaded
from gateway.quotas.ledger import LIMITS_PER_TURN, OVERDRAFT, QuotaLedger, Reservation, SliceFull
from gateway.quotas.limits import WINDOW_S, Claim, Grant, Kind, LimitId, Scope
from gateway.quotas.meter import Minute, Month, month_of, month_start
from gateway.quotas.shares import Slice, fair_shares, granted

CALLER = Caller("key-1", "shop")


def limit_of(kind: Kind, scope: Scope = Scope.TENANT) -> LimitId:
    return LimitId(scope, "shop" if scope is Scope.TENANT else "key-1", kind)


@dataclass
class Wall:
    now: float = 1_000_000.5

    def __call__(self) -> float:
        return self.now


def alone(limits: dict[LimitId, int], wall: Wall) -> QuotaLedger:
    """A replica that has all of every quota."""
    quotas = QuotaLedger(clock=wall, unix_time=wall)
    quotas.set_limits(limits)
    for limit_id, limit in limits.items():
        claim = quotas.claim(limit_id)
        assert claim is not None
        quotas.apply_grant(limit_id, claim, Grant(limit, limit, 0, limit))
    return quotas


def opened(quotas: QuotaLedger, amount: int) -> Reservation:
    """Reserve so many tokens and nano-dollars, as a query does. Raises SliceFull."""
    reservation = quotas.open(CALLER, amount)
    try:
        quotas.reserve(reservation, 0, amount)
    except SliceFull:
        quotas.settle(reservation, 0, refused=True)
        raise
    return reservation


@dataclass
class Replicas:
    """Several replicas and what is written down of their slices; every round works on what is written."""

    wall: Wall
    limit: int
    count: int
    kind: Kind
    ledgers: list[QuotaLedger] = field(default_factory=list)
    written: dict[str, Slice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.id = limit_of(self.kind)
        self.ledgers = [QuotaLedger(clock=self.wall, unix_time=self.wall) for _ in range(self.count)]
        for ledger in self.ledgers:
            ledger.set_limits({self.id: self.limit})
            ledger.replicas = self.count

    def round(self, number: int) -> None:
        name, ledger = f"r{number}", self.ledgers[number]
        claim = ledger.claim(self.id)
        assert claim is not None
        others = [each for each in self.written.values() if each.replica != name]
        alive = [f"r{each}" for each in range(self.count)]
        grant = granted(self.limit, name, claim, others, alive)
        self.written[name] = Slice(name, grant.amount, claim.used, grant.want, alive=True)
        ledger.apply_grant(self.id, claim, grant)

    @property
    def used(self) -> int:
        return sum(ledger.in_use(self.id) - ledger._limits[self.id].elsewhere for ledger in self.ledgers)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "end", "round", "round", "wait"]),
        st.integers(0, 3),
        st.integers(1, 60),
    ),
    max_size=120,
)


@settings(deadline=None, max_examples=60)
@given(steps=STEPS, count=st.integers(1, 4), limit=st.integers(1, 200), kind=st.sampled_from(Kind))
def test_replicas_together_never_use_more_than_the_quota(
    steps: list[tuple[str, int, int]], count: int, limit: int, kind: Kind
) -> None:
    here = Replicas(Wall(), limit, count, kind)
    reservations: list[tuple[QuotaLedger, Reservation, int]] = []
    for what, number, amount in steps:
        ledger = here.ledgers[number % count]
        if what == "ask":
            with suppress(SliceFull):
                reservations.append((ledger, opened(ledger, amount), amount))
        elif what == "end" and reservations:
            owner, reservation, tokens = reservations.pop(number % len(reservations))
            owner.settle(reservation, tokens // 2, tokens // 2)
        elif what == "round":
            here.round(number % count)
        elif what == "wait":
            here.wall.now += amount
        assert here.used <= limit
        assert sum(each.amount for each in here.written.values()) <= limit
    for owner, reservation, _ in reservations:
        owner.settle(reservation, 0)
    if kind is Kind.QUERIES:
        assert here.used == 0


@settings(deadline=None, max_examples=100)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["ask", "ask", "grow", "grow", "end", "round", "round"]),
            st.integers(0, 1),
            st.integers(1, 60),
        ),
        max_size=120,
    ),
    limit=st.integers(1_000, 10**12),
)
def test_a_budget_over_two_replicas_is_exceeded_by_a_twentieth_at_most(
    steps: list[tuple[str, int, int]], limit: int
) -> None:
    """Also where answers cost more than was forecast: each part of them is covered before the next comes."""
    here, spent = Replicas(Wall(), limit, 2, Kind.BUDGET), 0
    running: list[tuple[QuotaLedger, Reservation, int]] = []
    for what, number, part in steps:
        ledger, cost = here.ledgers[number], limit * part // 100
        if what == "ask":
            with suppress(SliceFull):
                running.append((ledger, opened(ledger, cost), cost))
        elif what == "grow" and running:
            owner, reservation, cost = running.pop()
            with suppress(SliceFull):
                owner.cover(reservation, 0, cost + limit * part // 1_000)
                cost += limit * part // 1_000
            running.append((owner, reservation, cost))
        elif what == "end" and running:
            owner, reservation, cost = running.pop(0)
            spent += cost
            owner.settle(reservation, 0, cost)
        elif what == "round":
            here.round(number)
        assert spent + sum(cost for _, _, cost in running) <= limit * (1 + OVERDRAFT)
        assert spent <= here.used


@given(
    limit=st.integers(0, 10**9), wants=st.dictionaries(st.text(max_size=3), st.integers(0, 10**9), min_size=1)
)
def test_shares_are_at_most_the_limit_and_the_small_wants_are_met(limit: int, wants: dict[str, int]) -> None:
    shares = fair_shares(limit, wants)
    assert sum(shares.values()) == min(limit, sum(wants.values()))
    for name, want in wants.items():
        assert min(want, limit // len(wants)) <= shares[name] <= want


def test_a_replica_where_all_is_asked_gets_nearly_all_within_a_few_rounds() -> None:
    here = Replicas(Wall(), 1_000, 2, Kind.TOKENS)
    for number in (0, 1, 0, 1):
        here.round(number)
    assert all(80 <= written.amount <= 100 for written in here.written.values()), "most is in no slice"
    taken = 0
    for _ in range(24):
        try:
            here.ledgers[0].open(CALLER, 100)
            taken += 100
        except SliceFull as full:
            assert full.may_grow == (taken < 900)
        for number in (1, 1, 0):  # what did not fit is tried again after each round of its replica
            here.round(number)
    assert taken == 900  # the other replica keeps a standing part


def test_what_is_used_counts_for_a_minute_wherever_a_second_begins() -> None:
    meter = Minute()
    meter.take(10, 100.9)
    meter.take(5, 130.0)
    assert meter.used(160.8) == 15
    assert meter.until_less(12, 150.0) == 130 + 1 + WINDOW_S - 150.0
    assert meter.used(162.0) == 5
    meter.give_back(5, 130.0, 165.0)
    assert meter.used(165.0) == 0
    meter.give_back(5, 100.9, 165.0)  # so long ago that it counts no more
    assert meter.used(165.0) == 0


def test_a_month_ends_with_its_last_second() -> None:
    wall = Wall(1_767_225_599.0)  # 2025-12-31 23:59:59
    meter, ends_at = Month(wall), month_start(month_of(wall.now) + 1)
    assert ends_at == wall.now + 1
    meter.take(7, 5.0)
    assert (meter.used(6.0), meter.until_less(1, 6.0)) == (7, 1)
    december = meter.period(6.0)
    wall.now += 1
    assert (meter.used(7.0), meter.period(7.0)) == (0, december + 1)
    meter.take(9, 8.0)
    meter.give_back(2, 5.0, 8.0)  # of what was taken in December
    assert meter.used(8.0) == 9
    meter.give_back(2, 8.0, 8.0)
    assert meter.used(8.0) == 7


def test_a_month_goes_on_where_the_clock_was_set_back() -> None:
    wall = Wall(1_767_225_600.0)
    meter = Month(wall)
    meter.take(7, 5.0)
    january = meter.period(5.0)
    wall.now -= 3_600.0
    assert (meter.used(6.0), meter.period(6.0)) == (7, january - 1)
    wall.now += 3_600.0
    assert (meter.used(7.0), meter.period(7.0)) == (0, january)


def test_a_query_reserves_tops_up_and_settles_on_what_it_used() -> None:
    wall, tokens = Wall(), limit_of(Kind.TOKENS)
    quotas = alone({tokens: 1_000}, wall)
    reservation = quotas.open(CALLER, 100)
    quotas.reserve(reservation, 300)
    assert quotas.in_use(tokens) == 400
    quotas.cover(reservation, 400)
    assert quotas.in_use(tokens) == 400
    quotas.cover(reservation, 401)
    assert quotas.in_use(tokens) == 464  # topped up by a step, not by a token
    quotas.settle(reservation, 250)
    quotas.settle(reservation, 250)
    assert quotas.in_use(tokens) == 250


def test_an_answer_is_cut_only_where_the_slice_and_a_twentieth_are_gone() -> None:
    tokens = limit_of(Kind.TOKENS)
    quotas = alone({tokens: 1_000}, Wall())
    reservation = quotas.open(CALLER, 1_000)
    most = 1_000 + int(1_000 * OVERDRAFT)
    quotas.cover(reservation, most)
    with pytest.raises(SliceFull):
        quotas.cover(reservation, most + 1)


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("kind", Kind)
def test_every_kind_of_quota_refuses_what_is_too_much_and_says_which(kind: Kind, scope: Scope) -> None:
    wall = Wall()
    quotas = alone({limit_of(kind, scope): 2}, wall)
    first = [opened(quotas, 1) for _ in range(2)]
    with pytest.raises(SliceFull) as full:
        opened(quotas, 1)
    refusal = full.value.refusal
    assert kind.phrase(2) in refusal.message
    assert f"{scope.value} '{'shop' if scope is Scope.TENANT else 'key-1'}'" in refusal.message
    assert not full.value.may_grow
    assert not isinstance(refusal, BudgetSpent)
    for reservation in first:
        quotas.settle(reservation, 0, refused=True)
    quotas.open(CALLER, 2)


def test_a_month_is_spent_only_by_what_was_used_not_by_what_queries_reserve() -> None:
    quotas = alone({limit_of(Kind.MONTH): 100}, Wall())
    first = quotas.open(CALLER, 90)
    with pytest.raises(SliceFull) as full:
        quotas.open(CALLER, 20)
    assert not isinstance(full.value.refusal, BudgetSpent), "the query in progress may give it back"
    assert full.value.refusal.retry_after_s == 1.0
    quotas.settle(first, 85)
    with pytest.raises(SliceFull) as full:
        quotas.open(CALLER, 20)
    assert isinstance(full.value.refusal, BudgetSpent)
    quotas.open(CALLER, 15)


def test_a_refused_query_leaves_no_trace_in_any_quota() -> None:
    wall = Wall()
    limits = {limit_of(kind): 10 for kind in Kind} | {limit_of(Kind.TOKENS, Scope.KEY): 5}
    quotas = alone(limits, wall)
    with pytest.raises(SliceFull):
        quotas.open(CALLER, 6)
    assert [quotas.in_use(each) for each in limits] == [0] * len(limits)
    reservation = quotas.open(CALLER, 5)
    quotas.settle(reservation, 0, refused=True)
    assert [quotas.in_use(each) for each in limits] == [0] * len(limits)


def test_a_query_larger_than_the_quota_is_told_so() -> None:
    quotas = alone({limit_of(Kind.TOKENS): 100}, Wall())
    with pytest.raises(SliceFull) as full:
        quotas.open(CALLER, 101)
    assert isinstance(full.value.refusal, AboveQuota)


@pytest.mark.parametrize("kind", [each for each in Kind if each is not Kind.BUDGET])
def test_a_quota_of_nothing_is_named_and_asks_for_no_smaller_query(kind: Kind) -> None:
    quotas = alone({limit_of(kind): 0}, Wall())
    with pytest.raises(SliceFull) as full:
        quotas.open(CALLER, 5)
    assert isinstance(full.value.refusal, AboveQuota)
    assert full.value.refusal.message == f"the quota of {kind.phrase(0)} of tenant 'shop' allows nothing"


def test_a_forecast_longer_than_the_quota_reserves_what_there_can_be() -> None:
    quotas = alone({limit_of(Kind.TOKENS): 100}, Wall())
    reservation = quotas.open(CALLER, 20)
    quotas.reserve(reservation, 10_000)
    assert reservation.tokens == 100


def test_without_a_quota_nothing_is_held_or_shown() -> None:
    quotas = alone({LimitId(Scope.TENANT, "other", Kind.TOKENS): 1}, Wall())
    reservation = quotas.open(CALLER, 10**9)
    quotas.cover(reservation, 10**12)
    quotas.settle(reservation, 10**12)
    assert quotas.status(CALLER, Kind.TOKENS) is None


def test_what_is_shown_is_the_tightest_quota_as_a_whole() -> None:
    wall, tenant, key = Wall(), limit_of(Kind.TOKENS), limit_of(Kind.TOKENS, Scope.KEY)
    quotas = alone({tenant: 1_000, key: 100}, wall)
    quotas.open(CALLER, 30)
    quotas.apply_grant(key, Claim(100, 30, 30, 0), Grant(100, 100, 20, 80))
    shown = quotas.status(CALLER, Kind.TOKENS)
    assert shown is not None
    assert (shown.limit, shown.remaining) == (100, 50)
    assert 60 < shown.reset_s <= 61


def test_a_lapsed_lease_turns_away_only_those_who_have_quotas() -> None:
    quotas = QuotaLedger(lapsed=lambda: True)
    quotas.set_limits({limit_of(Kind.TOKENS): 10})
    with pytest.raises(Overloaded, match="lease"):
        quotas.open(CALLER, 1)
    quotas.open(Caller("key-2", "nobody's"), 1)


def test_one_limit_that_changes_settles_no_other() -> None:
    limits = {LimitId(Scope.TENANT, f"tenant-{n}", kind): 10 for n in range(50) for kind in Kind}
    quotas, lifted = alone(limits, Wall()), LimitId(Scope.TENANT, "tenant-9", Kind.TOKENS)
    assert [*quotas.unsettled()] == []
    changed = LimitId(Scope.TENANT, "tenant-7", Kind.TOKENS)
    quotas.set_limits({**limits, changed: 20})
    assert [*quotas.unsettled()] == [changed]
    kept = {limit_id: limit for limit_id, limit in limits.items() if limit_id != lifted}
    quotas.set_limits(kept)
    assert quotas.status(Caller("key-9", "tenant-9"), Kind.TOKENS) is None
    assert quotas.status(Caller("key-9", "tenant-9"), Kind.REQUESTS) is not None


def test_limits_that_change_keep_what_is_in_use() -> None:
    tokens = limit_of(Kind.TOKENS)
    quotas = alone({tokens: 100}, Wall())
    quotas.open(CALLER, 60)
    quotas.set_limits({tokens: 50})
    assert quotas.in_use(tokens) == 60
    claim = quotas.claim(tokens)
    assert claim is not None
    quotas.apply_grant(tokens, claim, granted(50, "a", claim, [], ["a"]))
    with pytest.raises(SliceFull):
        quotas.open(CALLER, 1)


def test_many_limits_are_replaced_in_turns() -> None:
    quotas = QuotaLedger()
    limits = {LimitId(Scope.KEY, f"key-{number}", Kind.TOKENS): 10 for number in range(3 * LIMITS_PER_TURN)}
    for replaced in (limits, {}):
        before = len(quotas._limits)
        turns = 0
        for _ in quotas.replace_limits(replaced):
            turns += 1
            assert abs(len(quotas._limits) - before) <= LIMITS_PER_TURN
            before = len(quotas._limits)
        assert turns >= 2
        assert quotas._limits.keys() == replaced.keys()


class CountedMeter:
    """Counts how often its usage is looked at."""

    looks = 0

    def used(self, now: float) -> int:
        CountedMeter.looks += 1
        return 0


def test_a_round_looks_at_no_limit_that_nobody_uses() -> None:
    quotas = QuotaLedger()
    limits = {LimitId(Scope.KEY, f"key-{number}", Kind.TOKENS): 10 for number in range(100)}
    quotas.set_limits(limits)
    for limit_id in [*quotas.unsettled()]:
        claim = quotas.claim(limit_id)
        assert claim is not None
        quotas.apply_grant(limit_id, claim, Grant(10, 10, 0, 10))
    assert [*quotas.unsettled()] == []
    for leased in quotas._limits.values():
        leased.meter = CountedMeter()  # type: ignore[assignment]
    CountedMeter.looks = 0
    assert [*quotas.unsettled()] == []
    assert CountedMeter.looks == 0


@pytest.mark.parametrize("kind", [Kind.MONTH, Kind.BUDGET])
def test_what_queries_in_progress_may_give_back_spends_no_month_of_training(kind: Kind) -> None:
    quotas = alone({limit_of(kind): 1_000}, Wall())
    reservation = opened(quotas, 500)
    assert quotas.charge(CALLER, 500, 500) is None
    quotas.settle(reservation, 100, 100)
    assert quotas.charge(CALLER, 399, 399) is None
    assert isinstance(quotas.charge(CALLER, 1, 1), BudgetSpent)
    assert quotas.in_use(limit_of(kind)) == 1_000


def test_what_other_replicas_used_in_a_month_does_not_count_in_the_next() -> None:
    """No round brings news of a quota of which nothing is used here."""
    wall, month = Wall(), limit_of(Kind.MONTH)
    quotas = QuotaLedger(clock=wall, unix_time=wall)
    quotas.set_limits({month: 100})
    claim = quotas.claim(month)
    assert claim is not None
    quotas.apply_grant(month, claim, Grant(amount=0, target=0, elsewhere=100, reachable=0))
    assert isinstance(quotas.charge(CALLER, 0, 0), BudgetSpent)
    wall.now = month_start(month_of(wall.now) + 1)
    assert quotas.unsettled() == []
    assert quotas.charge(CALLER, 0, 0) is None
    assert quotas.in_use(month) == 0
