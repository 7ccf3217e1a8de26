"""The roofline that results are compared with: its tokens per second, and each weight counted once."""

from __future__ import annotations

import pytest
import torch

from bench.support.roofline import Rates, Sizes, ideal_seconds, sizes
from bench.support.workload import lengths
from tests.support.engine_models import family

torch.set_num_threads(1)
H200 = Rates(4.30e12, 785e12)
LLAMA_8B = Sizes(6_979_321_856, 4096 * 128256, 2, 8 * 128 * 4 * 32, 32 * 2 * 128 * 32)


@pytest.mark.parametrize(("workload", "tokens_per_s"), [("sharegpt", 19_001), ("alpaca", 14_541)])
def test_the_roofline_is_that_of_the_goals(workload: str, tokens_per_s: int) -> None:
    work = lengths(workload, 512)
    seconds = ideal_seconds(work, 256, LLAMA_8B, H200)
    assert round(sum(response for _, response in work) / seconds) == tokens_per_s


def test_sizes_count_each_weight_once() -> None:
    model = family("llama").served
    found = sizes(model)
    assert found is not None
    embedding = model.model.get_input_embeddings().weight.numel()
    assert found.body + found.head + embedding == sum(one.numel() for one in model.model.parameters())
    assert found.kv_token_bytes == 2 * 2 * 2 * 8 * 4  # layers, keys and values, KV heads, width, float32
