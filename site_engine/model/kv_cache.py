"""Hold the keys and values of all layers in pages: per layer two tensors `[pages, page, kv_heads, dim]`."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from site_engine.core.request import Request
from site_engine.core.step_memory import kv_room
from site_engine.errors import NoMemory
from site_engine.model.host_copies import to_device
from site_engine.model.page_copies import PageCopies
from site_engine.model.sleep_memory import Room, SleepMemory, whole
from site_engine.model.tensor_group import TensorGroup


class LayerShape(NamedTuple):
    """The KV shape of one attention call of the model."""

    kv_heads: int
    key_dim: int
    value_dim: int


class Fill(NamedTuple):
    """A command to other ranks: fill pages with one number."""

    pages: list[int]
    number: float


class KVCache:
    """Pages 0 to `pages` of every layer; page 0 is the null page.

    Memory starts as zeros, since masked slots are multiplied by 0 and must be finite. Without layers nothing
    is allocated. The ranks of a `group` have the same page numbers, each with the heads that it computes.
    `memory` allocates the pages and frees them while the base sleeps; if its rooms can grow, pages beyond the
    first `pages` can be added. `copies` creates the object that packs and unpacks pages.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        group: TensorGroup | None = None,
        memory: SleepMemory | None = None,
        copies: Callable[[Sequence[torch.Tensor]], PageCopies] = PageCopies,
    ) -> None:
        def room(shape: LayerShape, dim: int) -> torch.Tensor:
            size = pages + 1, page_size, shape.kv_heads, dim
            if memory is None:
                return torch.zeros(size, dtype=dtype, device=device)
            if not memory.grows:
                return memory.room(size, dtype)
            row_bytes = prod(size[1:]) * dtype.itemsize
            own = memory.growing_room((pages + 1) * row_bytes, (self._most + 1) * row_bytes)
            self._rooms.append((own, row_bytes))
            return own.bytes[: (self._most + 1) * row_bytes].view(dtype).view(self._most + 1, *size[1:])

        page_bytes = numbers_per_token(layers) * page_size * dtype.itemsize
        self._most = max(pages, memory_bytes(device) // max(1, page_bytes))
        self._rooms: list[tuple[Room, int]] = []  # rooms that can grow, each with its bytes per page
        self._ends = [pages]  # the last page of each part that the rooms were grown by
        self.pages = pages
        self.page_size = page_size
        self.device = device
        self.group = group
        self.memory = memory
        self.keys = [room(shape, shape.key_dim) for shape in layers]
        self.values = [room(shape, shape.value_dim) for shape in layers]
        self.copies = copies([*self.keys, *self.values])
        self.key_slots = [room.flatten(0, 1) for room in self.keys]
        self.value_slots = [room.flatten(0, 1) for room in self.values]
        self._gathered = [torch.empty(0, dtype=dtype, device=device) for _ in range(2)]

    @property
    def tokens(self) -> int:
        """Return the capacity in tokens."""
        return self.pages * self.page_size

    @property
    def end(self) -> int:
        """Return the number of the last page that has memory."""
        return self._ends[-1]

    @property
    def extra_bytes(self) -> int:
        """Return the bytes of the pages after the first `pages`."""
        return self._bytes(self.end) - self._bytes(self.pages)

    def pages_with(self, extra_bytes: int) -> int:
        """Return the number of pages that fit in the memory of the first `pages` plus `extra_bytes`."""
        if not (self._rooms and extra_bytes):
            return self.pages
        fit = self._bytes(self.pages) + extra_bytes
        return self.pages + bisect_right(range(self.pages + 1, self._most + 1), fit, key=self._bytes)

    def end_within(self, pages: int) -> int:
        """Return the largest page number, at most `pages`, at which a part ends: where `resize` can cut."""
        return max(end for end in self._ends if end <= pages)

    def resize(self, pages: int) -> None:
        """Resize to `pages` pages: grow by a new part, or shrink to the end of an earlier part.

        New pages are zeros. Removed pages must not be in use. Raises NoMemory, with the size unchanged.
        """
        before = self.end
        self._wait()
        try:
            for room, row_bytes in self._rooms:
                room.resize((pages + 1) * row_bytes)
        except NoMemory:
            for room, row_bytes in self._rooms:
                room.resize((before + 1) * row_bytes)
            raise
        self._ends = [end for end in self._ends if end < pages] + [pages]
        for each in (*self.keys, *self.values):
            each[before + 1 : pages + 1].zero_()
        self._wait()

    def _bytes(self, pages: int) -> int:
        return sum(whole((pages + 1) * row_bytes, room) for room, row_bytes in self._rooms)

    def _wait(self) -> None:
        """Wait until the device has finished all queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def is_whole(self) -> bool:
        """Whether all heads are in this cache, so that another engine can continue from a copy."""
        return self.group is None

    def buffers(self, layer: int, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return buffers for the keys and values of gathered pages, `[pages, page, kv_heads, dim]`.

        The next call reuses the memory: allocating would cost more than the copy.
        """
        return self._buffer(0, self.keys[layer], pages), self._buffer(1, self.values[layer], pages)

    def _buffer(self, which: int, room: torch.Tensor, pages: int) -> torch.Tensor:
        need = pages * room[0].numel()
        if self._gathered[which].numel() < need:
            self._gathered[which] = torch.empty(need + need // 4, dtype=room.dtype, device=room.device)
        return self._gathered[which][:need].view(pages, *room.shape[1:])

    def copy_in(self, kept: torch.Tensor, pages: list[int]) -> None:
        """Copy packed pages, `[pages, bytes of a page]`, into `pages`."""
        self.copies.unpack(kept, self.index(pages))

    def write_virtual(self, request: Request, first: int) -> None:
        """Write the keys and values of a request's virtual tokens into its pages, from index `first` on."""
        variant: Any = request.variant
        kept: Sequence[torch.Tensor] = variant.virtual
        size, pages = self.page_size, request.pages
        places = [pages[at // size] * size + at % size for at in range(first, request.virtual_tokens)]
        index = self.index(places)
        for room, one in zip((*self.key_slots, *self.value_slots), kept, strict=True):
            room.index_copy_(0, index, one[first:])

    def index(self, pages: Sequence[int]) -> torch.Tensor:
        """Return page numbers as an index tensor, without waiting for the device."""
        return to_device(np.array(pages, dtype=np.int64), self.device)

    def fill(self, pages: list[int], number: float) -> None:
        index = self.index(pages)
        with nullcontext() if self.group is None else self.group.step(Fill(pages, number)):
            for room in (*self.keys, *self.values):
                room.index_fill_(0, index, number)

    def zero_pages(self, pages: list[int]) -> None:
        """Clear pages that a failed iteration wrote: masked slots are multiplied by 0 and must be finite."""
        if pages:
            self.fill(pages, 0.0)


class Poison:
    """Debug mode of a page pool: fills freed pages with NaN, so that any read of them shows in the output."""

    def __init__(self, kv_cache: KVCache) -> None:
        self._kv_cache = kv_cache

    def taken(self, pages: list[int]) -> None:
        if pages:
            self._kv_cache.fill(pages, 0.0)

    def freed(self, pages: list[int]) -> None:
        self._kv_cache.fill(pages, float("nan"))


def affordable_tokens(
    layers: Sequence[LayerShape], dtype: torch.dtype, device: torch.device, step_bytes: int
) -> int:
    """Return the tokens that fit in a GPU's free memory beyond an iteration's needs, or in a quarter of the
    host's free memory.
    """
    if device.type == "cuda":
        room = kv_room(torch.cuda.mem_get_info(device)[0], step_bytes)
    else:
        room = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    return room // (numbers_per_token(layers) * int(dtype.itemsize))


def numbers_per_token(layers: Sequence[LayerShape]) -> int:
    return sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in layers)


def memory_bytes(device: torch.device) -> int:
    """Return the total memory of a GPU, or of the host, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
