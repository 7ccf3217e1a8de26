"""The book of pages: no page is owned twice, none is lost, and a poisoned one shows."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from site_engine.core.page_pool import NULL_PAGE, PagePool
from site_engine.core.prefix_cache import PrefixTree
from tests.support.engine_models import Collected, assert_idle, drain, engine_for, family, gather, greedy

torch.set_num_threads(1)


@given(seed=st.integers(0, 10_000), pages=st.integers(1, 20))
def test_references_equal_holders_at_every_step(seed: int, pages: int) -> None:
    rnd, pool = random.Random(seed), PagePool(pages, 4)
    holders: list[list[int]] = []
    for _ in range(80):
        act = rnd.random()
        if act < 0.45:
            taken = pool.take(rnd.randint(0, 4))
            if taken is not None:
                holders.append(taken)
        elif act < 0.6 and holders:
            shared = list(rnd.choice(holders))
            pool.share(shared)
            holders.append(shared)
        elif holders:
            pool.drop(holders.pop(rnd.randrange(len(holders))))
        held = [page for pages_ in holders for page in pages_]
        assert NULL_PAGE not in held
        assert pool.used == len(set(held))
        assert all(pool.references(page) == held.count(page) for page in range(1, pages + 1))


@given(seed=st.integers(0, 10_000), own=st.integers(1, 12))
def test_no_page_above_an_end_that_moves_is_given_out_and_none_is_lost(seed: int, own: int) -> None:
    rnd, pool = random.Random(seed), PagePool(own, 2)
    tree, held = PrefixTree(pool), list[list[int]]()
    for number in range(60):
        act = rnd.random()
        if act < 0.5:
            tree.evict(min(pool.idle, rnd.randint(0, 2)))
            before = pool.used
            if (taken := pool.take(rnd.randint(0, 4))) is not None:
                if before < own:
                    assert min(taken, default=0) <= own  # those beyond come last
                tree.insert([number] * 2 * len(taken), taken)
                held.append(taken)
        elif act < 0.75 and held:
            pool.drop(held.pop(rnd.randrange(len(held))))
        else:
            end = own + rnd.randint(0, 8)
            for each in [each for each in held if max(each, default=0) > end]:
                held.remove(each)
                pool.drop(each)
            tree.forget(range(end + 1, pool.capacity + 1))
            pool.move_end(end)
        used = {page for pages in held for page in pages} | set(tree._nodes)
        assert max(used, default=0) <= pool.capacity
        assert pool.used == len(used)
        assert sorted([*pool._free, *pool._free_extra, *used]) == list(range(1, pool.capacity + 1))
    with pytest.raises(ValueError, match="cannot move"):
        pool.move_end(own - 1)


def test_taking_is_all_or_nothing_and_dropping_a_free_page_is_a_bug() -> None:
    pool = PagePool(3, 16)
    pages = pool.take(2)
    assert pages is not None
    assert pool.take(2) is None
    assert pool.free == 1
    pool.drop(pages)
    with pytest.raises(ValueError, match="free"):
        pool.drop(pages[:1])
    with pytest.raises(ValueError, match="free"):
        pool.share(pages[:1])


@pytest.mark.parametrize("seed", range(4))
def test_no_page_is_lost_under_load_with_cancels_and_preemptions(seed: int) -> None:
    rnd = random.Random(seed)
    engine = engine_for(family("llama").served, slots=6, token_budget=24, kv_tokens=160, page_size=4)
    pool, scheduler, tree = engine._pool, engine._scheduler, engine._scheduler.kv_cache_manager.prefixes
    assert tree is not None
    collected: dict[str, Collected] = {}
    submitted: list[str] = []
    for at in range(40):
        prompt = [rnd.randrange(1, 300) for _ in range(rnd.choice([1, 4, 30]))]
        engine.submit(greedy(str(at), prompt, rnd.choice([1, 9, 30])))
        submitted.append(str(at))
        if rnd.random() < 0.3:
            engine.cancel(rnd.choice(submitted))
        gather(engine.step(), collected)
        held = Counter(page for request in scheduler.running for page in request.pages)
        cached = set(tree._nodes)
        assert pool.used == len(set(held) | cached)
        assert all(
            pool.references(page) == held[page] + (page in cached) for page in range(1, pool.capacity + 1)
        )
        assert pool.idle == len(cached - set(held))
        assert set(scheduler.reservation._spans) == set(scheduler.running)
        kept = Counter(page for page in scheduler.reservation._keepers)
        assert set(kept) <= set(held)
        assert all(request.row >= 0 for request in scheduler.running)
        assert len({request.row for request in scheduler.running}) == len(scheduler.running)
    drain(engine, collected)
    assert set(collected) == set(submitted)
    assert pool.available == pool.capacity
    tree.clear()
    assert pool.free == pool.capacity
    assert scheduler.free_slots == 6
    assert_idle(engine)


def test_the_debug_mode_shows_a_read_of_a_freed_page() -> None:
    engine = engine_for(family("llama").served, debug_poison=True)
    engine.submit(greedy("victim", list(range(1, 30)), 10))
    engine.step()
    (request,) = engine._scheduler.running
    engine._kv_cache.fill(request.pages[:1], float("nan"))
    last = drain(engine)["victim"].last
    assert last is not None
    assert "not finite" in last.error
