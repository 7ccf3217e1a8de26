"""An engine whose memory for keys and values grows and shrinks answers as one whose memory stays."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from site_engine.engine.build import build_engine
from site_engine.engine.engine import SiteEngine
from site_engine.engine.settings import EngineSettings
from site_engine.engine.sleeper import Sleeper
from site_engine.errors import NoMemory
from site_engine.model.kv_cache import KVCache, LayerShape
from site_engine.model.loader import from_model
from site_engine.model.sleep_memory import HostRoom, SleepMemory
from tests.support.engine_models import FAMILIES, Collected, Ticks, drain, engine_for, family, gather, greedy
from tests.support.model_families import random_model

torch.set_num_threads(1)
PAGE_TOKENS = 4
OWN_TOKENS = 100


def growing_engine(name: str, **settings: Any) -> SiteEngine:
    model = from_model(random_model(FAMILIES[name]()), eos_token_ids=())
    chosen = {"slots": 6, "token_budget": 32, "page_size": PAGE_TOKENS, "kv_tokens": OWN_TOKENS} | settings
    grows = {"sleep": "host", "share_sleeping_memory": True, "debug_poison": True}
    return build_engine(model, EngineSettings(**chosen, **grows), Ticks())


def sleeper_of(engine: SiteEngine) -> Sleeper:
    assert engine.sleeper is not None
    return engine.sleeper


def asked(rnd: random.Random) -> list[tuple[list[int], int]]:
    return [
        ([rnd.randrange(1, 300) for _ in range(rnd.choice([1, 6, 40]))], rnd.choice([1, 9, 30]))
        for _ in range(14)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_those_of_an_engine_whose_memory_stays(seed: int) -> None:
    rnd = random.Random(seed)
    queries = asked(rnd)
    plain = engine_for(family("llama").served)
    for at, (prompt, tokens) in enumerate(queries):
        plain.submit(greedy(str(at), prompt, tokens))
    wanted = {name: each.token_ids for name, each in drain(plain).items()}

    engine = growing_engine("llama")
    pool, scheduler, collected = engine._pool, engine._scheduler, dict[str, Collected]()
    assert scheduler.kv_cache_manager.prefixes is not None
    page_bytes = engine._kv_cache.copies.page_bytes
    most, preempted = 0, 0
    for at, (prompt, tokens) in enumerate(queries):
        engine.submit(greedy(str(at), prompt, tokens))
        for _ in range(rnd.randrange(6)):
            extra_bytes = rnd.choice([0, 0, 30, 90]) * page_bytes
            before = sum(each.preemptions for each in scheduler.running)
            held_bytes = sleeper_of(engine).hold(extra_bytes)
            preempted += sum(each.preemptions for each in scheduler.preempted) > before
            assert held_bytes <= extra_bytes
            assert pool.capacity == engine._kv_cache.end
            assert (pool.capacity > OWN_TOKENS // PAGE_TOKENS) == (held_bytes > 0)
            gather(engine.step(), collected)
            used = {page for each in scheduler.running for page in each.pages} | set(
                scheduler.kv_cache_manager.prefixes._nodes
            )
            assert max(used, default=0) <= pool.capacity
            assert pool.used == len(used)
            most = max(most, max(used, default=0))
    drain(engine, collected)
    assert {name: each.token_ids for name, each in collected.items()} == wanted
    assert most > OWN_TOKENS // PAGE_TOKENS
    assert preempted
    assert pool.available == pool.capacity
    assert engine.limit_tokens == OWN_TOKENS


def test_without_memory_to_grow_an_engine_goes_on_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = growing_engine("llama")
    page_bytes = engine._kv_cache.copies.page_bytes
    held_bytes = sleeper_of(engine).hold(64 * page_bytes)
    resize, left = HostRoom.resize, 3

    def full(self: HostRoom, size_bytes: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise NoMemory("full")
        resize(self, size_bytes)

    monkeypatch.setattr(HostRoom, "resize", full)
    mapped = [room.mapped_bytes for room, _ in engine._kv_cache._rooms]
    assert sleeper_of(engine).hold(200 * page_bytes) == held_bytes
    assert [room.mapped_bytes for room, _ in engine._kv_cache._rooms] == mapped
    assert engine._pool.capacity == engine._kv_cache.end


def test_an_engine_that_sleeps_has_its_own_memory_after_it() -> None:
    engine = growing_engine("llama")
    sleeper = sleeper_of(engine)
    own_tokens = engine.load().kv_free_tokens
    assert sleeper_of(engine).hold(200_000) > 0
    assert engine.load().kv_free_tokens == own_tokens + engine.load().kv_extra_tokens > own_tokens
    assert sleeper.sleep() == ""
    assert sleeper.freed_bytes > 0
    assert not any(room.mapped_bytes for room, _ in engine._kv_cache._rooms)
    assert sleeper.wake() == ""
    assert (engine.load().kv_free_tokens, engine.load().kv_extra_tokens) == (own_tokens, 0)
    before = [room.mapped_bytes for room, _ in engine._kv_cache._rooms]
    sleeper_of(engine).hold(200_000)
    sleeper_of(engine).hold(0)
    assert [room.mapped_bytes for room, _ in engine._kv_cache._rooms] == before


@given(own=st.integers(1, 200), sizes=st.lists(st.integers(0, 1 << 20), max_size=8))
def test_pages_beyond_fit_the_bytes_and_one_more_does_not(own: int, sizes: list[int]) -> None:
    shapes = [LayerShape(2, 8, 8), LayerShape(1, 24, 16)]
    memory = SleepMemory(torch.device("cpu"), make_room=HostRoom)
    kv_cache = KVCache(shapes, own, PAGE_TOKENS, torch.float32, torch.device("cpu"), memory=memory)
    for size in sizes:
        pages = kv_cache.pages_with(size)
        kept = kv_cache.end_within(pages)
        if kept < kv_cache.end:
            kv_cache.resize(kept)
        before = kv_cache.end
        if pages > before:
            kv_cache.resize(pages)
        assert kv_cache.end == pages
        assert kv_cache.extra_bytes <= size
        assert kv_cache._bytes(pages + 1) - kv_cache._bytes(own) > size or not size
        assert not any(each[before + 1 : pages + 1].any() for each in kv_cache.keys)
        for each in (*kv_cache.keys, *kv_cache.values):
            each[: pages + 1].fill_(float("nan"))
