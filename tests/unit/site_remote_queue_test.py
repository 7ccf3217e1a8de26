"""In front of a server tenants take turns by tokens, and are charged as at a native site."""

from __future__ import annotations

from collections import Counter

import pytest

from site_engine.core.remaining_curve import RemainingCurve, RemainingPoint
from site_engine.core.request import Lane, Request
from site_engine.core.request_queue import STARVING_AFTER_S, STARVING_EVERY
from site_engine.remote.queue import RemoteQueue, RemoteRequest
from site_engine.remote.request import HttpRequest


def request(name: str, tenant: str, tokens: int, arrived_s: float = 0.0) -> RemoteRequest:
    curve = RemainingCurve((RemainingPoint(0, float(tokens), tokens),))
    return RemoteRequest(
        (Request(name, [1], tenant=tenant, remaining=curve),),
        HttpRequest("", {}),
        10,
        arrived_s,
        lambda _: None,
    )


def test_a_flood_does_not_delay_another_tenant() -> None:
    queue = RemoteQueue()
    for n in range(300):
        queue.add(request(f"flood {n}", "flood", 100))
    for _ in range(20):
        queue.pop(0.0)
    for n in range(3):
        queue.add(request(f"few {n}", "few", 100, 1.0))
    order = [queue.pop(0.0).first.tenant for _ in range(6)]
    assert order.count("few") == 3
    assert order.index("few") <= 1
    assert queue.pending_of("flood") == 277


def test_a_tenant_is_charged_for_what_it_got_and_not_for_what_was_expected() -> None:
    queue, got = RemoteQueue(), Counter[str]()
    for n in range(400):
        for tenant, expected in (("underrated", 10), ("plain", 200)):
            queue.add(request(f"{tenant} {n}", tenant, expected))
    while got["plain"] < 10_000:
        one = queue.pop(0.0)
        one.stream.feed(b'data: {"usage": {"prompt_tokens": 10, "completion_tokens": 200}}\n\n')
        got[one.first.tenant] += one.tokens
        queue.remove(one)
    assert 0.8 < got["underrated"] / got["plain"] < 1.25


def test_what_was_never_sent_is_not_charged_for() -> None:
    queue = RemoteQueue()
    gone = [request(f"gone {n}", "gone", 500) for n in range(50)]
    for each in gone:
        queue.add(each)
    for each in gone:
        queue.remove(each)
    for name, tenant in (("other", "other"), ("back", "gone")):
        queue.add(request(name, tenant, 10))
    assert [queue.pop(0.0).first.id for _ in range(2)] == ["other", "back"]
    assert not queue.pending


def test_lanes_and_priorities_go_before_turns() -> None:
    queue = RemoteQueue()
    for n, (lane, priority) in enumerate([(Lane.BATCH, 0), (Lane.CHAT, 1), (Lane.CHAT, 0), (Lane.CHAT, 0)]):
        one = request(str(n), "t", 10, float(n))
        one.first.lane, one.first.priority = lane, priority
        queue.add(one)
    assert [queue.pop(0.0).first.id for _ in range(4)] == ["2", "3", "1", "0"]


@pytest.mark.parametrize("tenant", ["flood", "other"])
def test_who_is_put_back_does_not_starve(tenant: str) -> None:
    queue = RemoteQueue()
    late = request("late", tenant, 100, 0.0)
    late.first.priority = 1
    queue.add(late)
    for n in range(20):
        queue.add(request(str(n), "flood", 100, 1.0))
    before = [queue.pop(STARVING_AFTER_S) for _ in range(8)]
    assert late not in before
    assert late in [queue.pop(STARVING_AFTER_S + 1.0) for _ in range(STARVING_EVERY)]


def test_tenants_that_all_wait_get_as_many_tokens() -> None:
    queue, got = RemoteQueue(), Counter[str]()
    for n in range(200):
        for tenant, tokens in (("long", 400), ("short", 50)):
            queue.add(request(f"{tenant} {n}", tenant, tokens))
    while got["short"] < 3_000:
        one = queue.pop(0.0)
        got[one.first.tenant] += one.prompt_tokens + round(one.expected_remaining())
    assert 0.8 < got["long"] / got["short"] < 1.25


def test_turns_of_tenants_that_left_are_forgotten() -> None:
    queue = RemoteQueue()
    for n in range(100):
        queue.add(request(str(n), f"tenant {n}", 10))
    for _ in range(100):
        queue.remove(queue.pop(0.0))
    queue.add(request("last", "last", 10))
    queue.pop(0.0)
    queue.add(request("later", "last", 10))
    queue.pop(0.0)
    assert len(queue._clocks) <= 101
    assert len(queue) == 2
