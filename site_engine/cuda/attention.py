"""Serve a model's attention calls on a GPU, using a step's inputs in device memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from site_engine.cuda import attention_launch
from site_engine.cuda.adapters import StepAdapters
from site_engine.cuda.architecture import architecture
from site_engine.cuda.attention_launch import DecodeWork, PrefillWork, RotaryTable
from site_engine.model.attention_context import Scoring
from site_engine.model.kv_cache import KVCache

FIRST_WITH_PDL = 90


class DeviceContext:
    """The attention context of one forward pass. Each call of `attend` advances `layer` by one."""

    def __init__(  # noqa: PLR0917
        self,
        kv_cache: KVCache,
        table: torch.Tensor,
        decode: DecodeWork | None,
        prefill: PrefillWork | None,
        side: torch.cuda.Stream | None = None,
        adapters: StepAdapters | None = None,
    ) -> None:
        self.layer = 0
        self.adapters = adapters
        self._kv_cache = kv_cache
        self._table = table
        self._decode = decode
        self._prefill = prefill
        self._side = side if decode is not None and prefill is not None else None
        self.pdl = prefill is None and table.device.type != "cpu" and _supports_pdl()

    @property
    def decodes_only(self) -> bool:
        """Whether every packed token is a decode row, whose logits are all needed."""
        return self._prefill is None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
        rotary: RotaryTable | None = None,
    ) -> torch.Tensor:
        """Store key and value [kv_heads, tokens, dim] and attend query [heads, tokens, dim] to the pages.

        With `rotary`, query and key, which must be adjacent in one tensor, are rotated first. Returns
        [tokens, heads, value dim].
        """
        query, key, value = (one if one.stride(2) == 1 else one.contiguous() for one in (query, key, value))
        keys, values = self._kv_cache.keys[self.layer], self._kv_cache.values[self.layer]
        self.layer += 1
        out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
        with self._on_side_stream():
            if self._prefill is not None:
                self._prefill_chunks(self._prefill, query, key, value, keys, values, out, scoring, rotary)
        if self._decode is not None:
            attention_launch.decode(
                query, key, value, keys, values, self._table, self._decode, out, scoring, rotary,
                pdl=self.pdl,
            )  # fmt: skip
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
        return out

    @contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        """Run prefill on the side stream: its pages and tokens are disjoint from those of the decode rows."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield

    def _prefill_chunks(  # noqa: PLR0917 - the tensors of one call
        self,
        work: PrefillWork,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        scoring: Scoring,
        rotary: RotaryTable | None,
    ) -> None:
        """Write all keys and values, then attend: prompts may share pages that the same step writes."""
        if rotary is not None:
            attention_launch.rotate_in_place(query, key, work, rotary)
        attention_launch.write(key, value, keys, values, work.slots)
        attention_launch.prefill(query, keys, values, self._table, work.blocks, out, scoring)


@cache
def _supports_pdl() -> bool:
    """Return whether the device supports programmatic dependent launch, which overlaps successive kernels."""
    return architecture() >= FIRST_WITH_PDL
