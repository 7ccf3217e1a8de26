"""The order of admission; no request waits for ever."""

from __future__ import annotations

import random
from collections import Counter
from math import e

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from site_engine.core.remaining_curve import RemainingCurve, RemainingPoint
from site_engine.core.request import Lane, Request
from site_engine.core.request_queue import (
    AGEING_SHARE,
    FAIR_WITHIN_TOKENS,
    MIN_AGEING_S,
    AdmissionQueue,
    Ageing,
    has_place,
)


def waiting(
    name: str,
    expected: float = 100.0,
    *,
    arrived_s: float = 0.0,
    tenant: str = "",
    lane: Lane = Lane.CHAT,
    priority: int = 0,
    prompt: int = 1,
) -> Request:
    curve = RemainingCurve((RemainingPoint(0, expected, round(expected)),))
    request = Request(name, [1] * prompt, remaining=curve, lane=lane, priority=priority, tenant=tenant)
    request.max_tokens = 10_000
    request.arrived_s = arrived_s
    return request


def order(queue: AdmissionQueue, now: float = 0.0) -> list[str]:
    names = []
    while (request := queue.first(now)) is not None:
        queue.take(request)
        names.append(request.id)
    return names


def filled(*requests: Request) -> AdmissionQueue:
    queue = AdmissionQueue()
    for request in requests:
        queue.push(request)
    return queue


def test_lane_then_priority_then_forecast() -> None:
    queue = filled(
        waiting("offline", 1, lane=Lane.BATCH),
        waiting("later", 1, priority=5),
        waiting("long", 300),
        waiting("short", 20),
    )
    assert order(queue) == ["short", "long", "later", "offline"]


def test_an_answer_that_another_site_began_goes_first() -> None:
    begun = waiting("begun", 900, arrived_s=5.0)
    begun.resumed = (1, 2, 3)
    queue = filled(waiting("short", 1), waiting("old", 500), begun, waiting("urgent", 900, priority=-1))
    assert order(queue, 6.0) == ["urgent", "begun", "short", "old"]


def test_lines_of_batches_go_as_they_come() -> None:
    lines = [waiting(str(n), n, lane=Lane.BATCH, arrived_s=n) for n in (5, 300, 40)]
    assert order(filled(*lines)) == ["5", "300", "40"]


@given(st.integers(1, 5000), st.integers(0, 5000))
def test_a_known_length_leaves_what_is_left_of_it(tokens: int, generated: int) -> None:
    curve = RemainingCurve.exactly(tokens)
    left = max(1, tokens - generated)
    assert curve.expected(generated) == pytest.approx(left)
    assert curve.p90(generated) == left
    assert curve.typical() == pytest.approx(tokens)


def test_waiting_outweighs_length_by_factors() -> None:
    patient = waiting("patient", 100 * e, arrived_s=0.0)
    late = waiting("late", 100, arrived_s=2.1 * MIN_AGEING_S)
    assert order(filled(patient, late)) == ["patient", "late"]
    soon = waiting("soon", 100, arrived_s=1.9 * MIN_AGEING_S)
    assert order(filled(patient, soon)) == ["soon", "patient"]


@given(st.floats(0.01, 5.0), st.integers(1, 200))
def test_a_queue_ages_by_the_time_it_takes_to_pass(gap_s: float, length: int) -> None:
    """However long it is, waiting the same share of that time outweighs the same factor of work."""
    ageing, now_s = Ageing(), 0.0
    ageing.arrived(now_s, 0)
    for _ in range(200):
        now_s += gap_s
        ageing.started(now_s, length)
    before = ageing.arrived(now_s, length)
    aged = ageing.arrived(now_s + 1.0, length) - before
    assert aged == pytest.approx(1.0 / max(MIN_AGEING_S, AGEING_SHARE * length * gap_s), rel=0.05)


@given(st.lists(st.tuples(st.floats(0, 9), st.booleans()), max_size=60))
def test_who_comes_later_is_never_older(news: list[tuple[float, bool]]) -> None:
    ageing, now_s, readings = Ageing(), 0.0, []
    for number, (passed_s, comes) in enumerate(news):
        now_s += passed_s
        if comes:
            readings.append(ageing.arrived(now_s, number))
        else:
            ageing.started(now_s, number)
    assert readings == sorted(readings)


def test_what_may_be_short_goes_before_what_is_surely_as_long() -> None:
    """A long wait hurts a short answer most, so the order follows E[1 / length], not the mean."""
    surely = waiting("surely", 100)
    maybe = waiting("maybe", 100)
    even = (RemainingPoint(0, 100.0, 200), RemainingPoint(10, 185.5, 190), RemainingPoint(190, 5.5, 9))
    maybe.remaining = RemainingCurve(even)
    assert maybe.typical_length() < 15
    assert order(filled(surely, maybe)) == ["maybe", "surely"]


@given(st.lists(st.tuples(st.integers(1, 9000), st.sampled_from("ab")), min_size=1, max_size=80))
def test_no_tenant_gets_far_ahead_of_one_that_waits(work: list[tuple[int, str]]) -> None:
    requests = [waiting(str(n), expected, tenant=name) for n, (expected, name) in enumerate(work)]
    queue, left, given_ = filled(*requests), Counter(name for _, name in work), Counter[str]()
    while (request := queue.first(0.0)) is not None and min(left["a"], left["b"]) > 0:
        queue.take(request)
        left[request.tenant] -= 1
        given_[request.tenant] += round(request.expected_remaining())
        assert abs(given_["a"] - given_["b"]) <= FAIR_WITHIN_TOKENS + 2 * 9000


def test_a_newcomer_has_no_credit_for_the_time_it_was_away() -> None:
    queue = filled(*[waiting(f"old {n}", 9000, tenant="old") for n in range(40)])
    for _ in range(20):
        first = queue.first(0.0)
        assert first is not None
        queue.take(first)
    for n in range(20):
        queue.push(waiting(f"new {n}", 8000, tenant="new"))
    assert sum(name.startswith("old") for name in order(queue)[:16]) >= 4


def test_who_starves_goes_first_within_its_lane() -> None:
    queue = AdmissionQueue(starving_after_s=10.0)
    queue.push(waiting("starves", 10_000, priority=9))
    queue.push(waiting("offline", 1, lane=Lane.BATCH))
    for n in range(5):
        queue.push(waiting(f"favourite {n}", 1, arrived_s=9.0))
    first = queue.first(5.0)
    assert first is not None
    assert first.id.startswith("favourite")
    late = queue.first(11.0)
    assert late is not None
    assert late.id == "starves"


def moved_in(*requests: Request, now_s: float) -> AdmissionQueue:
    queue = AdmissionQueue(starving_after_s=1000.0)
    for request in requests:
        queue.push(request, now_s)
    return queue


def test_what_another_engine_gives_up_has_waited_since_it_came_there() -> None:
    late = waiting("late", 100, arrived_s=100.0)
    patient = waiting("patient", 100 * e, arrived_s=100.0 - 2.1 * MIN_AGEING_S)
    assert order(moved_in(late, patient, now_s=100.0), 100.0) == ["patient", "late"]
    soon = waiting("soon", 100 * e, arrived_s=100.0 - 1.9 * MIN_AGEING_S)
    assert order(moved_in(late, soon, now_s=100.0), 100.0) == ["late", "soon"]
    starves = waiting("starves", 100, arrived_s=0.0, priority=9)
    queue = moved_in(late, starves, waiting("newest", 100, arrived_s=900.0), now_s=900.0)
    assert order(queue, 1001.0)[0] == "starves"


def test_the_time_that_an_engine_was_idle_slows_no_queue_that_moves_to_it() -> None:
    """It is no time between two starts while others wait."""
    moved = [waiting(f"moved {n}", 100, arrived_s=n / 10) for n in range(50)]
    queue = moved_in(*moved, now_s=100.0)
    for request in moved[:8]:
        queue.first(100.0)
        queue.take(request)
    queue.push(waiting("patient", 100 * e, arrived_s=100.0, priority=-1))
    queue.push(waiting("late", 100, arrived_s=100.0 + 2.1 * MIN_AGEING_S, priority=-1))
    assert order(queue, 110.0)[:2] == ["patient", "late"]


class Compared(float):
    """A time that counts how often it was compared."""

    times = 0

    def __lt__(self, other: float) -> bool:
        Compared.times += 1
        return super().__lt__(other)


def test_many_requests_that_an_engine_gives_up_are_put_in_order_once() -> None:
    """When an engine is lost, all that waited there come at once, into a queue that is long itself."""
    Compared.times = 0
    queue = AdmissionQueue(starving_after_s=10.0)
    for n in range(1000):
        queue.push(waiting(f"own {n}", 100, arrived_s=Compared(2 * n)))
    came = [2 * n + 1 for n in range(500)]
    for arrived_s in reversed(came):
        queue.push(waiting(f"moved {arrived_s}", 100, arrived_s=Compared(arrived_s)))
    first = queue.first(3000.0)
    assert first is not None
    assert first.id == "own 0"
    arrivals = [each.arrived_s for each in queue]
    assert arrivals == sorted(arrivals)
    assert Compared.times < 50 * 1500


def test_a_flood_does_not_go_before_the_few_queries_of_another_tenant() -> None:
    """Also once it starves, and while the tenants' shares still count as alike."""
    queue = AdmissionQueue(starving_after_s=10.0)
    for n in range(1_000):
        queue.push(waiting(f"flood {n}", tenant="flood", arrived_s=0.01 * n))
    for now in (1.0, 60.0):
        for _ in range(10):
            request = queue.first(now)
            assert request is not None
            queue.take(request)
        for n in range(5):
            queue.push(waiting(f"few {n}", tenant="few", arrived_s=now))
        for n in range(5):
            request = queue.first(now)
            assert request is not None
            assert request.id == f"few {n}"
            queue.take(request)


def test_who_asks_for_a_little_more_than_the_others_is_not_shut_out() -> None:
    """In overload more and more of it waits: were that a flood, its shortest would wait the longest."""
    queue = filled(*[waiting(f"{name} {n}", 1_000, tenant=name) for name in "abc" for n in range(20)])
    for n in range(40):
        queue.push(waiting(f"more {n}", 1_000, tenant="more"))
    queue.push(waiting("short", 10, tenant="more"))
    assert order(queue)[0] == "short"


def test_a_tenant_is_charged_for_what_it_got_not_for_what_was_expected() -> None:
    """One tenant's answers are ten times as long as forecast: in the end both got as many tokens."""
    queue, got = AdmissionQueue(), Counter[str]()
    for n in range(200):
        queue.push(waiting(f"long {n}", 1_000, tenant="long"))
    for n in range(1_400):
        queue.push(waiting(f"short {n}", 1_000, tenant="short"))
    while got.total() < 40 * FAIR_WITHIN_TOKENS:
        request = queue.first(0.0)
        assert request is not None
        queue.take(request)
        tokens = 10_000 if request.tenant == "long" else 1_000
        request.tokens += [1] * tokens
        got[request.tenant] += tokens
        queue.settle(request)
        queue.settle(request)
    assert 0.8 < got["long"] / got["short"] < 1.25


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(means=st.lists(st.sampled_from((300, 1_000, 4_000)), min_size=2, max_size=5), seed=st.integers(0, 9))
def test_tenants_that_all_have_demand_are_served_alike(means: list[int], seed: int) -> None:
    """Jain's index of the tokens served is at least 0.95, however the tenants' requests differ."""
    rnd, queue, each = random.Random(seed), AdmissionQueue(), 10 * FAIR_WITHIN_TOKENS
    for tenant, mean in enumerate(means):
        for n in range(2 * each // mean):
            queue.push(waiting(f"{tenant}.{n}", rnd.uniform(0.5, 1.5) * mean, tenant=str(tenant)))
    got = [0.0] * len(means)
    while sum(got) < each * len(means):
        request = queue.first(0.0)
        assert request is not None
        queue.take(request)
        got[int(request.tenant)] += request.expected_remaining()
    assert sum(got) ** 2 / (len(got) * sum(tokens**2 for tokens in got)) >= 0.95


@given(most=st.integers(1, 200), tenants=st.integers(1, 5))
def test_no_tenant_fills_the_queue_alone(most: int, tenants: int) -> None:
    held = [0] * tenants
    for tenant in range(tenants):  # each takes all that it can get
        while has_place(held[tenant], sum(held), most):
            held[tenant] += 1
    assert sum(held) <= most
    if most >= 20:
        assert has_place(0, sum(held[:1]), most)
        assert min(held) > 0 or tenants > 2
        assert held[0] >= 0.75 * most


def test_thousands_that_wait_are_taken_and_given_up_without_a_look_at_all_the_others() -> None:
    looks = 0

    class Noticed(float):
        def __eq__(self, other: object) -> bool:
            nonlocal looks
            looks += 1
            return float(self) == other

        def __hash__(self) -> int:
            return hash(float(self))

        def __rsub__(self, now: float) -> float:
            nonlocal looks
            looks += 1
            return now - float(self)

    queue, draw = AdmissionQueue(lambda request, _: Noticed(draw.random())), random.Random(0)
    names = [str(at) for at in range(2_000)]
    for name in names:
        request = waiting(name)
        queue.push(request)
        request.arrived_s = Noticed(0.0)
    for name in names[::2]:
        queue.remove(name)
    assert len(order(queue, now=1_000.0)) == 1_000
    assert looks <= 40 * len(names)


@given(seed=st.integers(0, 1000))
def test_every_request_leaves_once_and_the_sums_return_to_zero(seed: int) -> None:
    rnd = random.Random(seed)
    queue = AdmissionQueue()
    inside: set[str] = set()
    for at in range(60):
        if rnd.random() < 0.6:
            name = str(at)
            lane = rnd.choice([Lane.CHAT, Lane.BATCH])
            queue.push(
                waiting(
                    name,
                    rnd.uniform(1, 500),
                    arrived_s=float(at),
                    tenant=rnd.choice("abc"),
                    lane=lane,
                    priority=rnd.randrange(3),
                    prompt=rnd.randint(1, 9),
                )
            )
            inside.add(name)
        elif inside and rnd.random() < 0.3:
            name = rnd.choice(sorted(inside))
            assert queue.remove(name) is not None
            assert queue.remove(name) is None
            inside.remove(name)
        elif inside:
            first = queue.first(float(at))
            assert first is not None
            queue.take(first)
            inside.remove(first.id)
        assert len(queue) == len(inside)
        assert {request.id for request in queue} == inside
    assert set(order(queue, 100.0)) == inside
    assert (queue.prompt_tokens, queue.response_tokens) == (0, 0.0)
