"""Copy pages of keys and values on a GPU, for all layers in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from site_engine.cuda.kernels import page_kernels
from site_engine.model.page_copies import PageCopies

BLOCK = 1024


class DevicePageCopies(PageCopies):
    """Copy the pages of all layers with one kernel if their sizes are multiples of 8 bytes.

    Launching a copy per layer would take the host longer than the device takes to copy.
    """

    def __init__(self, rooms: Sequence[torch.Tensor]) -> None:
        super().__init__(rooms)
        self._is_wide = bool(self.rooms) and self.rooms[0].dtype == torch.int64
        if self._is_wide:
            device, first = self.rooms[0].device, self.rooms[0].data_ptr()
            widths = [room.shape[1] for room in self.rooms]
            starts = [sum(widths[:at]) for at in range(len(widths) + 1)]
            distances = [(room.data_ptr() - first) // 8 for room in self.rooms]
            self._distances = torch.tensor(distances, dtype=torch.int64, device=device)
            self._starts = torch.tensor(starts, dtype=torch.int64, device=device)
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
        if len(pages):
            page_kernels.copy_pages[(len(pages), len(self.rooms), self._blocks)](
                self.rooms[0], self._distances, self._starts, pages, packed.view(torch.int64),
                len(self.rooms), PACK=pack, BLOCK=BLOCK,
            )  # fmt: skip
