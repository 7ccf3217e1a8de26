"""Compute attention over packed sequences with gradients, within each sequence and without a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from site_engine.model.attention_context import Scoring
from site_engine.model.torch_attention import additive_mask, scaled_attention
from site_engine.training.packed_attention import (
    Attention,
    AutogradAttention,
    DifferentiableFlash,
    Heads,
    Sequences,
    supports_flash,
)


class PackedContext:
    """The attention context of one micro-batch; sequence i has the tokens [`begins[i]`, `begins[i + 1]`)."""

    def __init__(self, begins: Sequence[int]) -> None:
        self._begins = begins
        self._spans = list(pairwise(begins))
        self._sequences: Sequences | None = None  # the spans on the device

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Attend query [heads, tokens, dim] to key and value [kv_heads, tokens, dim].

        Returns [tokens, heads, value dim]. Autograd differentiates the result.
        """
        if supports_flash(query, scoring):
            heads = [one.transpose(0, 1) for one in (query, key, value)]
            found: torch.Tensor = DifferentiableFlash.apply(*heads, self._on(query.device), scoring)
            return found
        group = query.shape[0] // key.shape[0]
        if group > 1:
            key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
        parts = [
            _attend(query[None, :, begin:end], key[None, :, begin:end], value[None, :, begin:end], scoring)
            for begin, end in self._spans
        ]
        return torch.cat(parts, 2)[0].transpose(0, 1)

    def attention(self, heads: Heads, scoring: Scoring) -> Attention:
        """Attend heads and return the output with its backward pass. Autograd does not see the heads."""
        if supports_flash(heads[0], scoring):
            with torch.no_grad():
                return self._on(heads[0].device).attend(heads, scoring)
        query, key, value = (each.detach().requires_grad_() for each in heads)
        with torch.enable_grad():
            graph = self.attend(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), scoring)
        return AutogradAttention(graph.detach(), graph, (query, key, value))

    def _on(self, device: torch.device) -> Sequences:
        if self._sequences is None:
            self._sequences = Sequences(self._begins, device)
        return self._sequences


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Compute causal self-attention of one sequence [1, heads, tokens, dim]."""
    window = scoring.window if scoring.window is not None and scoring.window < q.shape[2] else None
    if window is None and scoring.softcap is None and scoring.sinks is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scoring.scale)
    at = torch.arange(q.shape[2], device=q.device)
    seen = at <= at[:, None]
    if window is not None:
        seen &= at > at[:, None] - window
    sinks = None if scoring.sinks is None else scoring.sinks.view(1, -1, 1, 1)
    return scaled_attention(q, k, v, additive_mask(seen, q.dtype), scoring._replace(sinks=sinks))
