"""A row's tokens are those of its variant alone, whatever shares its batch, its pages and its engine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from site_engine.core.request import RemainingCurve, RemainingPoint, Request
from tests.support.engine_models import (
    VOCAB,
    Collected,
    assert_idle,
    drain,
    engine_for,
    gather,
    greedy,
)
from tests.support.variants import Made, served, zoo

torch.set_num_threads(1)

SHORT = RemainingCurve((RemainingPoint(0, 1.0, 1),))
"""A forecast that every answer outgrows, so that requests are preempted."""
SHAPES: list[dict[str, Any]] = [
    {"page_size": 1, "slots": 8, "token_budget": 64},
    {"page_size": 16, "slots": 8, "token_budget": 10},
    {"page_size": 4, "slots": 6, "token_budget": 32, "kv_tokens": 176},
    {
        "page_size": 4,
        "slots": 6,
        "token_budget": 32,
        "kv_tokens": 176,
        "swap_tokens": 1000,
        "adapter_slots": 1,
    },
]


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_mixed_batch_gives_each_row_what_its_variant_gives_alone(name: str, tmp_path: Path) -> None:
    model, plain = served(name)
    variants: list[Made | None] = [None, *zoo(tmp_path, plain)]
    cases = random_cases(variants, seed=1, count=48)
    expected = [answer_of(made, plain, prompt, tokens) for made, prompt, tokens in cases]
    base = [answer_of(None, plain, prompt, tokens) for _, prompt, tokens in cases]
    assert sum(a != b for a, b in zip(expected, base, strict=True)) > len(cases) // 2, (
        "the variants do nothing"
    )
    preempted = 0
    for shape in SHAPES:
        engine = engine_for(model, **shape)
        for made in variants[1:]:
            engine.add_variant(made.variant)
        collected: dict[str, Collected] = {}
        for at, (made, prompt, tokens) in enumerate(cases):
            engine.submit(request(str(at), made, prompt, tokens))
            if at % 2:
                gather(engine.step(), collected)
        drain(engine, collected)
        assert [collected[str(at)].token_ids for at in range(len(cases))] == expected, shape
        preempted += sum(each.last.timings.preemptions for each in collected.values())
        assert_idle(engine)
    assert preempted


def random_cases(
    variants: list[Made | None], seed: int, count: int
) -> list[tuple[Made | None, list[int], int]]:
    """Prompts share beginnings, also between variants."""
    draw = random.Random(seed)
    beginning = [draw.randrange(1, VOCAB) for _ in range(40)]
    cases = []
    for at in range(count):
        prompt = beginning[: draw.choice((0, 8, 40))] + [
            draw.randrange(1, VOCAB) for _ in range(draw.choice((1, 5, 17)))
        ]
        cases.append((variants[at % len(variants)], prompt, draw.choice((1, 5, 40))))
    return cases


def answer_of(made: Made | None, plain: Any, prompt: list[int], tokens: int) -> list[int]:
    return (Made(None, plain) if made is None else made).answer(prompt, tokens)  # type: ignore[arg-type]


def request(name: str, made: Made | None, prompt: list[int], tokens: int) -> Request:
    one = greedy(name, prompt, tokens)
    one.chain = "" if made is None else made.variant.id
    one.remaining = SHORT
    return one
