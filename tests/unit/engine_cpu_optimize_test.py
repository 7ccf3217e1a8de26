"""A model made fast for a CPU computes what it computed."""

from __future__ import annotations

import copy

import pytest
import torch

from site_engine.model.cpu_optimize import optimize_for_cpu
from tests.support.engine_models import FAMILIES, random_model


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gpt2"])
def test_logits_stay(name: str) -> None:
    plain = random_model(FAMILIES[name]())
    for module in plain.modules():
        if type(module).__name__.endswith("Norm"):
            torch.nn.init.normal_(module.weight)
    fast = optimize_for_cpu(copy.deepcopy(plain))
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        torch.testing.assert_close(fast(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-4)


def test_norms_are_fused_where_they_are_plain_and_left_where_they_are_not() -> None:
    fused = {
        name: [
            "forward" in vars(module)
            for module in optimize_for_cpu(random_model(FAMILIES[name]())).modules()
            if type(module).__name__.endswith("RMSNorm")
        ]
        for name in ("llama", "gemma2")
    }
    assert fused["llama"] and all(fused["llama"])
    assert fused["gemma2"] and not any(fused["gemma2"])


def test_weights_lie_in_the_order_in_which_a_row_reads_them() -> None:
    model = optimize_for_cpu(random_model(FAMILIES["llama"]()))
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert linears and all(linear.weight.t().is_contiguous() for linear in linears)
