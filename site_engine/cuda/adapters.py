"""Store adapters on a GPU in arenas of fixed slots, so that captured graphs serve any loaded adapter.

An adapter of a lower rank than the arenas' is padded with zeros. Host memory has one copy in the layout of a
slot; loading copies it into a free slot, in stream order with the steps. Supports LoRA and biases of the
joined projections of `llama_forward.py`, and own layers through `OwnLayers`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from site_engine.core.chain import Block, BlockKind, Chain, ServedVariant
from site_engine.core.loader_turns import pause, released
from site_engine.core.schedule_plan import SchedulePlan
from site_engine.cuda.kernels import adapter_kernels
from site_engine.cuda.own_layers import OwnLayers
from site_engine.cuda.skinny_gemm import MAX_ADAPTED_ROWS, AdapterRows, Adapters, Versions, side_by_side
from site_engine.errors import VariantRefused
from site_engine.model.loader import LoadedModel
from site_engine.variants.changes import Change, LoadedVariant, LowRank
from site_engine.variants.grouped import group_module
from site_engine.variants.projections import MODULES, NORMS, SERVED_ON_GPU, Projection, Size, slot_rank

TILE_ROWS = 16
TILE_NUMBERS = 1 + TILE_ROWS
DEPTH_BLOCK = 128
PARTS = 4  # parts of the depth, so that few rows occupy many programs
SPAN_COLUMNS = 128
COUNTER_NUMBERS = 4  # only one counts; the others align it, since Triton recompiles for unaligned addresses


class Packed(NamedTuple):
    """The factors of one adapter for one projection, in the layout of a slot of the `Arena`."""

    down: torch.Tensor  # [layers, groups * rank, depth]
    up: torch.Tensor  # [layers, columns, rank]
    scales: torch.Tensor  # [layers, groups], float32
    biases: torch.Tensor  # [layers, columns]: added to the base's biases; no columns if it has none


class Arena(NamedTuple):
    """The slots of one projection. `spans` has rows of group (module), first column and end column."""

    down: torch.Tensor  # [slots, layers, groups * rank, depth]
    up: torch.Tensor  # [slots, layers, columns, rank]
    scales: torch.Tensor  # [slots, layers, groups], float32
    biases: torch.Tensor  # [slots, layers, columns], without columns if the base has none
    spans: torch.Tensor  # [spans, 3], int32


class AdapterArenas:
    """Memory for adapters of up to `rank` in each of `slots`, for all `layers` of a model."""

    def __init__(  # noqa: PLR0917
        self,
        sizes: Sequence[Size],
        layers: int,
        slots: int,
        rank: int,
        like: torch.Tensor,
        own: OwnLayers | None = None,
    ) -> None:
        """Allocate the arenas. `sizes` are in the order of `Projection`; `like` has the data type and device.

        Without `own`, no variant may have layers of its own.
        """
        self.own = own
        self.slots, self.rank = slots, slot_rank(rank)
        self.layers, self._sizes = layers, sizes
        self._like = like
        self._packed: WeakKeyDictionary[LoadedVariant, list[Packed]] = WeakKeyDictionary()
        self.slot_of: WeakKeyDictionary[ServedVariant, int] = WeakKeyDictionary()
        self._arenas = [self._arena(size) for size in sizes]

    @property
    def bytes(self) -> int:
        arenas_bytes = sum(int(tensor.nbytes) for arena in self._arenas for tensor in arena)
        return arenas_bytes + (0 if self.own is None else self.own.bytes)

    def _arena(self, size: Size) -> Arena:
        groups, like, shape = len(size.columns), self._like, (self.slots, self.layers)
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
        """Copy an adapter to host memory in the layout of a slot. Return the variant with factors only there.

        May be called on any thread. Raises VariantRefused.
        """
        known = {
            f"model.layers.{layer}.{module}"
            for layer in range(self.layers)
            for each in MODULES.values()
            for module in each
        }
        norms = {f"model.layers.{layer}.{norm}" for layer in range(self.layers) for norm in NORMS}
        for name, change in variant.changes.items():
            owned = change.own is not None and self.own is not None
            if name not in (known | norms if owned else known) or (change.own is not None and not owned):
                raise VariantRefused(f"{variant.chain.id} changes {name}; {SERVED_ON_GPU}")
        if variant.rank > self.rank:
            raise VariantRefused(f"{variant.chain.id} has rank {variant.rank}; slots here have {self.rank}")
        changes = dict(variant.changes)
        packed = [self._pack(changes, projection) for projection in Projection]
        rank = max(variant.rank, 1) if changes else 0  # biases and own layers alone also need a slot
        blocks = tuple(
            each._replace(in_host=rank > 0 and not self._on_device(each, changes))
            for each in variant.chain.blocks
        )
        chain = variant.chain._replace(blocks=blocks)
        prepared = replace(variant, chain=chain, changes=changes, rank=rank)
        self._packed[prepared] = packed
        if self.own is not None:
            self.own.prepare(prepared, changes)
        return prepared

    def _on_device(self, block: Block, changes: Mapping[str, Change]) -> bool:
        """Return whether a block has weights that replace the base's and are therefore on the device."""
        return block.kind is BlockKind.LAYERS and any(
            change.own is not None
            for name, change in changes.items()
            if block.first <= int(name.split(".")[2]) < block.last
        )

    def trials(self, model: LoadedModel) -> Iterator[LoadedVariant]:
        """Place random variants for certifying the kernels in slot 0, one after the other, and yield each.

        The first adapts every projection. The second has an own layer 0 and adapts layer 1.
        """
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
        yield self._trial(changes)
        if self.own is None:
            return
        changes = {name: change for name, change in changes.items() if ".layers.1." in name}
        parts = [*(each for modules in MODULES.values() for each in modules), *NORMS]
        for name in [f"model.layers.0.{each}" for each in parts]:
            module = model.model.get_submodule(name)
            own = copy.copy(module)
            own.__dict__.pop("forward", None)
            weight = module.weight.detach()
            weight = weight * (1 + 0.5 * torch.randn(weight.shape[0], generator=draw).to(weight)).view(
                -1, *[1] * (weight.dim() - 1)
            )
            own._parameters = {
                **module._parameters,
                "weight": torch.nn.Parameter(weight, requires_grad=False),
            }
            changes[name] = Change(own=own)
            group_module(name, module)
        yield self._trial(changes)

    def _trial(self, changes: dict[str, Change]) -> LoadedVariant:
        variant = self.prepare(LoadedVariant(Chain("trial", "trial", (), 0, ()), changes, self.rank))
        self.place(variant, 0)
        return variant

    def _pack(self, changes: dict[str, Change], projection: Projection) -> Packed:
        """Copy the factors of a projection from `changes` and make `changes` refer to the copies."""
        arena, size = self._arenas[projection], self._sizes[projection]
        with released():
            packed = Packed(
                *(
                    torch.zeros(room.shape[1:], dtype=room.dtype, pin_memory=room.is_cuda)
                    for room in (arena.down, arena.up, arena.scales, arena.biases)
                )
            )
        first = 0
        for group, (module, columns) in enumerate(zip(MODULES[projection], size.columns, strict=True)):
            for layer in range(self.layers):
                pause()
                name = f"model.layers.{layer}.{module}"
                change = changes.get(name, Change())
                if self.own is not None and change.own is not None and change.own.bias is not None:
                    difference = change.own.bias - self.own.bias(layer, projection, group)
                    with released():  # a copy from the device
                        packed.biases[layer, first : first + columns].copy_(difference)
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
        """Copy a prepared adapter into a slot, in stream order after the steps launched so far."""
        assert isinstance(variant, LoadedVariant)
        for arena, packed in zip(self._arenas, self._packed[variant], strict=True):
            for room, contents in zip(arena, packed, strict=False):
                room[slot].copy_(contents, non_blocking=True)
        if self.own is not None:
            self.own.place(variant, slot)
        for before in [each for each, at in self.slot_of.items() if at == slot]:
            del self.slot_of[before]
        self.slot_of[variant] = slot

    def tiles(self, tokens: int) -> int:
        """Return the maximum number of tiles for `tokens` tokens: an adapter's are full except the last."""
        return min(tokens, 1 + self.slots + tokens // TILE_ROWS)

    def fill(self, tiles: np.ndarray, plan: SchedulePlan, padded: int) -> None:
        """Write a plan's tiles to `tiles` [tiles, TILE_NUMBERS]. `padded` is the number of padded tokens.

        A tile has tokens of one slot's adapter or of the base. Every token is in a tile, since kernels read
        slots by row. Padding joins the tiles of the last chunk, so that no weights are read for it alone.
        """
        tiles[:] = -1
        tokens: dict[int, list[int]] = {}
        at, slot = 0, -1
        for request, _, length, _ in plan.chunks:
            slot = self.slot_of[request.variant] if request.variant and request.has_adapter else -1
            tokens.setdefault(slot, []).extend(range(at, at + length))
            at += length
        tokens.setdefault(slot, []).extend(range(at, padded))
        used = 0
        for slot, rows in tokens.items():
            for begin in range(0, len(rows), TILE_ROWS):
                some = rows[begin : begin + TILE_ROWS]
                tiles[used, 0], tiles[used, 1 : 1 + len(some)] = slot, some
                used += 1

    def add(
        self, layer: int, projection: Projection, tiles: torch.Tensor, given: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Add the adapters' products with `given` [tokens, depth] to `out` [tokens, columns] in place."""
        _, up, _, biases, spans = self._arenas[projection]
        shrunk = self._shrink(layer, projection, tiles, given)
        parts, tokens, width = shrunk.shape
        adapter_kernels.expand_rows[(len(tiles), len(spans))](
            shrunk, up[:, layer], biases[:, layer], tiles, spans, out, tokens, out.shape[1], width,
            up.stride(0), biases.stride(0), RANK=self.rank, PARTS=parts, COLUMNS=SPAN_COLUMNS,
            BIASED=biases.shape[2] > 0, num_warps=4,
        )  # fmt: skip
        return out

    def _shrink(
        self, layer: int, projection: Projection, tiles: torch.Tensor, given: torch.Tensor
    ) -> torch.Tensor:
        down, scales = self._arenas[projection].down, self._arenas[projection].scales
        tokens, depth = given.shape
        width = down.shape[2]
        part_depth = -(-depth // (PARTS * DEPTH_BLOCK)) * DEPTH_BLOCK
        parts, groups = -(-depth // part_depth), width // self.rank
        together, ranks = side_by_side(groups, self.rank)
        shrunk = torch.empty(parts, tokens, width, dtype=torch.float32, device=given.device)
        adapter_kernels.shrink_rows[(len(tiles), groups // together, parts)](
            given, down[:, layer], scales[:, layer], tiles, shrunk, tokens, depth, down.stride(0),
            scales.stride(0), part_depth, RANK=self.rank, GROUPS=groups, TOGETHER=together, WIDTH=ranks,
            DEPTH=DEPTH_BLOCK, num_warps=4,
        )  # fmt: skip
        return shrunk

    def product(
        self,
        layer: int,
        projection: Projection,
        rows: AdapterRows,
        own: torch.Tensor | None,
        arrived: torch.Tensor,
    ) -> Adapters:
        """Return the arguments with which a GEMM kernel adds the adapters' products."""
        down, up, scales, biases, _ = self._arenas[projection]
        ends = [int(end) for end in np.cumsum(self._sizes[projection].columns)]
        if projection is Projection.GATE_UP:  # each program computes columns of both groups
            ends = ends[-1:]
        first_two = ends[0], ends[min(1, len(ends) - 1)]
        factors = down[:, layer], up[:, layer], scales[:, layer], biases[:, layer]
        return Adapters(*factors, first_two, rows, own, arrived)


class StepAdapters:
    """The adapters of one step. With few rows, the base's GEMM kernels compute their products."""

    def __init__(self, arenas: AdapterArenas, tiles: torch.Tensor, rows: int, *, owned: bool = False) -> None:
        """Prepare the rows of a step. `tiles` [tiles, TILE_NUMBERS] must contain every row. With `owned`,
        some rows have own versions of layers.
        """
        self._arenas, self._own = arenas, arenas.own if owned else None
        count, counters = len(tiles), arenas.layers * len(Projection) * COUNTER_NUMBERS
        self._rows = AdapterRows(tiles, *(tiles.new_empty(size) for size in (rows, count, 2)))
        self._arrived = tiles.new_empty(arenas.layers, len(Projection), COUNTER_NUMBERS)
        few = rows <= MAX_ADAPTED_ROWS
        if few or owned:
            adapter_kernels.prepare_rows[(count,)](
                *self._rows, self._arrived, count, counters, FEW=few,
                COUNT_PAD=1 << (count - 1).bit_length() if few else 1,
                COUNTERS_PAD=1 << (counters - 1).bit_length() if few else 1, num_warps=4,
            )  # fmt: skip

    def add(self, layer: int, projection: Projection, given: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Add the adapters' products with `given` to `out` in place."""
        return self._arenas.add(layer, projection, self._rows.tiles, given, out)

    def product(self, layer: int, projection: Projection) -> Adapters:
        """Return the arguments with which a GEMM kernel adds the adapters' products."""
        versions = self.versions(layer, projection)
        own = None if versions is None else versions.own
        return self._arenas.product(layer, projection, self._rows, own, self._arrived[layer, projection])

    def versions(self, layer: int, part: int) -> Versions | None:
        """Return the rows' versions of a part of a layer, or None if all rows use the base's."""
        if self._own is None or layer == self._arenas.layers:  # the final norm is always the base's
            return None
        return self._own.versions(layer, part, self._rows.slots)
