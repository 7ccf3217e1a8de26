"""In front of a server tenants take turns by tokens, and are settled with as at a site of our own."""

from __future__ import annotations

from collections import Counter

import pytest

from site_engine.core.request import Lane, RemainingCurve, RemainingPoint, Request
from site_engine.core.request_queue import STARVING_AFTER_S, STARVING_EVERY
from site_engine.remote.queue import Held, Holding
from site_engine.remote.request import Asking


def held(name: str, tenant: str, tokens: int, arrived_s: float = 0.0) -> Held:
    curve = RemainingCurve((RemainingPoint(0, float(tokens), tokens),))
    return Held(
        (Request(name, [1], tenant=tenant, remaining=curve),), Asking("", {}), 10, arrived_s, lambda _: None
    )


def test_a_flood_does_not_delay_another_tenant() -> None:
    holding = Holding()
    for n in range(300):
        holding.add(held(f"flood {n}", "flood", 100))
    for _ in range(20):
        holding.begin(0.0)
    for n in range(3):
        holding.add(held(f"few {n}", "few", 100, 1.0))
    order = [holding.begin(0.0).request.tenant for _ in range(6)]
    assert order.count("few") == 3
    assert order.index("few") <= 1
    assert holding.pending_of("flood") == 277


def test_a_tenant_is_charged_for_what_it_got_and_not_for_what_was_expected() -> None:
    holding, got = Holding(), Counter[str]()
    for n in range(400):
        for tenant, expected in (("underrated", 10), ("plain", 200)):
            holding.add(held(f"{tenant} {n}", tenant, expected))
    while got["plain"] < 10_000:
        one = holding.begin(0.0)
        one.stream.feed(b'data: {"usage": {"prompt_tokens": 10, "completion_tokens": 200}}\n\n')
        got[one.request.tenant] += one.tokens
        holding.drop(one)
    assert 0.8 < got["underrated"] / got["plain"] < 1.25


def test_what_was_never_sent_is_not_charged_for() -> None:
    holding = Holding()
    gone = [held(f"gone {n}", "gone", 500) for n in range(50)]
    for each in gone:
        holding.add(each)
    for each in gone:
        holding.drop(each)
    for name, tenant in (("other", "other"), ("back", "gone")):
        holding.add(held(name, tenant, 10))
    assert [holding.begin(0.0).request.id for _ in range(2)] == ["other", "back"]
    assert not holding.pending


def test_lanes_and_priorities_go_before_turns() -> None:
    holding = Holding()
    for n, (lane, priority) in enumerate([(Lane.BATCH, 0), (Lane.CHAT, 1), (Lane.CHAT, 0), (Lane.CHAT, 0)]):
        one = held(str(n), "t", 10, float(n))
        one.request.lane, one.request.priority = lane, priority
        holding.add(one)
    assert [holding.begin(0.0).request.id for _ in range(4)] == ["2", "3", "1", "0"]


@pytest.mark.parametrize("tenant", ["flood", "other"])
def test_who_is_put_back_does_not_starve(tenant: str) -> None:
    holding = Holding()
    late = held("late", tenant, 100, 0.0)
    late.request.priority = 1
    holding.add(late)
    for n in range(20):
        holding.add(held(str(n), "flood", 100, 1.0))
    before = [holding.begin(STARVING_AFTER_S) for _ in range(8)]
    assert late not in before
    assert late in [holding.begin(STARVING_AFTER_S + 1.0) for _ in range(STARVING_EVERY)]


def test_tenants_that_all_wait_get_as_many_tokens() -> None:
    holding, got = Holding(), Counter[str]()
    for n in range(200):
        for tenant, tokens in (("long", 400), ("short", 50)):
            holding.add(held(f"{tenant} {n}", tenant, tokens))
    while got["short"] < 3_000:
        one = holding.begin(0.0)
        got[one.request.tenant] += one.prompt_tokens + round(one.expected_remaining())
    assert 0.8 < got["long"] / got["short"] < 1.25


def test_turns_of_tenants_that_left_are_forgotten() -> None:
    holding = Holding()
    for n in range(100):
        holding.add(held(str(n), f"tenant {n}", 10))
    for _ in range(100):
        holding.drop(holding.begin(0.0))
    holding.add(held("last", "last", 10))
    holding.begin(0.0)
    holding.add(held("later", "last", 10))
    holding.begin(0.0)
    assert len(holding._clocks) <= 101
    assert len(holding) == 2
