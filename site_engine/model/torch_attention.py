"""Compute paged attention in plain PyTorch: decode rows by a padded gather, prefill chunks one by one.

The reference for every other backend, and the fast path on a CPU. All keys and values of a layer are written
before any is read, so pages may be shared within the iteration that computes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from site_engine.model.attention_context import Scoring
from site_engine.model.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class Rows:
    """Decode rows `[begin, end)` of similar length, one packed token each, computed together."""

    begin: int
    end: int
    pages: torch.Tensor  # [rows, pages], padded with the null page
    kv_lens: torch.Tensor  # [rows], the new token included


@dataclass(frozen=True, slots=True)
class Chunk:
    """A prefill chunk: packed tokens `[begin, end)`, its request's pages and the length up to its end."""

    begin: int
    end: int
    pages: torch.Tensor  # [pages]
    kv_len: int


class ReferenceContext:
    """The attention context of one iteration. `slots` [tokens]: the cache slot of each packed token."""

    def __init__(
        self, kv_cache: KVCache, slots: torch.Tensor, groups: list[Rows], chunks: list[Chunk]
    ) -> None:
        self.layer = 0
        self._kv_cache = kv_cache
        self._slots = slots
        self._groups = groups
        self._chunks = chunks
        self._masks: dict[tuple[str, int, int | None], torch.Tensor] = {}
        self._views: dict[tuple[tuple[str, int], torch.Size, torch.Size], tuple[torch.Tensor, ...]] = {}

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        self._kv_cache.key_slots[self.layer].index_copy_(0, self._slots, key.transpose(0, 1))
        self._kv_cache.value_slots[self.layer].index_copy_(0, self._slots, value.transpose(0, 1))
        parts = [self._rows(query, scoring, number) for number in range(len(self._groups))]
        parts += [self._chunk(query, scoring, number) for number in range(len(self._chunks))]
        self.layer += 1
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _rows(self, query: torch.Tensor, scoring: Scoring, number: int) -> torch.Tensor:
        """Attend decode rows; heads that share a KV head become its query tokens, so no key is copied."""
        group = self._groups[number]
        rows = group.end - group.begin
        k, v = self._gather(
            ("rows", number),
            group.pages.view(-1),
            lambda pages: pages.view(rows, -1, *pages.shape[2:]).transpose(1, 2),
        )
        q = query[:, group.begin : group.end].transpose(0, 1).reshape(rows, k.shape[1], -1, query.shape[2])
        sinks = None if scoring.sinks is None else scoring.sinks.view(1, k.shape[1], -1, 1)
        mask = self._row_mask(number, scoring.window, query.dtype)
        out = scaled_attention(q, k, v, mask, scoring._replace(sinks=sinks))
        return out.reshape(rows, query.shape[0], v.shape[3])

    def _chunk(self, query: torch.Tensor, scoring: Scoring, number: int) -> torch.Tensor:
        chunk = self._chunks[number]
        q = query[None, :, chunk.begin : chunk.end]
        k, v = self._gather(
            ("chunk", number),
            chunk.pages,
            lambda pages: pages.flatten(0, 1)[: chunk.kv_len].transpose(0, 1)[None],
        )
        group = q.shape[1] // k.shape[1]
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        sinks = None if scoring.sinks is None else scoring.sinks.view(1, -1, 1, 1)
        mask = self._chunk_mask(number, scoring.window, query.dtype)
        return scaled_attention(q, k, v, mask, scoring._replace(sinks=sinks))[0].transpose(0, 1)

    def _gather(
        self, which: tuple[str, int], pages: torch.Tensor, arrange: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather keys and values of pages, arranged for attention; layers of one shape share the buffers."""
        keys, values = self._kv_cache.keys[self.layer], self._kv_cache.values[self.layer]
        views = self._views.get((which, keys.shape, values.shape))
        if views is None:
            k, v = self._kv_cache.buffers(self.layer, pages.shape[0])
            views = self._views[which, keys.shape, values.shape] = (k, v, arrange(k), arrange(v))
        torch.index_select(keys, 0, pages, out=views[0])
        torch.index_select(values, 0, pages, out=views[1])
        return views[2], views[3]

    def _row_mask(self, number: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return [rows, 1, 1, slots]: 0 for the gathered slots that a row may read, else -inf."""
        mask = self._masks.get(("rows", number, window))
        if mask is None:
            group = self._groups[number]
            at = torch.arange(group.pages.shape[1] * self._kv_cache.page_size, device=group.pages.device)
            seen = at < group.kv_lens[:, None]
            if window is not None:
                seen &= at >= group.kv_lens[:, None] - window
            mask = self._masks["rows", number, window] = additive_mask(seen, dtype)[:, None, None]
        return mask

    def _chunk_mask(self, number: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return [tokens, kv_len], causal from the chunk's position in its request."""
        mask = self._masks.get(("chunk", number, window))
        if mask is None:
            chunk = self._chunks[number]
            at = torch.arange(chunk.kv_len, device=chunk.pages.device)
            own = at[chunk.kv_len - (chunk.end - chunk.begin) :, None]
            seen = at <= own
            if window is not None:
                seen &= at > own - window
            mask = self._masks["chunk", number, window] = additive_mask(seen, dtype)
        return mask


def additive_mask(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def scaled_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """Attend q [rows, heads, queries, dim] to k and v [rows, heads, slots, dim].

    Mask and sinks broadcast over [rows, heads, queries, slots]. Returns [rows, heads, queries, value dim].
    """
    if scoring.softcap is None and scoring.sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scoring.scale)
    scores = q @ k.transpose(2, 3) * scoring.scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores + mask
    if scoring.sinks is None:
        return F.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype) @ v
    sinks = scoring.sinks.expand(*scores.shape[:3], 1).to(scores.dtype)
    weights = F.softmax(torch.cat([scores, sinks], dim=-1), dim=-1, dtype=torch.float32)
    return weights[..., :-1].to(v.dtype) @ v
