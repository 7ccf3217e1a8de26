"""Attention of packed sequences by FlashAttention's operators is that of autograd, gradients included.

The operators exist on GPUs only; here others with their signatures compute by definition.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from site_engine.model.attention_context import Scoring
from site_engine.training.context import PackedContext
from site_engine.training.packed_attention import DifferentiableFlash, FlashAttention, Heads, Sequences

BEGINS = 0, 5, 6, 13
SEED, OFFSET = torch.tensor([3]), torch.tensor([4])


def by_definition(heads: Heads, given: tuple[Any, ...], named: dict[str, Any]) -> torch.Tensor:
    """Attend [tokens, heads, dim] as the operators do, by their arguments behind the heads."""
    query, key, value = heads
    begins, of_keys, longest, longest_keys, dropout, causal = given
    left, right = named["window_size_left"], named["window_size_right"]
    spans = list(pairwise(begins.tolist()))
    assert begins.dtype == torch.int32
    assert of_keys.equal(begins)
    assert longest == longest_keys == max(end - begin for begin, end in spans)
    assert (dropout, causal, right) == (0.0, left < 0, 0)
    group, parts = query.shape[1] // key.shape[1], []
    for begin, end in spans:
        q, k, v = (each[begin:end].transpose(0, 1) for each in (query, key, value))
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        before = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        hidden = (before < 0) | ((before > left) if left >= 0 else False)
        scores = (q @ k.transpose(1, 2) * named["scale"]).masked_fill(hidden, -torch.inf)
        parts.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(parts)


def forward(*given: Any, return_debug_mask: bool, **named: Any) -> tuple[torch.Tensor, ...]:
    assert not return_debug_mask
    output = by_definition(given[:3], given[3:], named)
    return output, output.sum(-1), SEED, OFFSET, torch.empty(0)


def backward(gradient: torch.Tensor, *given: Any, **named: Any) -> tuple[torch.Tensor, ...]:
    heads = tuple(each.detach().requires_grad_() for each in given[:3])
    output, sums, *rest = given[3:]
    assert sums.equal(output.sum(-1))
    assert (rest[-2] is SEED, rest[-1] is OFFSET) == (True, True)
    with torch.enable_grad():
        again = by_definition(heads, tuple(rest[:-2]), named)
    assert again.allclose(output)
    found: tuple[torch.Tensor, ...] = torch.autograd.grad(again, heads, gradient)
    return found


@pytest.fixture(autouse=True)
def operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)


@pytest.mark.parametrize("window", [None, 3])
def test_both_ways_have_the_output_and_the_gradients_of_autograd(window: int | None) -> None:
    draw, scoring = torch.Generator().manual_seed(1), Scoring(0.3, window)
    query, gradient = (torch.randn(13, 4, 8, generator=draw) for _ in range(2))
    key, value = (torch.randn(13, 2, 8, generator=draw) for _ in range(2))
    heads, sequences = (query, key, value), Sequences(BEGINS, torch.device("cpu"))

    expected = PackedContext(BEGINS).attention(heads, scoring)
    wanted = expected.backward(gradient)
    kept = sequences.attend(heads, scoring)
    assert isinstance(kept, FlashAttention)
    leaves = [each.clone().requires_grad_() for each in heads]
    differentiable: torch.Tensor = DifferentiableFlash.apply(*leaves, sequences, scoring)
    found = torch.autograd.grad(differentiable, leaves, gradient)

    for output in (kept.output, differentiable):
        torch.testing.assert_close(output, expected.output)
    for gradients in (kept.backward(gradient), found):
        for one, other in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(one, other)
