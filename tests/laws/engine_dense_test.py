"""MICO's padded batch, its decoupled form and the static batch give the tokens of `generate`."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from site_engine.core.request import Finish
from site_engine.core.request_queue import POLICIES
from site_engine.engine.settings import EngineSettings
from site_engine.model.loader import from_model
from tests.support.engine_models import (
    FAMILIES,
    TOO_SHORT,
    VOCAB,
    Collected,
    Ticks,
    assert_idle,
    drain,
    engine_for,
    family,
    gather,
    greedy,
)
from tests.support.model_families import random_model, tiny_config
from tests.support.padded_batch import padded_engine

pytestmark = pytest.mark.slow

torch.set_num_threads(1)


def dense(model: Any, *, apart: bool = False, **chosen: Any) -> Any:
    shape = {
        "slots": 3,
        "token_budget": 256,
        "page_size": 1,
        "kv_tokens": 1024,
        "prefix_cache": False,
    } | chosen
    return padded_engine(model, EngineSettings(**shape), Ticks(), apart=apart)


def mixed(seed: int, count: int, longest: int = 40) -> list[tuple[list[int], int]]:
    rnd = random.Random(seed)
    prompts = [[rnd.randrange(1, VOCAB) for _ in range(rnd.choice((1, 2, 5, 17, 50)))] for _ in range(count)]
    return [(prompt, rnd.choice([n for n in (1, 3, 8, 20, 40) if n <= longest])) for prompt in prompts]


def trickle(engine: Any, requests: list[tuple[list[int], int]], pause: int = 1) -> list[list[int]]:
    collected: dict[str, Collected] = {}
    for at, (prompt, length) in enumerate(requests):
        request = greedy(str(at), prompt, length)
        request.remaining = TOO_SHORT
        engine.submit(request)
        for _ in range(pause):
            gather(engine.step(), collected)
    drain(engine, collected)
    assert_idle(engine)
    return [collected[str(at)].token_ids for at in range(len(requests))]


@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_form_of_the_padded_batch_is_exact(name: str) -> None:
    requests = mixed(seed=3, count=9)
    found = trickle(dense(family(name).served), requests)
    expected = family(name).answers(requests, found)
    assert found == expected
    assert trickle(dense(family(name).served, apart=True), requests) == expected
    assert trickle(dense(family(name).served, policy=POLICIES["static"]), requests) == expected


@pytest.mark.parametrize("model_type", ["gpt_neo", "gpt_oss", "deepseek_v3"])
def test_windows_sinks_and_unequal_widths_are_exact(model_type: str) -> None:
    """The paper's own second model has windows; its positions and keys must not count the padding."""
    served = from_model(random_model(tiny_config(model_type)), eos_token_ids=())
    requests = [([token % 98 + 1 for token in prompt], length) for prompt, length in mixed(5, 5, 20)]
    packed = trickle(engine_for(served), requests)
    for apart in (False, True):
        assert trickle(dense(served, apart=apart), requests) == packed


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 6),
    slots=st.integers(1, 6),
    spare_budget=st.integers(0, 40),
    kv_tokens=st.integers(96, 300),
    pause=st.integers(0, 3),
    apart=st.booleans(),
)
def test_chunks_and_preemption_change_no_token(
    *, seed: int, slots: int, spare_budget: int, kv_tokens: int, pause: int, apart: bool
) -> None:
    requests = mixed(seed, 6, longest=20)
    shape = {"slots": slots, "token_budget": slots + spare_budget, "kv_tokens": kv_tokens}
    found = trickle(dense(family("mistral").served, apart=apart, **shape), requests, pause)
    assert found == trickle(engine_for(family("mistral").served, **shape, page_size=1), requests, pause)


@pytest.mark.parametrize("apart", [False, True])
def test_columns_are_given_back_and_memory_follows_the_need(apart: bool) -> None:
    engine = dense(family("llama").served, apart=apart)
    trickle(engine, mixed(seed=8, count=16))
    columns = engine.runner._columns
    assert columns.valid.shape[1] <= 1024
    assert not columns.valid[:, columns.end :].any()
    engine.submit(greedy("next", [1, 2, 3], 2))
    drain(engine)
    assert columns.length == engine.runner._columns.length <= 4


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("spoil", [False, True])
def test_a_fault_ends_the_request_that_causes_it_and_leaves_no_trace(apart: bool, spoil: bool) -> None:
    """By an error in the pass, or by numbers that are not finite in its own row."""
    expected = family("llama").generate([9, 8, 7], 15)
    engine = dense(family("llama").served, apart=apart)
    runner: Any = engine.runner
    forward = runner._forward

    def faulty(ids: torch.Tensor, *rest: torch.Tensor) -> Any:
        logits = forward(ids, *rest)
        if 313 in ids and not spoil:
            raise ArithmeticError("a fault in the machine")
        if spoil:
            for row, seat in enumerate(runner._seats):
                if seat is not None and seat.id == "bad":
                    for room in (*runner._columns.keys, *runner._columns.values):
                        room[row] = float("nan")
        return logits

    runner._forward = faulty
    engine.submit(greedy("good", [9, 8, 7], 15))
    engine.submit(greedy("bad", [1, 2, 313], 15))
    collected = drain(engine)
    assert collected["bad"].last is not None
    assert collected["bad"].last.finish is Finish.FAILED
    assert collected["good"].token_ids == expected
    runner._forward = forward
    for name in ("a", "b", "c"):
        engine.submit(greedy(name, [9, 8, 7], 15))
    assert {tuple(one.token_ids) for one in drain(engine).values()} == {tuple(expected)}


def test_padding_costs_more_than_packing() -> None:
    requests = mixed(seed=9, count=12)
    joint, apart = dense(family("llama").served), dense(family("llama").served, apart=True)
    trickle(joint, requests)
    trickle(apart, requests)
    tokens = sum(len(prompt) + length - 1 for prompt, length in requests)
    assert joint.runner.computed > apart.runner.computed > tokens


def test_what_needs_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="need pages"):
        dense(family("llama").served, prefix_cache=True)


def test_a_padded_batch_takes_no_memory_for_pages() -> None:
    engine = dense(family("llama").served)
    assert not engine._kv_cache.keys
    assert not engine._kv_cache.values
