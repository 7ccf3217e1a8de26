"""Store variants' own versions of layers on a GPU, located by a table by slot, so that graphs serve any.

A version of a projection has the layout of the base's, with its modules joined. Supports only the projections
and norms of decoder layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any
from weakref import WeakKeyDictionary

import torch

from site_engine.cuda.skinny_gemm import Versions
from site_engine.errors import VariantRefused
from site_engine.variants.changes import Change, LoadedVariant
from site_engine.variants.projections import MODULES, NORMS

UNIT_BYTES = 16


class Part(IntEnum):
    """The weights of a layer. The projections are in the order of `Projection`."""

    QUERY_KEY_VALUE = 0
    OUTPUT = 1
    GATE_UP = 2
    DOWN = 3
    NORM_BEFORE = 4
    NORM_BETWEEN = 5


PARTS = [*MODULES.values(), *((name,) for name in NORMS)]
"""The module names of each part."""


class OwnLayers:
    """The table of versions by slot, layer and part, as offsets from the base's weights."""

    def __init__(self, modules: Sequence[Sequence[Sequence[Any]]], slots: int) -> None:
        """Create an empty table. `modules` are the base's by layer, part and index in the part.

        The weights of a part must be contiguous.
        """
        self._modules = modules
        self._weights = [[[module.weight.detach() for module in part] for part in layer] for layer in modules]
        weights = self._weights
        self._table = torch.zeros(
            slots, len(weights), len(Part), dtype=torch.int64, device=weights[0][0][0].device
        )
        self._rows: WeakKeyDictionary[LoadedVariant, torch.Tensor] = WeakKeyDictionary()
        self._versions: WeakKeyDictionary[LoadedVariant, list[torch.Tensor]] = WeakKeyDictionary()

    def bias(self, layer: int, part: int, place: int) -> torch.Tensor:
        """Return the base's bias of a module that has one."""
        bias: torch.Tensor = self._modules[layer][part][place].bias
        return bias.detach()

    @property
    def bytes(self) -> int:
        return int(self._table.nbytes)

    def __contains__(self, variant: object) -> bool:
        return variant in self._rows

    def prepare(self, variant: LoadedVariant, changes: Mapping[str, Change]) -> None:
        """Join the own weights of a variant in the base's layout. Its modules become views of them.

        If it owns only some modules of a projection, the base's others are copied. Raises VariantRefused if
        memory runs out or the distance from the base's weights is not a multiple of UNIT_BYTES.
        """
        row = torch.zeros(len(self._weights), len(Part), dtype=torch.int64)
        kept: list[torch.Tensor] = []
        for layer, weights in enumerate(self._weights):
            for part, names in enumerate(PARTS):
                own = [changes.get(f"model.layers.{layer}.{name}", Change()).own for name in names]
                if all(each is None for each in own):
                    continue
                try:
                    version = _joined(own, weights[part])
                except torch.OutOfMemoryError as error:
                    raise VariantRefused(f"{variant.chain.id} does not fit the memory: {error}") from error
                apart = version.data_ptr() - weights[part][0].data_ptr()
                if apart % UNIT_BYTES:
                    raise VariantRefused(
                        f"the base's layer {layer} lies at no multiple of {UNIT_BYTES} bytes"
                    )
                row[layer, part] = apart // UNIT_BYTES
                kept.append(version)
        if kept:
            self._rows[variant] = row.pin_memory() if self._table.is_cuda else row
            self._versions[variant] = kept

    def place(self, variant: LoadedVariant, slot: int) -> None:
        """Set a slot to a variant's versions, or the base's, in stream order after all launched steps."""
        row = self._rows.get(variant)
        if row is None:
            self._table[slot].zero_()
        else:
            self._table[slot].copy_(row, non_blocking=True)

    def versions(self, layer: int, part: int, slots: torch.Tensor) -> Versions:
        """Return the versions of a part of a layer for rows with the given `slots`."""
        return Versions(self._table[:, layer, part], slots)


def _joined(own: Sequence[Any], base: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the joined weights of a part. `own` has the variant's modules, with None for the base's."""
    weights = [ours if one is None else one.weight.detach() for one, ours in zip(own, base, strict=True)]
    # tensors from files may be unaligned, and those prepared for CPU products have another memory order
    ready = all(one.is_contiguous() for one in weights) and weights[0].data_ptr() % UNIT_BYTES == 0
    ends = [one.data_ptr() + one.nbytes for one in weights]
    together = len({one.untyped_storage().data_ptr() for one in weights}) == 1
    if ready and together and ends[:-1] == [one.data_ptr() for one in weights[1:]]:
        rows = sum(one.shape[0] for one in weights)
        return weights[0].as_strided((rows, *weights[0].shape[1:]), weights[0].stride())
    joined = torch.cat(weights)
    for one, part in zip(own, joined.split([each.shape[0] for each in weights]), strict=True):
        if one is not None:
            one._parameters["weight"] = torch.nn.Parameter(part, requires_grad=False)
    return joined
