"""The products of few rows against plain ones, with sizes that do not divide into blocks."""

from __future__ import annotations

import pytest
import torch

from tests.support import interpreted  # noqa: F401 - skips where there is no Triton

# isort: split
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from site_engine.cuda import skinny_gemm
from site_engine.cuda.llama_forward import Norm

SIZES = [(1, 48, 24), (5, 128, 40), (17, 896, 70), (72, 300, 2056), (96, 64, 24), (128, 48, 24)]
"""Rows, depth, columns."""


def scene(rows: int, depth: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, depth, generator=random)
    return hidden, torch.randn(columns, depth, generator=random) * depth**-0.5


@pytest.mark.parametrize(("rows", "depth", "columns"), SIZES)
def test_a_product_is_whole_or_comes_in_parts(rows: int, depth: int, columns: int) -> None:
    hidden, weight = scene(rows, depth, columns)
    bias = weight[:, 0].contiguous()
    torch.testing.assert_close(skinny_gemm.whole(hidden, weight, None, pdl=False), hidden @ weight.t())
    torch.testing.assert_close(skinny_gemm.whole(hidden, weight, bias, pdl=False), hidden @ weight.t() + bias)
    parts = skinny_gemm.parts(hidden, weight, pdl=False)
    assert parts.shape[0] == (1 if depth <= 256 else -(-depth // 256))
    torch.testing.assert_close(parts.sum(0), hidden @ weight.t())


@pytest.mark.parametrize(("rows", "depth", "columns"), SIZES)
def test_the_gate_is_opened_with_its_product(rows: int, depth: int, columns: int) -> None:
    hidden, weight = scene(rows, depth, 2 * columns)
    gate, up = (hidden @ weight.t()).chunk(2, -1)
    torch.testing.assert_close(skinny_gemm.gated(hidden, weight, pdl=False), F.silu(gate) * up)


def test_a_norm_adds_the_parts_up_first() -> None:
    parts, residual = torch.randn(3, 4, 48), torch.randn(4, 48)
    weight = torch.randn(48)
    total = residual + parts.sum(0)
    normed = Norm(weight, 1e-6).add_parts(parts, residual, pdl=False)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(normed, F.rms_norm(total, (48,), weight, 1e-6))
