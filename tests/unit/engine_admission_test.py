"""Who goes first, and that nobody waits for ever."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from site_engine.admission import AGEING_TOKENS_PER_S, AdmissionQueue
from site_engine.request import Lane, RemainingCurve, RemainingPoint, Request


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


def test_waiting_is_worth_tokens() -> None:
    patient = waiting("patient", 300, arrived_s=0.0)
    late = waiting("late", 10, arrived_s=400 / AGEING_TOKENS_PER_S)
    assert order(filled(late, patient)) == ["patient", "late"]


def test_tenants_take_turns_by_tokens_not_by_requests() -> None:
    greedy = [waiting(f"greedy {n}", 100, tenant="greedy") for n in range(6)]
    modest = [waiting(f"modest {n}", 50, tenant="modest") for n in range(6)]
    names = order(filled(*greedy, *modest))
    served = names[:6]
    assert 3 <= sum(name.startswith("modest") for name in served) <= 5


def test_a_newcomer_has_no_credit_for_the_time_it_was_away() -> None:
    queue = filled(*[waiting(f"old {n}", 100, tenant="old") for n in range(20)])
    for _ in range(10):
        first = queue.first(0.0)
        assert first is not None
        queue.take(first)
    for n in range(10):
        queue.push(waiting(f"new {n}", 100, tenant="new"))
    assert sum(name.startswith("old") for name in order(queue)[:6]) >= 2


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
