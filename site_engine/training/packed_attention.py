"""Attention within packed sequences, with a backward pass: FlashAttention on a GPU, else autograd.

FlashAttention is called through PyTorch's own operators, with which `torch.nn.attention.varlen` computes as
well. That module's Python, run for each layer, would take longer than the device takes to compute a layer's
attention at small model sizes, and so would autograd's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from site_engine.model.attention_context import Scoring

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries [tokens, heads, dim], keys and values [tokens, kv_heads, dim]."""


def supports_flash(query: torch.Tensor, scoring: Scoring) -> bool:
    """Return whether FlashAttention can compute attention for these queries."""
    in_16_bits = query.is_cuda and query.dtype.itemsize == 2
    return in_16_bits and scoring.softcap is None and scoring.sinks is None


class Sequences:
    """Packed sequences on the device; sequence i has the tokens [`begins[i]`, `begins[i + 1]`)."""

    def __init__(self, begins: Sequence[int], device: torch.device) -> None:
        longest, bounds = max(end - begin for begin, end in pairwise(begins)), torch.tensor(begins)
        on_device = bounds.to(torch.int32).to(device)
        self._bounds = on_device, on_device, longest, longest  # of queries and keys

    def attend(self, heads: Heads, scoring: Scoring) -> FlashAttention:
        """Attend all sequences with one kernel."""
        given = *heads, *self._bounds, 0.0, scoring.window is None
        found = torch.ops.aten._flash_attention_forward(*given, return_debug_mask=False, **_options(scoring))
        output, sums, seed, offset, _ = found
        return FlashAttention(output, heads, (sums, seed, offset), self, scoring)

    def differentiate(self, attention: FlashAttention, gradient: torch.Tensor) -> Heads:
        """Return the gradients of the heads of `attention`, given that of its output."""
        output, heads, (sums, seed, offset), _, scoring = attention
        given = gradient, *heads, output, sums, *self._bounds, 0.0, scoring.window is None, seed, offset
        found: Heads = torch.ops.aten._flash_attention_backward(*given, **_options(scoring))
        return found


def _options(scoring: Scoring) -> dict[str, Any]:
    """Return the keyword arguments of both passes. A window of n tokens includes n - 1 before the query's."""
    before = -1 if scoring.window is None else scoring.window - 1
    return {"scale": scoring.scale, "window_size_left": before, "window_size_right": 0}


class FlashAttention(NamedTuple):
    """The output [tokens, heads, dim] of attention, and all that its backward pass needs."""

    output: torch.Tensor
    heads: Heads
    kept: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # log-sum-exp, seed and offset of unused dropout
    sequences: Sequences
    scoring: Scoring

    def backward(self, gradient: torch.Tensor) -> Heads:
        """Return the gradients of queries, keys and values, given that of the output."""
        return self.sequences.differentiate(self, gradient)


class AutogradAttention(NamedTuple):
    """The output [tokens, heads, dim] of attention, and the graph of its computation."""

    output: torch.Tensor
    graph: torch.Tensor  # the output, attached to autograd's graph
    heads: Heads

    def backward(self, gradient: torch.Tensor) -> Heads:
        """Return the gradients of queries, keys and values, given that of the output."""
        query, key, value = torch.autograd.grad(self.graph, self.heads, gradient)
        return query, key, value


Attention = FlashAttention | AutogradAttention


class DifferentiableFlash(torch.autograd.Function):  # type: ignore[misc]
    """FlashAttention as a function that autograd differentiates."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes them by position
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sequences: Sequences,
        scoring: Scoring,
    ) -> torch.Tensor:
        attention = sequences.attend((query, key, value), scoring)
        ctx.save_for_backward(attention.output, query, key, value, *attention.kept)
        ctx.sequences, ctx.scoring = sequences, scoring
        return attention.output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        output, query, key, value, sums, seed, offset = ctx.saved_tensors
        heads, kept = (query, key, value), (sums, seed, offset)
        attention = FlashAttention(output, heads, kept, ctx.sequences, ctx.scoring)
        return (*attention.backward(gradients[0]), None, None)
