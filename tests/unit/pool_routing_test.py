"""Which engine of a pool a request goes to, and what the site reports of all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from site_engine.core.load import IterationCost, LoadFigures
from site_engine.core.remaining_curve import RemainingCurve
from site_engine.core.request import Request, Sampling
from site_engine.engine_client import Facts
from site_engine.pool.figures import idle_figures, join_facts, join_figures, mean_cost
from site_engine.pool.routing import (
    BLOCK_TOKENS,
    Engine,
    PrefixIndex,
    Work,
    blocks_of,
    choose,
    finish_s,
    work_of,
)

FACTS = Facts("m", "r", 4096, 1000, (), 8, 10_000)
COST = IterationCost(0.01, 0.0001, 0.00002, 1e-8)
IDLE = idle_figures(FACTS)._replace(iteration=COST)


def at(load: LoadFigures = IDLE, given_work: Work = Work()) -> Engine:  # noqa: B008 - a plain value
    return Engine(load, FACTS.slots, FACTS.kv_tokens, given_work)


loads = st.builds(
    lambda remaining, pending, used, unread: IDLE._replace(
        running=len(remaining),
        running_remaining=tuple(sorted(remaining)),
        pending=pending,
        pending_response_tokens=50.0 * pending,
        pending_prompt_tokens=30 * pending,
        kv_free_tokens=10_000 - used,
        unread_tokens=unread + len(remaining),
    ),
    st.lists(st.integers(1, 500), max_size=8),
    st.integers(0, 20),
    st.integers(0, 10_000),
    st.integers(0, 5000),
)
works = st.builds(
    lambda prompt, response: Work(1, prompt, float(response)), st.integers(1, 3000), st.integers(1, 500)
)


@given(loads, works, works)
def test_no_engine_is_sooner_for_having_been_given_more(load: LoadFigures, work: Work, more: Work) -> None:
    assert finish_s(work, 0, at(load), COST) <= finish_s(work, 0, at(load, more), COST) + 1e-9


@given(loads, works, st.integers(0, 3000))
def test_a_known_beginning_never_makes_a_request_later(load: LoadFigures, work: Work, cached: int) -> None:
    known = min(cached, work.prompt_tokens)
    assert finish_s(work, known, at(load), COST) <= finish_s(work, 0, at(load), COST) + 1e-9


def test_an_engine_with_the_beginning_is_worth_the_wait_that_it_saves() -> None:
    work = Work(1, 2000, 100.0)
    busy = at(IDLE._replace(running=2, running_remaining=(50, 50), kv_free_tokens=9_000, unread_tokens=2))
    assert choose(work, [0, 1984], [at(), busy], COST) == 1
    assert choose(work, [0, 0], [at(), busy], COST) == 0
    full = at(IDLE._replace(running=8, running_remaining=(400,) * 8, kv_free_tokens=5_000, unread_tokens=8))
    assert choose(work, [0, 1984], [at(), full], COST) == 0


def test_requests_spread_before_any_engine_has_computed_something() -> None:
    engines, none = [at(idle_figures(FACTS)) for _ in range(3)], IterationCost(0.0, 0.0, 0.0, 0.0)
    for _ in range(9):
        place = choose(Work(1, 10, 20.0), [0, 0, 0], engines, none)
        engines[place] = engines[place]._replace(given=engines[place].given.with_one(Work(1, 10, 20.0)))
    assert [each.given.requests for each in engines] == [3, 3, 3]


def test_the_work_of_a_request_is_what_its_forecast_and_its_limit_leave() -> None:
    request = Request("r", [1] * 10, Sampling(max_tokens=300), RemainingCurve.exactly(100))
    assert work_of(request) == Work(1, 10, 100.0)
    assert work_of(request, 40) == Work(1, 50, 60.0)
    request.sampling = Sampling(max_tokens=30)
    assert work_of(request) == Work(1, 10, 30.0)
    request.sampling = Sampling(max_tokens=300, ignore_eos=True)
    assert work_of(request, 100) == Work(1, 110, 200.0)


def test_beginnings_belong_to_their_owner_and_the_oldest_are_forgotten() -> None:
    prompt = list(range(200))
    blocks = blocks_of(prompt, ("acme", ""))
    assert len(blocks) == 200 // BLOCK_TOKENS
    index = PrefixIndex(8 * BLOCK_TOKENS)
    index.add(blocks)
    assert index.cached_tokens(blocks) == len(blocks) * BLOCK_TOKENS
    assert index.cached_tokens(blocks_of([*prompt[:100], *prompt], ("acme", ""))) == 3 * BLOCK_TOKENS
    assert index.cached_tokens(blocks_of(prompt, ("other", ""))) == 0
    assert index.cached_tokens(blocks_of(prompt, ("acme", "variant"))) == 0
    index.add(blocks_of([7] * 200, ("acme", "")))
    assert 0 < index.cached_tokens(blocks) < len(blocks) * BLOCK_TOKENS
    assert blocks_of(prompt[:BLOCK_TOKENS], "x") == []  # its last token is always computed


def test_sums_are_of_all_engines_and_speeds_of_one() -> None:
    one = IDLE._replace(
        running=3,
        pending=1,
        kv_free_tokens=4_000,
        tokens_per_s=100.0,
        running_remaining=(5, 9, 20),
        seconds_per_iteration=0.02,
        unread_tokens=103,
        tokens_total=7,
    )
    two = IDLE._replace(running=1, running_remaining=(7,), unread_tokens=1, tokens_total=5, tokens_per_s=40.0)
    both = join_figures([one, two])
    assert (both.running, both.pending, both.kv_free_tokens, both.tokens_total) == (4, 1, 14_000, 12)
    assert (both.running_remaining, both.running_weight) == ((5, 7, 9, 20), 1)
    assert both.tokens_per_s == 140.0
    assert both.unread_tokens == 4 + 50
    assert both.iteration == pytest.approx((0.01, 0.00005, 0.00002, 5e-9))
    assert join_figures([one]) == one


def test_many_running_requests_are_told_in_groups_as_one_engine_tells_them() -> None:
    many = IDLE._replace(running=100, running_remaining=tuple(range(50)), running_weight=2)
    both = join_figures([many, many])
    assert (both.running, both.running_weight, len(both.running_remaining)) == (200, 4, 50)


def test_an_engine_that_has_computed_nothing_has_no_part_in_the_mean() -> None:
    assert mean_cost([IDLE, idle_figures(FACTS)]) == pytest.approx(COST)


def test_a_request_has_the_context_of_the_smallest_engine() -> None:
    joined = join_facts([FACTS, FACTS._replace(kv_tokens=1_000)])
    assert (joined.context_tokens, joined.kv_tokens, joined.slots) == (1_000, 11_000, 16)


def test_a_request_avoids_the_engine_that_trains_until_that_is_sooner() -> None:
    work, trains = Work(1, 100, 100.0), IDLE._replace(training=1, training_s_per_iteration=0.01)
    assert finish_s(work, 0, at(trains), COST) == pytest.approx(finish_s(work, 0, at(), COST) + 100 * 0.01)
    assert choose(work, [0, 0], [at(trains), at()], COST) == 1
    full = IDLE._replace(running=8, running_remaining=(400,) * 8, unread_tokens=8)
    assert choose(work, [0, 0], [at(trains), at(full)], COST) == 0
    both = join_figures([trains, IDLE])
    assert (both.training, both.training_s_per_iteration) == (1, 0.005)
