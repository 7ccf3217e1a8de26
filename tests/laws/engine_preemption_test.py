"""A request that had to give up its pages goes on as if nothing had been."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from site_engine.core.page_pool import PagePool
from site_engine.core.request import Lane, Request, Sampling
from site_engine.core.request_queue import POLICIES, AdmissionQueue
from site_engine.core.scheduler import Scheduler
from site_engine.engine.engine import SiteEngine
from tests.support.engine_models import (
    TOO_SHORT,
    Collected,
    assert_idle,
    drain,
    engine_for,
    family,
    greedy,
)

torch.set_num_threads(1)

PROMPTS = [[7 * at + 1, 5, at + 2] for at in range(6)]


def tight(**settings: Any) -> SiteEngine:
    """A pool for two and a half answers, and forecasts that promise far too little."""
    engine = engine_for(
        family("llama").served,
        **({"slots": 6, "kv_tokens": 96, "page_size": 4} | settings),
    )
    for at, prompt in enumerate(PROMPTS):
        request = greedy(str(at), prompt, 40)
        request.remaining = TOO_SHORT
        engine.submit(request)
    return engine


def preemptions(collected: dict[str, Collected]) -> int:
    return sum(one.last.timings.preemptions for one in collected.values() if one.last and one.last.timings)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_every_way_back_gives_the_same_tokens(prefix_cache: bool) -> None:
    engine = tight(prefix_cache=prefix_cache)
    collected = drain(engine)
    for at, prompt in enumerate(PROMPTS):
        found = collected[str(at)].token_ids
        assert found == family("llama").generate(prompt, 40, guess=found)
    assert preemptions(collected) > 0
    assert_idle(engine)


def test_a_preempted_request_that_is_cancelled_leaves_nothing() -> None:
    engine = tight()
    while not engine._scheduler.preempted:
        engine.step()
    for at in range(6):
        engine.cancel(str(at))
    engine.step()
    assert engine._pool.available == engine._pool.capacity
    assert_idle(engine)


@pytest.mark.parametrize("steps", [2, 8])
def test_what_a_request_finds_of_its_own_when_it_returns_is_not_told_as_cached(steps: int) -> None:
    """Preempted in the middle of its prompt, or of its answer."""
    engine = engine_for(family("llama").served, token_budget=8)
    request = greedy("r", list(range(1, 42)), 20)
    engine.submit(request)
    for _ in range(steps):
        engine.step()
    engine._scheduler._preempt(request)
    engine.step()
    assert request.computed >= 16
    last = drain(engine)["r"].last
    assert last is not None and last.timings is not None
    assert (last.timings.preemptions, last.timings.cached_prompt_tokens) == (1, 0)


def test_who_is_preempted_is_not_in_the_same_plan() -> None:
    engine = tight()
    scheduler: Any = engine._scheduler
    plan_ = scheduler.plan

    def watched(now: float, **limits: int) -> Any:
        plan = plan_(now, **limits)
        assert not {entry.request for entry in plan.chunks} & set(scheduler.preempted)
        assert plan.tokens <= 64
        return plan

    scheduler.plan = watched
    assert preemptions(drain(engine)) > 0


def test_who_is_preempted_for_a_chat_does_not_return_in_the_same_plan() -> None:
    """Its newest token may still be computed: a second one would be made in its place."""
    site = Scheduler(PagePool(24, 4), AdmissionQueue(), slots=4, token_budget=256)

    def push(name: str, tokens: int, lane: Lane) -> Request:
        request = Request(name, range(1, tokens + 1), Sampling(), TOO_SHORT, lane)
        request.max_tokens = 8
        site.queue.push(request)
        return request

    def plan() -> set[str]:
        made = site.plan(0.0)
        site.advance(made)
        return {chunk.request.id for chunk in made.chunks}

    push("large", 60, Lane.BATCH)
    small = push("small", 3, Lane.BATCH)
    assert plan() == {"large", "small"}
    push("chat", 40, Lane.CHAT)
    assert plan() == {"chat"}  # for which the small one alone would not have made room
    small.tokens.append(7)
    assert plan() == {"chat", "small"}


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_policy_changes_the_order_and_no_token(name: str) -> None:
    engine = tight(policy=POLICIES[name])
    collected = drain(engine)
    for at, prompt in enumerate(PROMPTS):
        found = collected[str(at)].token_ids
        assert found == family("llama").generate(prompt, 40, guess=found)
    if name in {"worst_case", "static"}:
        assert preemptions(collected) == 0


def test_a_static_batch_starts_when_the_one_before_has_ended() -> None:
    engine = engine_for(family("llama").served, slots=2, policy=POLICIES["static"])
    for name, length in (("short", 2), ("long", 9), ("next", 2)):
        engine.submit(greedy(name, [1, 2, 3], length))
    ended: list[str] = []
    while engine.has_work:
        running = {request.id for request in engine._scheduler.running}
        assert running <= {"short", "long"} or "long" in ended
        ended += [output.request_id for output in engine.step() if output.finish]
    assert ended == ["short", "long", "next"]


def test_the_shortest_prompt_goes_first_when_asked_for() -> None:
    engine = engine_for(family("llama").served, slots=1, policy=POLICIES["shortest_prompt"])
    for length in (9, 3, 6):
        engine.submit(greedy(str(length), [1] * length, 1))
    assert list(drain(engine)) == ["3", "6", "9"]


def test_log_probabilities_of_a_prompt_come_once_also_after_a_preemption() -> None:
    engine = engine_for(family("llama").served, slots=4, kv_tokens=64)
    rules = Sampling(max_tokens=30, temperature=0.0, logprobs=0, prompt_logprobs=True)
    for name in "abcd":
        engine.submit(Request(name, [7, 8, 9, ord(name)], rules, TOO_SHORT))
    collected = drain(engine)
    lasts = [each.last for each in collected.values()]
    assert any(last is not None and last.timings is not None and last.timings.preemptions for last in lasts)
    for each in collected.values():
        assert sum(len(output.prompt_logprobs) for output in each.outputs) == 4
