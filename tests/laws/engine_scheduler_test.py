"""Whatever comes, leaves and is preempted, no token is planned twice, and nothing is held by nobody.

Plans are launched before the tokens of the one before are known, as where steps overlap.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from site_engine.core.adapter_slots import AdapterSlots
from site_engine.core.page_pool import PagePool
from site_engine.core.prefix_cache import PrefixTree
from site_engine.core.remaining_curve import RemainingCurve, RemainingPoint
from site_engine.core.request import Lane, Request, Sampling, State
from site_engine.core.request_queue import AdmissionQueue
from site_engine.core.schedule_plan import SchedulePlan
from site_engine.core.scheduler import Scheduler

PAGES, PAGE_SIZE, SLOTS, ADAPTERS = 24, 4, 5, 2
LONGEST = PAGES * PAGE_SIZE
CURVES = [RemainingCurve(((RemainingPoint(0, tokens, 2 * int(tokens))),)) for tokens in (1.0, 1.0, 8.0)]


@dataclass(frozen=True, eq=False)
class Adapter:
    """A variant that is served, with an adapter if it has a rank."""

    fingerprint: str
    rank: int
    eos_token_ids: tuple[int, ...] = ()
    virtual_tokens: int = 0


class Received:
    """Counts the pages that came with requests from other engines."""

    def __init__(self) -> None:
        self.kept: dict[str, int] = {}

    def copy_in(self, request_id: str, pages: list[int], skip: int) -> None:
        assert len(pages) >= self.kept.pop(request_id)

    def drop(self, request_id: str) -> None:
        del self.kept[request_id]


class Load:
    """Requests of all kinds, and what becomes of them."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = Random(seed)
        self.pool, self.received = PagePool(PAGES, PAGE_SIZE), Received()
        self.adapters = AdapterSlots(ADAPTERS)
        self.scheduler = Scheduler(
            self.pool,
            AdmissionQueue(),
            PrefixTree(self.pool) if draw.random() < 0.7 else None,
            self.received,
            slots=SLOTS,
            token_budget=draw.choice((8, 32)),
            adapters=self.adapters,
        )
        self.variants: list[Any] = [
            Adapter(f"v{at}", rank) for at, rank in enumerate((8, 8, 7, 6, 64, 60, 33, 0))
        ]
        self.live: dict[str, Request] = {}
        self.pending = SchedulePlan()
        self.now = 0.0

    def push(self, name: str) -> None:
        draw = self.draw
        lane = draw.choice((Lane.CHAT, Lane.BATCH, Lane.BATCH))
        prompt = [
            *range(draw.choice((0, 0, 9))),
            *(draw.randrange(99) for _ in range(draw.choice((2, 3, 40)))),
        ]
        request: Any = Request(
            name, prompt, Sampling(), draw.choice(CURVES), lane, draw.choice((0, 0, 1)), draw.choice("abc")
        )
        request.any_order = lane is Lane.BATCH and draw.random() < 0.5
        request.prefill_heavy = request.any_order and draw.random() < 0.5
        request.variant = draw.choice((None, *self.variants))
        request.max_tokens = draw.randint(1, min(30, LONGEST - len(prompt)))
        request.arrived_s = self.now
        self.live[name] = request
        if draw.random() < 0.7:
            self.scheduler.queue.push(request)
        else:  # it comes from another engine, which has begun it
            request.received = draw.randrange(1, len(prompt))
            self.received.kept[name] = self.pool.pages_for(request.received)
            self.scheduler.adopt(request)

    def disturb(self) -> None:
        """Let something happen between two plans."""
        draw, happens = self.draw, self.draw.random()
        one = draw.choice(list(self.live.values())) if self.live else None
        if one is not None and happens < 0.04:
            self.end(one)
        elif happens < 0.06:
            self.adapters.forget(draw.choice(self.variants))
        elif one is not None and one.id not in self.scheduler.queue and happens < 0.08:
            self.read()  # as where memory is given back: all tokens are known then
            self.scheduler.preempt_beyond(draw.randrange(PAGES))

    def end(self, request: Request) -> None:
        del self.live[request.id]
        self.scheduler.release(request)

    def step(self) -> bool:
        """Launch a plan, then read the one before; return whether anything was computed."""
        self.now += 0.05
        plan = self.scheduler.plan(self.now, max_new=self.draw.choice((None, 2)))
        for request, start, length, samples in plan.chunks:
            assert request.row >= 0 and start == request.computed
            awaits = any(chunk.request is request and chunk.samples for chunk in self.pending.chunks)
            known = len(request.tokens) + awaits
            assert start + length <= known, "a token that nobody knows"
            assert samples == (start + length == known), "a token that is made twice, or never"
        self.scheduler.advance(plan)
        for request, start, length, samples in plan.chunks:
            if samples and start + length - request.prompt_len + 1 >= request.max_tokens:
                request.state = State.LAST
        self.read()
        self.pending = plan
        return bool(plan)

    def read(self) -> None:
        for chunk in self.pending.chunks:
            request = chunk.request
            if chunk.samples and self.live.get(request.id) is request:
                request.tokens.append(self.draw.randrange(99))
                if request.generated >= request.max_tokens or self.draw.random() < 0.01:
                    self.end(request)
        self.pending = SchedulePlan()

    def check(self) -> None:
        """Everything that is held has one holder for each time that it is."""
        scheduler, tree = self.scheduler, self.scheduler.kv_cache_manager.prefixes
        held = Counter(page for each in scheduler.running for page in each.pages)
        held.update(() if tree is None else tree._nodes.keys())
        assert [self.pool.references(page) for page in range(PAGES + 1)] == [
            held[p] for p in range(PAGES + 1)
        ]
        assert sorted([*(each.row for each in scheduler.running), *scheduler._rows]) == list(range(SLOTS))
        assert set(self.received.kept) == {each.id for each in scheduler.preempted if each.received}
        assert self.adapters._held == Counter(each.variant for each in scheduler.running if each.has_adapter)


@pytest.mark.parametrize("seed", range(20, 40))
def test_in_any_load_no_token_is_planned_twice_and_all_is_given_back(seed: int) -> None:
    load, still = Load(seed), 0
    coming = [str(at) for at in range(60)]
    while coming or load.live:
        if coming and load.draw.random() < 0.3:
            load.push(coming.pop())
        load.disturb()
        still = 0 if load.step() or coming else still + 1
        load.check()
        assert still < 5, "requests wait for nothing"
    scheduler = load.scheduler
    if scheduler.kv_cache_manager.prefixes is not None:
        scheduler.kv_cache_manager.prefixes.clear()
    assert load.pool.free == PAGES
    assert not load.received.kept
    assert scheduler.reservation.reserved_tokens() == 0
    assert not (scheduler._order or scheduler._decode_heavy or scheduler.reservation._keepers)
