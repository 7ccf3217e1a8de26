"""Copy pages of keys and values on a GPU: those of all layers in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from site_engine.cuda.kernels import page_kernels
from site_engine.model.logit_rules import to_device
from site_engine.model.page_copies import PageCopies

BLOCK = 1024


class DevicePageCopies(PageCopies):
    """Launching a copy for each layer would take the host longer than the device copies.

    The kernel is told distances instead of addresses: packed pages may lie in another device's memory.
    """

    def __init__(self, rooms: Sequence[torch.Tensor]) -> None:
        super().__init__(rooms)
        self._is_wide = bool(self.rooms) and self.rooms[0].dtype == torch.int64
        self._packed: dict[int, torch.Tensor] = {}  # distances of memory, by its address
        if self._is_wide:
            widths = [room.shape[1] for room in self.rooms]
            self._starts = self._sent([sum(widths[:at]) for at in range(len(widths) + 1)])
            self._distances = self._sent([self._distance(room.data_ptr()) for room in self.rooms])
            self._blocks = -(-max(widths) // BLOCK)

    def pack(self, pages: torch.Tensor, to: torch.Tensor) -> None:
        if self._is_wide:
            self._copy(pages, to, pack=True)
        else:
            super().pack(pages, to)

    def unpack(self, packed: torch.Tensor, pages: torch.Tensor) -> None:
        if self._is_wide:
            self._copy(pages, packed, pack=False)
        else:
            super().unpack(packed, pages)

    def _copy(self, pages: torch.Tensor, packed: torch.Tensor, *, pack: bool) -> None:
        if not len(pages):
            return
        memory = packed.untyped_storage().data_ptr()
        if memory not in self._packed:
            self._packed[memory] = self._sent([self._distance(memory)])
        page_kernels.copy_pages[(len(pages), len(self.rooms), self._blocks)](
            self.rooms[0], self._distances, self._starts, pages, self._packed[memory],
            packed.storage_offset() // 8, len(self.rooms), PACK=pack, BLOCK=BLOCK,
        )  # fmt: skip

    def _distance(self, address: int) -> int:
        return (address - int(self.rooms[0].data_ptr())) // 8

    def _sent(self, numbers: list[int]) -> torch.Tensor:
        return to_device(np.array(numbers, dtype=np.int64), self.rooms[0].device)
