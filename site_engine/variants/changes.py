"""Describe what a variant changes of a module of the base: own weights, a bias, a product of low rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from site_engine.core.chain import Chain


class LowRank(NamedTuple):
    """A LoRA adapter of one module: `down` [rank, in] and `up` [out, rank], never merged into the weight."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float

    def to(self, device: torch.device) -> LowRank:
        return LowRank(self.down.to(device), self.up.to(device), self.scale)

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        """Return what is added to the module's output for inputs [..., in], or for ids where it embeds.

        Factors that wait in host memory are copied to the device of the input.
        """
        down, up = (each.to(given.device, non_blocking=True) for each in (self.down, self.up))
        if not given.is_floating_point():
            return F.linear(F.embedding(given, down.t()), up) * self.scale
        return F.linear(F.linear(given, down), up) * self.scale


class Change(NamedTuple):
    """The changes of one module. `own` computes in its place; `bias` is added where the base adds another."""

    own: Any = None
    bias: torch.Tensor | None = None
    low_rank: LowRank | None = None


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LoadedVariant:
    """A variant whose tensors are in memory; `changes` by the names of the base's modules.

    `virtual` has the keys of all layers, then the values, of tokens before every prompt: each
    [tokens, kv_heads, dim].
    """

    chain: Chain
    changes: Mapping[str, Change]
    rank: int = 0  # the largest of its adapters; 0: it has none
    virtual: Sequence[torch.Tensor] = ()

    @property
    def fingerprint(self) -> str:
        return self.chain.fingerprint

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.chain.eos_token_ids

    @property
    def virtual_tokens(self) -> int:
        return self.virtual[0].shape[0] if self.virtual else 0
