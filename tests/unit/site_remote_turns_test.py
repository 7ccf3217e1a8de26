"""In front of a server tenants take turns by tokens, as they do at a site of our own."""

from __future__ import annotations

from collections import Counter

from site_engine.remote.asking import Asking
from site_engine.remote.held import Held, Holding
from site_engine.request import RemainingCurve, RemainingPoint, Request


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
        holding.begin()
    places = [holding.add(held(f"few {n}", "few", 100, 1.0)) for n in range(3)]
    assert places == [0, 2, 4]
    assert holding.pending_of("flood") == 280


def test_tenants_that_all_wait_get_as_many_tokens() -> None:
    holding, got = Holding(), Counter[str]()
    for n in range(200):
        for tenant, tokens in (("long", 400), ("short", 50)):
            holding.add(held(f"{tenant} {n}", tenant, tokens))
    while got["short"] < 3_000:
        one = holding.begin()
        got[one.request.tenant] += one.prompt_tokens + round(one.expected_remaining())
    assert 0.8 < got["long"] / got["short"] < 1.25


def test_turns_of_tenants_that_left_are_forgotten() -> None:
    holding = Holding()
    for n in range(100):
        holding.add(held(str(n), f"tenant {n}", 10))
    for _ in range(100):
        holding.drop(holding.begin())
    holding.add(held("last", "last", 10))
    holding.begin()
    holding.add(held("later", "last", 10))
    holding.begin()
    assert len(holding._turns) <= 101
    assert len(holding) == 2
