"""Compute attention over packed sequences with gradients, within each sequence and without a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from site_engine.model.attention_context import Scoring
from site_engine.model.torch_attention import additive_mask, scaled_attention, varlen_attention


class PackedContext:
    """The attention context of one micro-batch; sequence i has the tokens [`begins[i]`, `begins[i + 1]`)."""

    def __init__(self, begins: Sequence[int]) -> None:
        self._begins = begins
        self._spans = list(pairwise(begins))
        self._ends: torch.Tensor | None = None  # `begins` on the device

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Attend query [heads, tokens, dim] to key and value [kv_heads, tokens, dim].

        Returns [tokens, heads, value dim].
        """
        if query.is_cuda and query.dtype.itemsize == 2 and scoring.softcap is None and scoring.sinks is None:
            return self._attend_all(query, key, value, scoring)
        group = query.shape[0] // key.shape[0]
        if group > 1:
            key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
        parts = [
            _attend(query[None, :, begin:end], key[None, :, begin:end], value[None, :, begin:end], scoring)
            for begin, end in self._spans
        ]
        return torch.cat(parts, 2)[0].transpose(0, 1)

    def _attend_all(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Attend all sequences with one kernel, which exists only for 16 bits on GPUs."""
        if self._ends is None:
            self._ends = torch.tensor(self._begins, dtype=torch.int32).to(query.device)
        ends, longest = self._ends, max(end - begin for begin, end in self._spans)
        before = -1 if scoring.window is None else scoring.window - 1
        q, k, v = (one.transpose(0, 1) for one in (query, key, value))
        attend, window = varlen_attention(), (before, 0)
        return attend(q, k, v, ends, ends, longest, longest, scale=scoring.scale, window_size=window)


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
