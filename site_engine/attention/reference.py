"""Paged attention in plain torch: decode rows by a padded gather, prefill chunks one by one.

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
class Rows:
    """Decode rows `[begin, end)` of about the same length, one packed token each, attended to together."""

    begin: int
    end: int
    pages: torch.Tensor  # [rows, pages], padded with the trash page
    kv_lens: torch.Tensor  # [rows], the new token included


@dataclass(frozen=True, slots=True)
class Chunk:
    """A prefill chunk: packed tokens `[begin, end)`, its request's pages and length up to its end."""

    begin: int
    end: int
    pages: torch.Tensor  # [pages]
    kv_len: int


class ReferenceContext:
    """One iteration. `slots` [tokens]: where each packed token's key and value go."""

    def __init__(self, arena: Arena, slots: torch.Tensor, groups: list[Rows], chunks: list[Chunk]) -> None:
        self.layer = 0
        self._arena = arena
        self._slots = slots
        self._groups = groups
        self._chunks = chunks
        self._row_masks: dict[tuple[int, int | None], torch.Tensor] = {}
        self._chunk_masks: dict[tuple[int, int | None], torch.Tensor] = {}

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        keys, values = self._arena.keys[self.layer], self._arena.values[self.layer]
        keys.flatten(0, 1).index_copy_(0, self._slots, key.transpose(0, 1))
        values.flatten(0, 1).index_copy_(0, self._slots, value.transpose(0, 1))
        out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
        for number, group in enumerate(self._groups):
            out[group.begin : group.end] = self._rows(query, scoring, number)
        for number, chunk in enumerate(self._chunks):
            out[chunk.begin : chunk.end] = self._chunk(query, scoring, number)
        self.layer += 1
        return out

    def _rows(self, query: torch.Tensor, scoring: Scoring, number: int) -> torch.Tensor:
        """The heads that share a KV head become that head's query tokens: no key is copied per head."""
        group = self._groups[number]
        rows = group.end - group.begin
        k, v = (
            pages.view(rows, -1, *pages.shape[2:]).transpose(1, 2)
            for pages in self._arena.gather(self.layer, group.pages.view(-1))
        )
        q = query[:, group.begin : group.end].transpose(0, 1).reshape(rows, k.shape[1], -1, query.shape[2])
        sinks = None if scoring.sinks is None else scoring.sinks.view(1, k.shape[1], -1, 1)
        out = _attend(q, k, v, self._row_mask(number, scoring.window), scoring._replace(sinks=sinks))
        return out.reshape(rows, query.shape[0], v.shape[3])

    def _chunk(self, query: torch.Tensor, scoring: Scoring, number: int) -> torch.Tensor:
        chunk = self._chunks[number]
        q = query[None, :, chunk.begin : chunk.end]
        k, v = (
            pages.flatten(0, 1)[: chunk.kv_len].transpose(0, 1)[None]
            for pages in self._arena.gather(self.layer, chunk.pages)
        )
        group = q.shape[1] // k.shape[1]
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        sinks = None if scoring.sinks is None else scoring.sinks.view(1, -1, 1, 1)
        mask = self._chunk_mask(number, scoring.window)
        return _attend(q, k, v, mask, scoring._replace(sinks=sinks))[0].transpose(0, 1)

    def _row_mask(self, number: int, window: int | None) -> torch.Tensor:
        """[rows, 1, 1, slots]: which slots of its gathered pages a row may read."""
        mask = self._row_masks.get((number, window))
        if mask is None:
            lens = self._groups[number].kv_lens[:, None]
            at = torch.arange(self._groups[number].pages.shape[1] * self._arena.page_size, device=lens.device)
            mask = at < lens
            if window is not None:
                mask &= at >= lens - window
            mask = self._row_masks[number, window] = mask[:, None, None]
        return mask

    def _chunk_mask(self, number: int, window: int | None) -> torch.Tensor:
        """[tokens, kv_len]: causal from the chunk's place in its request."""
        chunk = self._chunks[number]
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
