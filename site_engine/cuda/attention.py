"""Answers a model's attention calls on the device: one step's numbers, already in device memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from inspect import signature
from typing import NamedTuple

import torch

from site_engine.cuda import attention_launch
from site_engine.cuda.attention_launch import DecodeWork, PrefillWork, Turn
from site_engine.model.attention_context import Scoring
from site_engine.model.kv_cache import KVCache


class Fresh(NamedTuple):
    """Chunks that all begin at their prompt's first token: nothing is read from pages."""

    begin: int  # the first of their packed tokens
    ends: torch.Tensor  # [chunks + 1], int32: cumulative lengths
    longest: int


class DeviceContext:
    """One forward pass. Layers are counted as they call."""

    def __init__(  # noqa: PLR0917
        self,
        arena: KVCache,
        table: torch.Tensor,
        decode: DecodeWork | None,
        prefill: PrefillWork | None,
        fresh: Fresh | None = None,
        side: torch.cuda.Stream | None = None,
    ) -> None:
        self.layer = 0
        self._arena = arena
        self._table = table
        self._decode = decode
        self._prefill = prefill
        self._fresh = fresh
        self._side = side if decode is not None and prefill is not None else None
        self.early = prefill is None and table.is_cuda and _launches_early()

    @property
    def decodes_only(self) -> bool:
        """Every packed token is a row of its own, and its logits are wanted."""
        return self._prefill is None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
        turn: Turn | None = None,
    ) -> torch.Tensor:
        """query [heads, tokens, dim], key and value [kv_heads, tokens, dim] -> [tokens, heads, value dim].
        `turn`: the rotary embedding that query and key, side by side in one tensor, still lack.
        """
        query, key, value = (_rowwise(one) for one in (query, key, value))
        keys, values = self._arena.keys[self.layer], self._arena.values[self.layer]
        self.layer += 1
        out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
        with self._beside():
            if self._prefill is not None:
                self._prompts(self._prefill, query, key, value, keys, values, out, scoring, turn)
        if self._decode is not None:
            attention_launch.decode(
                query, key, value, keys, values, self._table, self._decode, out, scoring, turn,
                early=self.early,
            )  # fmt: skip
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
        return out

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Prompts and decode rows touch different pages and tokens: in a graph they run at the same time."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield

    def _prompts(  # noqa: PLR0917 - the tensors of one call
        self,
        work: PrefillWork,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        scoring: Scoring,
        turn: Turn | None,
    ) -> None:
        """All keys and values are written before any is read: prompts may share pages of the same step."""
        if turn is not None:
            attention_launch.turn_in_place(query, key, work, turn)
        attention_launch.write(key, value, keys, values, work.slots)
        if self._fresh is not None and _plain(scoring):
            out[self._fresh.begin :] = _packed(self._fresh, query, key, value, scoring.scale)
        else:
            attention_launch.prefill(query, keys, values, self._table, work.blocks, out, scoring)


@cache
def _launches_early() -> bool:
    """Whether a kernel may be launched while the one before runs and wait for its end by itself."""
    return bool(torch.cuda.get_device_capability() >= (9, 0))


def _rowwise(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def _plain(scoring: Scoring) -> bool:
    return scoring.window is None and scoring.softcap is None and scoring.sinks is None


def _packed(
    fresh: Fresh, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    q, k, v = (one[:, fresh.begin :].transpose(0, 1) for one in (query, key, value))
    ends, longest = fresh.ends, fresh.longest
    answer: torch.Tensor = _varlen()(q, k, v, ends, ends, longest, longest, scale=scale, window_size=(-1, 0))
    return answer


@cache
def _varlen() -> Callable[..., torch.Tensor]:
    """torch's own attention over packed sequences; newer ones ask to be told that heads share keys."""
    from torch.nn.attention.varlen import varlen_attn

    shared = "enable_gqa" in signature(varlen_attn).parameters
    return partial(varlen_attn, enable_gqa=True) if shared else varlen_attn
