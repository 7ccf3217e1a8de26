"""Paged attention in plain torch: decode rows by one padded gather, prefill chunks one by one.

The law for every other backend, and the fast path on a CPU. All keys and values of a layer are written before
any is read, so pages may be shared within the iteration that computes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from site_engine.attention.arena import Arena
from site_engine.context import Scoring


@dataclass(frozen=True, slots=True)
class Chunk:
    """A prefill chunk: packed tokens `[begin, end)`, its request's pages and length up to its end."""

    begin: int
    end: int
    pages: torch.Tensor  # [pages]
    kv_len: int


class ReferenceContext:
    """One iteration: the first `decodes` packed tokens are one per row, the chunks follow."""

    def __init__(
        self,
        arena: Arena,
        slots: torch.Tensor,
        decode_tables: torch.Tensor,
        decode_lens: torch.Tensor,
        chunks: list[Chunk],
    ) -> None:
        """slots [tokens]: where each token's key and value go; decode_tables [rows, pages], padded with the
        trash page; decode_lens [rows]: tokens of the row including the new one.
        """
        self.layer = 0
        self._arena = arena
        self._slots = slots
        self._tables = decode_tables
        self._flat_tables = decode_tables.reshape(-1)
        self._lens = decode_lens
        self._chunks = chunks
        self._decode_masks: dict[int | None, torch.Tensor] = {}
        self._chunk_masks: dict[tuple[int, int | None], torch.Tensor] = {}

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        keys, values = self._arena.keys[self.layer], self._arena.values[self.layer]
        self.layer += 1
        keys.flatten(0, 1).index_copy_(0, self._slots, key.transpose(0, 1))
        values.flatten(0, 1).index_copy_(0, self._slots, value.transpose(0, 1))
        out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
        rows = self._tables.shape[0]
        if rows:
            out[:rows] = self._decode(query[:, :rows], keys, values, scoring)
        for number, chunk in enumerate(self._chunks):
            out[chunk.begin : chunk.end] = self._chunk(query, keys, values, scoring, number)
        return out

    def _decode(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """The heads that share a KV head become that head's query tokens: no key is copied per head."""
        rows, kv_heads = self._tables.shape[0], keys.shape[2]
        k = keys.index_select(0, self._flat_tables).view(rows, -1, kv_heads, keys.shape[3]).transpose(1, 2)
        v = (
            values.index_select(0, self._flat_tables)
            .view(rows, -1, kv_heads, values.shape[3])
            .transpose(1, 2)
        )
        q = query.transpose(0, 1).reshape(rows, kv_heads, -1, query.shape[2])
        sinks = None if scoring.sinks is None else scoring.sinks.view(1, kv_heads, -1, 1)
        out = _attend(q, k, v, self._decode_mask(scoring.window), scoring._replace(sinks=sinks))
        return out.reshape(rows, query.shape[0], values.shape[3])

    def _chunk(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring, number: int
    ) -> torch.Tensor:
        chunk = self._chunks[number]
        q = query[None, :, chunk.begin : chunk.end]
        k = keys.index_select(0, chunk.pages).flatten(0, 1)[: chunk.kv_len].transpose(0, 1)[None]
        v = values.index_select(0, chunk.pages).flatten(0, 1)[: chunk.kv_len].transpose(0, 1)[None]
        group = q.shape[1] // k.shape[1]
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        sinks = None if scoring.sinks is None else scoring.sinks.view(1, -1, 1, 1)
        mask = self._chunk_mask(number, chunk, scoring.window)
        return _attend(q, k, v, mask, scoring._replace(sinks=sinks))[0].transpose(0, 1)

    def _decode_mask(self, window: int | None) -> torch.Tensor:
        """[rows, 1, 1, slots]: which slots of its gathered pages a row may read."""
        mask = self._decode_masks.get(window)
        if mask is None:
            at = torch.arange(self._tables.shape[1] * self._arena.page_size, device=self._lens.device)
            mask = at < self._lens[:, None]
            if window is not None:
                mask &= at >= self._lens[:, None] - window
            mask = self._decode_masks[window] = mask[:, None, None]
        return mask

    def _chunk_mask(self, number: int, chunk: Chunk, window: int | None) -> torch.Tensor:
        """[tokens, kv_len]: causal from the chunk's place in its request."""
        mask = self._chunk_masks.get((number, window))
        if mask is None:
            at = torch.arange(chunk.kv_len, device=chunk.pages.device)
            own = at[chunk.kv_len - (chunk.end - chunk.begin) :, None]
            mask = at <= own
            if window is not None:
                mask &= at > own - window
            self._chunk_masks[number, window] = mask
        return mask


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """q [rows, heads, queries, dim], k and v [rows, heads, slots, dim] -> [rows, heads, queries, value dim];
    mask and sinks broadcast over [rows, heads, queries, slots].
    """
    if scoring.softcap is None and scoring.sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scoring.scale)
    scores = q @ k.transpose(2, 3) * scoring.scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if scoring.sinks is None:
        return F.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype) @ v
    sinks = scoring.sinks.expand(*scores.shape[:3], 1).to(scores.dtype)
    weights = F.softmax(torch.cat([scores, sinks], dim=-1), dim=-1, dtype=torch.float32)
    return weights[..., :-1].to(v.dtype) @ v
