"""Sharing the beginning of a prompt changes the work and no token; what is not in use can be taken back."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from site_engine.core.page_pool import PagePool
from site_engine.core.prefix_cache import PrefixTree
from site_engine.core.request import Finish, Request, Sampling
from site_engine.engine.engine import SiteEngine
from tests.support.engine_models import Collected, drain, engine_for, family, gather, greedy

torch.set_num_threads(1)


def counting(engine: SiteEngine) -> list[int]:
    """The number of tokens of every iteration from now on."""
    runner: Any = engine.runner
    forward, tokens = runner._forward, []

    def counted(ids: torch.Tensor, *rest: torch.Tensor) -> Any:
        tokens.append(ids.numel())
        return forward(ids, *rest)

    runner._forward = counted
    return tokens


def alike(seed: int, count: int) -> list[tuple[list[int], int]]:
    """Prompts that begin like others."""
    rnd = random.Random(seed)
    beginnings = [[rnd.randrange(1, 300) for _ in range(length)] for length in (48, 32, 20)]
    requests = []
    for _ in range(count):
        beginning = rnd.choice(beginnings)
        cut = rnd.choice([len(beginning), len(beginning) // 2])
        tail = [rnd.randrange(1, 300) for _ in range(rnd.choice([1, 3, 8]))]
        requests.append((beginning[:cut] + tail, rnd.choice([1, 4, 12])))
    return requests


@pytest.mark.parametrize("name", ["gpt2", "mistral"])
@pytest.mark.parametrize(("page_size", "kv_tokens"), [(1, 1200), (4, 1200), (4, 144), (16, 1200)])
def test_sharing_changes_no_token_and_saves_work(name: str, page_size: int, kv_tokens: int) -> None:
    requests = alike(seed=2, count=24)
    work: dict[bool, int] = {}
    answers: dict[bool, list[list[int]]] = {}
    for share in (False, True):
        engine = engine_for(
            family(name).served, page_size=page_size, kv_tokens=kv_tokens, token_budget=40, prefix_cache=share
        )
        tokens = counting(engine)
        collected: dict[str, Collected] = {}
        for at, (prompt, length) in enumerate(requests):
            engine.submit(greedy(str(at), prompt, length))
            if at % 3 == 0:
                gather(engine.step(), collected)
        drain(engine, collected)
        answers[share] = [collected[str(at)].token_ids for at in range(len(requests))]
        work[share] = sum(tokens)
        assert engine.load().computed_tokens_total == work[share]
        assert engine._pool.available == engine._pool.capacity
    assert answers[True] == answers[False]
    assert answers[True] == family(name).answers(requests, answers[True])
    assert work[True] < work[False]


def test_choices_share_their_prompt_in_the_very_iteration_that_computes_it() -> None:
    prompt = list(range(1, 42))
    engine = engine_for(family("llama").served, page_size=4, token_budget=128)
    tokens = counting(engine)
    for choice in range(4):
        sampling = Sampling(max_tokens=6, temperature=1.0, seed=5)
        engine.submit(Request(f"{choice}", prompt, sampling, choice=choice))
    engine.step()
    assert tokens == [41 + 3 * 1]
    shared = drain(engine)
    alone = engine_for(family("llama").served, page_size=4, prefix_cache=False)
    alone.submit(Request("2", prompt, Sampling(max_tokens=6, temperature=1.0, seed=5), choice=2))
    assert drain(alone)["2"].token_ids[1:] == shared["2"].token_ids
    cached = [
        one.last.timings.cached_prompt_tokens for one in shared.values() if one.last and one.last.timings
    ]
    assert sorted(cached) == [0, 40, 40, 40]


def test_a_conversation_that_goes_on_finds_its_own_past() -> None:
    engine = engine_for(family("llama").served, page_size=4)
    first = list(range(1, 30))
    engine.submit(greedy("first", first, 12))
    answer = drain(engine)["first"].token_ids
    second = [*first, *answer, 7, 8, 9]
    engine.submit(greedy("second", second, 5))
    one = drain(engine)["second"]
    assert one.token_ids == family("llama").generate(second, 5)
    assert one.last is not None
    assert one.last.timings is not None
    assert one.last.timings.cached_prompt_tokens == 40


def test_who_shares_pages_that_were_never_computed_computes_them_itself() -> None:
    """The one that computes the shared pages fails; the other planned to read them in the same iteration."""
    prompt = list(range(1, 42))
    expected = family("llama").generate([*prompt, 50], 8)
    engine = engine_for(family("llama").served, page_size=4, token_budget=128)
    engine.submit(greedy("fails", [*prompt, 313], 8))
    engine.submit(greedy("shares", [*prompt, 50], 8))
    runner: Any = engine.runner
    forward = runner._forward

    def breaks(ids: torch.Tensor, *rest: torch.Tensor) -> Any:
        if 313 in ids:
            raise ArithmeticError("a fault in the machine")
        return forward(ids, *rest)

    runner._forward = breaks
    collected = drain(engine)
    assert collected["fails"].last is not None
    assert collected["fails"].last.finish is Finish.FAILED
    assert collected["shares"].token_ids == expected
    assert collected["shares"].last is not None
    assert collected["shares"].last.timings is not None
    assert collected["shares"].last.timings.preemptions == 1


def test_log_probabilities_of_a_prompt_do_not_come_from_the_cache() -> None:
    engine = engine_for(family("llama").served, page_size=4)
    prompt = list(range(1, 30))
    for name in ("first", "second"):
        engine.submit(greedy(name, prompt, 2, prompt_logprobs=True))
        one = drain(engine)[name]
        assert len(one.outputs[0].prompt_logprobs) == len(prompt)


@given(seed=st.integers(0, 100_000))
def test_every_idle_page_can_be_evicted_and_no_other(seed: int) -> None:
    rnd, pool = random.Random(seed), PagePool(24, 2)
    tree = PrefixTree(pool)
    held: list[tuple[list[int], list[int]]] = []
    for _ in range(60):
        act = rnd.random()
        if act < 0.5:
            tokens = [rnd.randrange(2) for _ in range(rnd.randrange(12))]
            pages = tree.match(tokens)
            need = pool.pages_for(len(tokens)) - len(pages)
            if need <= pool.available:
                tree.evict(need - pool.free)
                fresh = pool.take(need)
                assert fresh is not None
                pages += fresh
                tree.insert(tokens, pages)
                held.append((tokens, pages))
            else:
                pool.drop(pages)
        elif act < 0.6 and held:
            tree.forget(rnd.choice(held)[1])
        elif held:
            pool.drop(held.pop(rnd.randrange(len(held)))[1])
        in_use = {page for _, pages in held for page in pages}
        assert pool.used == len(in_use | set(tree._nodes))
        assert pool.idle == len(set(tree._nodes) - in_use)
        assert len(tree._unused) <= 4 * len(tree) + 65 + 12
    tree.evict(pool.idle)
    assert pool.idle == 0
    assert pool.used == len({page for _, pages in held for page in pages})


def test_a_match_goes_on_after_held_pages_only_if_they_are_the_trees_own() -> None:
    pool = PagePool(8, 2)
    tree = PrefixTree(pool)
    own = pool.take(2)
    assert own is not None
    tree.insert([1, 2, 3, 4], own)
    private = pool.take(1)
    assert private is not None
    assert tree.match([1, 2, 3, 4], private) == []
    assert tree.match([1, 2, 3, 4], own[:1]) == own[1:]


class Read(list[int]):
    """Tokens that count how many of them are read."""

    count = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.count += len(found) if isinstance(at, slice) else 1
        return found


def test_a_chunk_of_a_prompt_reads_no_tokens_of_earlier_chunks() -> None:
    """At 131,000 tokens each chunk would otherwise hold the engine for more than 20 ms."""
    pool, chunk, size = PagePool(512, 4), 64, 4
    tree = PrefixTree(pool)
    tokens, pages = Read(range(2_048)), list[int]()
    for begun in range(0, len(tokens), chunk):
        tokens.count = 0
        assert tree.match(tokens, pages, first=len(tokens) - 1) == []
        fresh = pool.take(chunk // size)
        assert fresh is not None
        pages += fresh
        tree.insert(tokens, pages, first=begun + chunk)
        assert tokens.count <= chunk + size
    assert tree.match(list(range(2_048))) == pages


@given(seed=st.integers(0, 100_000))
def test_chunks_of_prompts_share_and_insert_as_whole_prompts_do(seed: int) -> None:
    """Requests that compute their prompts by turns, some of them equal ones at once, hold the same pages."""
    rnd, pool = random.Random(seed), PagePool(200, 2)
    tree = PrefixTree(pool)
    requests: list[tuple[list[int], list[int]]] = [
        ([rnd.randrange(2) for _ in range(rnd.randrange(2, 16))], []) for _ in range(8)
    ]
    for _ in range(60):
        tokens, pages = rnd.choice(requests)
        if rnd.random() < 0.15:
            tree.forget(pages) if rnd.random() < 0.3 else None
            pool.drop(pages)
            pages.clear()
            continue
        if rnd.random() < 0.7:
            path = _path(tree, tokens)
            on_it = pages == path[: len(pages)]
            found = tree.match(tokens, pages)
            assert found == (path[len(pages) :] if on_it else [])
            pages += found
        full = len(tokens) // 2
        if len(pages) < full:
            fresh = pool.take(rnd.randint(1, full - len(pages)))
            assert fresh is not None
            pages += fresh
        before = _path(tree, tokens)
        tree.insert(tokens, pages)
        same = pages[: len(before)] == before[: len(pages)]
        assert _path(tree, tokens) == (max(before, pages, key=len) if same else before)


def _path(tree: PrefixTree, tokens: list[int]) -> list[int]:
    """Return the pages of the longest cached prefix, found from the root on."""
    node, pages = tree._root, []
    for key in tree._keys(tokens, ("", ""), 0, len(tokens)):
        if key not in node.children:
            break
        node = node.children[key]
        pages.append(node.page)
    return pages


def test_eviction_begins_with_the_longest_unused() -> None:
    pool = PagePool(4, 2)
    tree = PrefixTree(pool)
    for tokens in ([1, 1], [2, 2], [3, 3]):
        pages = pool.take(1)
        assert pages is not None
        tree.insert(tokens, pages)
        pool.drop(pages)
    pool.drop(tree.match([1, 1]))
    tree.evict(1)
    assert [len(tree.match(tokens)) for tokens in ([1, 1], [2, 2], [3, 3])] == [1, 0, 1]


@pytest.mark.parametrize("shared", [False, True])
def test_a_tenant_cannot_tell_what_another_has_asked(shared: bool) -> None:
    """A prefix is computed as if nobody had sent the same one, unless the operator lets tenants share."""
    engine = engine_for(family("llama").served, page_size=4, share_prefixes=shared)
    prompt = list(range(1, 30))
    cached = []
    for name, tenant in (("first", "a"), ("again", "a"), ("other", "b"), ("other again", "b")):
        engine.submit(Request(name, prompt, Sampling(max_tokens=2, temperature=0.0), tenant=tenant))
        timings = drain(engine)[name].outputs[-1].timings
        assert timings is not None
        cached.append(timings.cached_prompt_tokens)
    assert cached == [0, 28, 28 if shared else 0, 28]
