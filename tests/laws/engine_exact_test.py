"""A request gets the tokens it would get alone, whatever else runs and however its pages lie."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engine_models import (
    FAMILIES,
    SHAPES,
    TOO_SHORT,
    VOCAB,
    Collected,
    assert_idle,
    drain,
    engine_for,
    family,
    gather,
    greedy,
)

torch.set_num_threads(1)


def mixed_requests(seed: int, count: int) -> list[tuple[list[int], int]]:
    rnd = random.Random(seed)
    lengths, answers = (1, 2, 5, 9, 17, 33, 60), (1, 3, 8, 20, 40)
    return [
        ([rnd.randrange(1, VOCAB) for _ in range(rnd.choice(lengths))], rnd.choice(answers))
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", list(FAMILIES))
def test_greedy_tokens_equal_generate_alone(name: str) -> None:
    requests = mixed_requests(seed=1, count=20)
    for shape in SHAPES:
        engine = engine_for(family(name).served, **shape)
        collected: dict[str, Collected] = {}
        for at, (prompt, length) in enumerate(requests):
            engine.submit(greedy(str(at), prompt, length))
            if at % 2:
                gather(engine.step(), collected)
        drain(engine, collected)
        found = [collected[str(at)].token_ids for at in range(len(requests))]
        assert found == family(name).answers(requests, found), shape
        assert len({tuple(answer) for answer in found}) > len(requests) // 2, "the model is degenerate"
        assert_idle(engine)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    page_size=st.sampled_from([1, 2, 4, 16]),
    slots=st.integers(1, 8),
    spare_budget=st.integers(0, 40),
    kv_tokens=st.integers(112, 400),
    pause=st.integers(0, 3),
)
def test_any_shape_of_engine_gives_the_same_tokens(
    *, seed: int, page_size: int, slots: int, spare_budget: int, kv_tokens: int, pause: int
) -> None:
    requests = [(prompt, min(length, 12)) for prompt, length in mixed_requests(seed % 7, 8)]
    engine = engine_for(
        family("llama").served,
        page_size=page_size,
        slots=slots,
        token_budget=slots + spare_budget,
        kv_tokens=kv_tokens,
    )
    collected: dict[str, Collected] = {}
    for at, (prompt, length) in enumerate(requests):
        engine.submit(greedy(str(at), prompt, length))
        for _ in range(pause):
            gather(engine.step(), collected)
    drain(engine, collected)
    found = [collected[str(at)].token_ids for at in range(len(requests))]
    assert found == family("llama").answers(requests, found)
    assert_idle(engine)


def test_a_pool_too_small_for_all_preempts_and_changes_no_token() -> None:
    requests = [([7 * at + 1, 5, at + 2], 40) for at in range(6)]
    engine = engine_for(family("llama").served, slots=6, kv_tokens=96, page_size=4)
    for at, (prompt, length) in enumerate(requests):
        request = greedy(str(at), prompt, length)
        request.remaining = TOO_SHORT
        engine.submit(request)
    collected = drain(engine)
    found = [collected[str(at)].token_ids for at in range(len(requests))]
    assert found == family("llama").answers(requests, found)
    assert (
        sum(one.last.timings.preemptions for one in collected.values() if one.last and one.last.timings) > 0
    )
    assert_idle(engine)


def test_a_fair_forecast_keeps_the_engine_from_preempting() -> None:
    engine = engine_for(family("llama").served, slots=6, kv_tokens=96, page_size=4)
    for at in range(6):
        engine.submit(greedy(str(at), [at + 1, 5, at + 2], 40))
    collected = drain(engine)
    assert (
        sum(one.last.timings.preemptions for one in collected.values() if one.last and one.last.timings) == 0
    )


def test_the_end_of_text_token_ends_an_answer_and_is_not_text() -> None:
    whole = family("llama").generate([3, 4, 5], 30)
    eos = whole[10]
    cut = whole[: whole.index(eos) + 1]
    assert family("llama").generate([3, 4, 5], 30, eos=eos) == cut
    engine = engine_for(family("llama").served)
    engine.submit(greedy("stops", [3, 4, 5], 30, stop_token_ids=(eos,)))
    engine.submit(greedy("goes on", [3, 4, 5], 30, stop_token_ids=(eos,), min_tokens=30))
    collected = drain(engine)
    assert collected["stops"].token_ids == cut
    assert collected["stops"].last is not None
    assert collected["stops"].last.finish == "stop"
    assert len(collected["goes on"].token_ids) == 30
    assert eos not in collected["goes on"].token_ids[:29]
