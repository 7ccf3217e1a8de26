"""What keys and values get of a GPU's memory leaves room for iterations, also where little is free."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from site_engine.core.step_memory import KV_SHARE, kv_room, step_bytes

GB = 10**9
SHAPES = Path(__file__).parents[2] / "bench/models"


def of_shape(name: str, *, tokens: int = 8192, rows: int = 256, ranks: int = 1) -> int:
    return step_bytes(json.loads((SHAPES / name / "config.json").read_text()), tokens, rows, 2, ranks)


def test_a_card_with_room_gives_keys_and_values_85_percent() -> None:
    assert kv_room(120 * GB, of_shape("llama-3.1-8b")) == int(120 * GB * KV_SHARE)


def test_where_little_is_free_iterations_have_their_memory_first() -> None:
    needed = of_shape("llama-3.1-8b")
    assert kv_room(8 * GB, needed) == 8 * GB - needed


def test_keys_and_values_have_at_least_half() -> None:
    assert kv_room(3 * GB, 10 * GB) == 3 * GB // 2


def test_iterations_of_8b_need_what_was_measured_or_less_than_a_third_more() -> None:
    assert 3.0 * GB < of_shape("llama-3.1-8b") < 4.2 * GB


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"tokens": 2048}, {"tokens": 8192}),
        ({"rows": 64}, {"rows": 256}),
        ({"ranks": 2}, {"ranks": 1}),
    ],
)
def test_more_tokens_and_rows_need_more_and_more_ranks_less(
    less: dict[str, int], more: dict[str, int]
) -> None:
    assert of_shape("llama-3.1-70b", **less) < of_shape("llama-3.1-70b", **more)


def test_of_experts_those_of_a_token_count() -> None:
    dense = {"hidden_size": 64, "intermediate_size": 512, "vocab_size": 100}
    experts = dense | {"moe_intermediate_size": 128, "num_experts_per_tok": 4}
    assert step_bytes(experts, 1000, 8, 2) == step_bytes(dense, 1000, 8, 2)


def test_of_sizes_by_layer_the_largest_counts() -> None:
    alike = {"hidden_size": 64, "intermediate_size": 512, "vocab_size": 100}
    by_layer = alike | {"intermediate_size": [128, 512, 256]}
    assert step_bytes(by_layer, 1000, 8, 2) == step_bytes(alike, 1000, 8, 2)
