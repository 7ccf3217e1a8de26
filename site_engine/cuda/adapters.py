"""Adapters on a GPU: fixed arenas with a place for each slot, so that graphs hold whatever is loaded.

An adapter of a lower rank than the arenas' is padded with zeros. It lies once in host memory, laid out as a
slot is; loading copies it into a free slot, in order with the steps on the device. Serves LoRA and biases of
the joined projections of `llama_forward.py`, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from site_engine.core.chain import Chain, ServedVariant
from site_engine.core.scheduler import SchedulePlan
from site_engine.cuda.attention_launch import pdl_kwargs
from site_engine.cuda.kernels import adapter_kernels
from site_engine.cuda.skinny_gemm import Shrink
from site_engine.errors import VariantRefused
from site_engine.model.loader import LoadedModel
from site_engine.variants.changes import Change, LoadedVariant, LowRank
from site_engine.variants.grouped import group_module
from site_engine.variants.projections import MODULES, SERVED_ON_GPU, Projection, Size, slot_rank

TILE_ROWS = 16
TILE_NUMBERS = 1 + TILE_ROWS
DEPTH_BLOCK = 128
PARTS = 4  # of the depth, so that few rows occupy many programs
SPAN_COLUMNS = 128


class Packed(NamedTuple):
    """One adapter for one projection, as a slot of the arena holds it."""

    down: torch.Tensor  # [layers, groups * rank, depth]
    up: torch.Tensor  # [layers, columns, rank]
    scales: torch.Tensor  # [layers, groups], float32
    biases: torch.Tensor  # [layers, columns]: what is added to those of the base, if it has any


class Arena(NamedTuple):
    """The slots of one projection; `spans` says which columns belong to which module."""

    down: torch.Tensor  # [slots, layers, groups * rank, depth]
    up: torch.Tensor  # [slots, layers, columns, rank]
    scales: torch.Tensor  # [slots, layers, groups], float32
    biases: torch.Tensor  # [slots, layers, columns], without columns if the base has none
    spans: torch.Tensor  # [spans, 3], int32


class Factors(NamedTuple):
    """What all slots have for one layer of a projection: [slots, ...]."""

    down: torch.Tensor
    up: torch.Tensor
    scales: torch.Tensor


class AdapterArenas:
    """Room for adapters of up to `rank` in each of `slots`, for all `layers` of a model."""

    def __init__(self, sizes: Sequence[Size], layers: int, slots: int, rank: int, like: torch.Tensor) -> None:
        """`sizes`: in the order of `Projection`; `like` has the data type and the device."""
        self.slots, self.rank = slots, slot_rank(rank)
        self._layers, self._sizes = layers, sizes
        self._like = like
        self._packed: WeakKeyDictionary[LoadedVariant, list[Packed]] = WeakKeyDictionary()
        self.slot_of: WeakKeyDictionary[ServedVariant, int] = WeakKeyDictionary()
        self._arenas = [self._arena(size) for size in sizes]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for arena in self._arenas for tensor in arena)

    def _arena(self, size: Size) -> Arena:
        groups, like, shape = len(size.columns), self._like, (self.slots, self._layers)
        bounds = np.cumsum((0, *size.columns))
        spans = [
            (group, at, min(at + SPAN_COLUMNS, int(end)))
            for group, (begin, end) in enumerate(pairwise(bounds))
            for at in range(int(begin), int(end), SPAN_COLUMNS)
        ]
        return Arena(
            like.new_zeros(*shape, groups * self.rank, size.depth),
            like.new_zeros(*shape, sum(size.columns), self.rank),
            like.new_zeros(*shape, groups, dtype=torch.float32),
            like.new_zeros(*shape, sum(size.columns) if size.biased else 0),
            torch.tensor(spans, dtype=torch.int32, device=like.device),
        )

    def prepare(self, variant: LoadedVariant) -> LoadedVariant:
        """Lay an adapter out in host memory as slots hold it; return the variant with factors there alone.

        May be called on any thread; raises VariantRefused.
        """
        known = {
            f"model.layers.{layer}.{module}"
            for layer in range(self._layers)
            for each in MODULES.values()
            for module in each
        }
        for name, change in variant.changes.items():
            if change.own is not None or name not in known:
                raise VariantRefused(f"{variant.chain.id} changes {name}; {SERVED_ON_GPU}")
        if variant.rank > self.rank:
            raise VariantRefused(f"{variant.chain.id} has rank {variant.rank}; slots here have {self.rank}")
        changes = dict(variant.changes)
        packed = [self._pack(changes, projection) for projection in Projection]
        rank = max(variant.rank, 1) if changes else 0  # biases alone need a slot, too
        blocks = tuple(each._replace(in_host=bool(rank)) for each in variant.chain.blocks)
        chain = variant.chain._replace(blocks=blocks)
        prepared = replace(variant, chain=chain, changes=changes, rank=rank)
        self._packed[prepared] = packed
        return prepared

    def trial(self, model: LoadedModel) -> LoadedVariant:
        """Place a random adapter of every projection, with which the kernels are certified; return it."""
        draw = torch.Generator().manual_seed(0)
        changes = {}
        for name, module in model.model.named_modules():
            if any(name.endswith(f".{each}") for modules in MODULES.values() for each in modules):
                columns, depth = module.weight.shape
                factors = (
                    torch.randn(*shape, generator=draw) * shape[1] ** -0.5
                    for shape in ((self.rank, depth), (columns, self.rank))
                )
                down, up = (each.to(module.weight) for each in factors)
                bias = None
                if module.bias is not None:
                    bias = torch.randn(columns, generator=draw).to(module.weight) * 0.5
                changes[name] = Change(bias=bias, low_rank=LowRank(down, up, 0.5))
                group_module(name, module)
        variant = self.prepare(LoadedVariant(Chain("trial", "trial", (), 0, ()), changes, self.rank))
        self.place(variant, 0)
        return variant

    def _pack(self, changes: dict[str, Change], projection: Projection) -> Packed:
        """Copy the factors of a projection out of `changes`, which then refer to the copies."""
        arena, size = self._arenas[projection], self._sizes[projection]
        packed = Packed(
            *(
                torch.zeros(room.shape[1:], dtype=room.dtype, pin_memory=room.is_cuda)
                for room in (arena.down, arena.up, arena.scales, arena.biases)
            )
        )
        first = 0
        for group, (module, columns) in enumerate(zip(MODULES[projection], size.columns, strict=True)):
            for layer in range(self._layers):
                name = f"model.layers.{layer}.{module}"
                change = changes.get(name, Change())
                if change.bias is not None:
                    bias = packed.biases[layer, first : first + columns].copy_(change.bias)
                    changes[name] = change = change._replace(bias=bias)
                if change.low_rank is not None:
                    down, up, scale = change.low_rank
                    rank, begin = down.shape[0], group * self.rank
                    kept = LowRank(
                        packed.down[layer, begin : begin + rank],
                        packed.up[layer, first : first + columns, :rank],
                        scale,
                    )
                    kept.down.copy_(down)
                    kept.up.copy_(up)
                    packed.scales[layer, group] = scale
                    changes[name] = change._replace(low_rank=kept)
            first += columns
        return packed

    def place(self, variant: ServedVariant, slot: int) -> None:
        """Copy a prepared adapter into a slot, after the steps launched so far."""
        assert isinstance(variant, LoadedVariant)
        for arena, packed in zip(self._arenas, self._packed[variant], strict=True):
            for room, contents in zip(arena, packed, strict=False):
                room[slot].copy_(contents, non_blocking=True)
        for before in [each for each, at in self.slot_of.items() if at == slot]:
            del self.slot_of[before]
        self.slot_of[variant] = slot

    def tiles(self, tokens: int) -> int:
        """Return the tiles that any plan of so many tokens fits: each adapter fills all of its but one."""
        return min(tokens, 1 + self.slots + tokens // TILE_ROWS)

    def fill(self, tiles: np.ndarray, plan: SchedulePlan, padded: int) -> None:
        """Write the tiles of a plan, of `padded` tokens with padding, into [tiles, TILE_NUMBERS].

        A tile has tokens of one adapter, by its slot, or of the base. Every token is in one: kernels read
        slots by row.
        """
        tiles[:] = -1
        tokens: dict[int, list[int]] = {}
        at = 0
        for request, _, length, _ in plan.chunks:
            slot = self.slot_of[request.variant] if request.variant and request.has_adapter else -1
            tokens.setdefault(slot, []).extend(range(at, at + length))
            at += length
        tokens.setdefault(-1, []).extend(range(at, padded))
        used = 0
        for slot, rows in tokens.items():
            for begin in range(0, len(rows), TILE_ROWS):
                some = rows[begin : begin + TILE_ROWS]
                tiles[used, 0], tiles[used, 1 : 1 + len(some)] = slot, some
                used += 1

    def add(
        self, layer: int, projection: Projection, tiles: torch.Tensor, given: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Add to `out` [tokens, columns], in place, what adapters make of `given` [tokens, depth]."""
        self.expand(layer, projection, tiles, self._shrink(layer, projection, tiles, given), out, pdl=False)
        return out

    def _shrink(
        self, layer: int, projection: Projection, tiles: torch.Tensor, given: torch.Tensor
    ) -> torch.Tensor:
        down = self._arenas[projection].down
        tokens, depth = given.shape
        width = down.shape[2]
        part_depth = -(-depth // (PARTS * DEPTH_BLOCK)) * DEPTH_BLOCK
        parts = -(-depth // part_depth)
        shrunk = torch.empty(parts, tokens, width, dtype=torch.float32, device=given.device)
        adapter_kernels.shrink_rows[(len(tiles), width // self.rank, parts)](
            given, down[:, layer], tiles, shrunk, tokens, depth, width, down.stride(0), part_depth,
            RANK=self.rank, DEPTH=DEPTH_BLOCK, num_warps=4,
        )  # fmt: skip
        return shrunk

    def expand(
        self,
        layer: int,
        projection: Projection,
        tiles: torch.Tensor,
        shrunk: torch.Tensor,
        out: torch.Tensor,
        *,
        pdl: bool,
    ) -> None:
        """Add to `out` [tokens, columns], in place, what adapters make of the shrunk rows."""
        _, up, scales, biases, spans = self._arenas[projection]
        parts, tokens, width = shrunk.shape
        adapter_kernels.expand_rows[(len(tiles), len(spans))](
            shrunk, up[:, layer], scales[:, layer], biases[:, layer], tiles, spans, out, tokens, out.shape[1],
            width, up.stride(0), scales.stride(0), biases.stride(0), RANK=self.rank, PARTS=parts,
            COLUMNS=SPAN_COLUMNS, BIASED=biases.shape[2] > 0, PDL=pdl, **pdl_kwargs(pdl), num_warps=4,
        )  # fmt: skip

    def factors(self, layer: int, projection: Projection) -> Factors:
        """Return the views of a layer that kernels get."""
        arena = self._arenas[projection]
        return Factors(arena.down[:, layer], arena.up[:, layer], arena.scales[:, layer])


class StepAdapters:
    """The adapters of one step; where rows are few, computed in the kernels of the base's products."""

    def __init__(self, arenas: AdapterArenas, tiles: torch.Tensor, rows: int) -> None:
        """`tiles` [tiles, TILE_NUMBERS]: with every row of the step in one."""
        self._arenas, self._tiles = arenas, tiles
        self._slots = tiles.new_empty(rows)  # of each row
        adapter_kernels.slots_of_rows[(len(tiles),)](tiles, self._slots, num_warps=1)

    def add(self, layer: int, projection: Projection, given: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Add to `out`, in place, what adapters make of `given`."""
        return self._arenas.add(layer, projection, self._tiles, given, out)

    def shrink(self, layer: int, projection: Projection) -> Shrink:
        """Return what a skinny GEMM needs to shrink its rows beside."""
        return Shrink(self._arenas.factors(layer, projection).down, self._tiles, self._arenas.rank)

    def expand(
        self, layer: int, projection: Projection, shrunk: torch.Tensor, out: torch.Tensor, *, pdl: bool
    ) -> torch.Tensor:
        self._arenas.expand(layer, projection, self._tiles, shrunk, out, pdl=pdl)
        return out

    def gate(self, layer: int, both: torch.Tensor, shrunk: torch.Tensor, *, pdl: bool) -> torch.Tensor:
        """Return silu(gate) * up of `both` [rows, 2 * size] with what adapters add."""
        _, up, scales = self._arenas.factors(layer, Projection.GATE_UP)
        rows, size = both.shape[0], both.shape[1] // 2
        out = both.new_empty(rows, size)
        adapter_kernels.expand_gate[(len(self._tiles), -(-size // SPAN_COLUMNS))](
            both, shrunk, up, scales, self._tiles, out, rows, size, up.stride(0), scales.stride(0),
            RANK=self._arenas.rank, PARTS=len(shrunk), COLUMNS=SPAN_COLUMNS, PDL=pdl, **pdl_kwargs(pdl),
            num_warps=4,
        )  # fmt: skip
        return out

    def add_parts_norm(  # noqa: PLR0917 - the tensors of one call
        self,
        layer: int,
        projection: Projection,
        parts: torch.Tensor,
        shrunk: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        *,
        pdl: bool,
    ) -> torch.Tensor:
        """Add a product in parts, and what adapters add to it, to `residual`; return the norm of the sum."""
        _, up, scales = self._arenas.factors(layer, projection)
        rows, size = residual.shape
        out = torch.empty_like(residual)
        pad = 1 << (size - 1).bit_length()
        adapter_kernels.expand_parts_norm[(rows,)](
            parts, residual, weight, out, shrunk, up, scales, self._slots, epsilon, rows, up.stride(0),
            scales.stride(0), RANK=self._arenas.rank, RANKS=min(16, self._arenas.rank), PARTS=len(parts),
            SIZE=size, SIZE_PAD=pad, PDL=pdl, **pdl_kwargs(pdl), num_warps=16 if pad > 2048 else 8,
        )  # fmt: skip
        return out
