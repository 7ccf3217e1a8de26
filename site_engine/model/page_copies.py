"""Copy pages of keys and values of all layers into one tensor and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class PageCopies:
    """Copies between rooms, each with the pages of one layer's keys or values, and packed tensors.

    A packed tensor is `[pages, page_bytes]` in bytes: the parts of a page are adjacent, in room order.
    """

    def __init__(self, rooms: Sequence[torch.Tensor]) -> None:
        self.page_bytes = sum(int(room[0].nbytes) for room in rooms)
        self.rooms = in_words(rooms)

    def pack(self, pages: torch.Tensor, to: torch.Tensor) -> None:
        """Queue copies of `pages`, an index tensor on the device, into a packed tensor of as many pages."""
        for room, part in zip(self.rooms, self._parts(to), strict=True):
            torch.index_select(room, 0, pages, out=part)

    def unpack(self, packed: torch.Tensor, pages: torch.Tensor) -> None:
        """Queue copies of a packed tensor on the same device into `pages`."""
        for room, part in zip(self.rooms, self._parts(packed), strict=True):
            room.index_copy_(0, pages, part)

    def _parts(self, packed: torch.Tensor) -> list[torch.Tensor]:
        if not self.rooms:
            return []
        return list(packed.view(self.rooms[0].dtype).split([room.shape[1] for room in self.rooms], dim=1))


def in_words(rooms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """View pages as rows of the widest integer type that divides all of them, which copies fastest."""
    rows = [room.view(torch.uint8).flatten(1) for room in rooms]
    for dtype in (torch.int64, torch.int32, torch.int16):
        if all(row.shape[1] % dtype.itemsize == 0 for row in rows):
            return [row.view(dtype) for row in rows]
    return rows
