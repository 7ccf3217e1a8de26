"""The memory that an engine can free while its base sleeps: weights, and pages of keys and values.

The addresses are kept, so that tensors and the CUDA graphs captured on them are valid again after sleep.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Protocol

import torch

from site_engine.errors import NoMemory

MEMORY_OF_HOST = Path("/proc/meminfo")


class AddressRange(Protocol):
    """A range of addresses. Allocated bytes have memory initially and again after each `map`."""

    copies_in_host: bool
    """Whether copies are in host memory. Otherwise they use another GPU's memory, at its engines' expense."""

    @property
    def mapped_bytes(self) -> int: ...

    def take(self, size_bytes: int) -> torch.Tensor:
        """Allocate bytes at an address aligned for tensors of any type. Raises NoMemory."""

    def taken(self) -> Iterator[torch.Tensor]:
        """Yield all allocated bytes, in the same pieces each time."""

    def room_for_copy(self, size_bytes: int) -> torch.Tensor:
        """Return memory with fast copies to and from these addresses. Raises NoMemory."""

    def unmap(self) -> None:
        """Free the memory. Nothing may use the addresses until `map`."""

    def map(self) -> None:
        """Map memory with undefined contents. Raises NoMemory, and then nothing is mapped."""


class Room(Protocol):
    """A range of addresses whose front has memory, in parts that are mapped and unmapped as a whole."""

    @property
    def granularity(self) -> int:
        """Return the unit of mapping, in bytes."""

    @property
    def mapped_bytes(self) -> int: ...

    @property
    def bytes(self) -> torch.Tensor:
        """Return the bytes of all addresses. Bytes without memory must not be used."""

    def resize(self, size_bytes: int) -> None:
        """Map `size_bytes` bytes at the front, rounded up. The contents of new bytes, and of a part that is
        not kept whole, are undefined. Raises NoMemory; parts that are kept whole then stay mapped.
        """


class HostRange:
    """An `AddressRange` of host memory."""

    copies_in_host = True

    def __init__(self) -> None:
        self._maps: list[mmap.mmap] = []
        self._is_mapped = True

    @property
    def mapped_bytes(self) -> int:
        return sum(map(len, self._maps)) if self._is_mapped else 0

    def take(self, size_bytes: int) -> torch.Tensor:
        self._maps.append(mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        return torch.frombuffer(self._maps[-1], dtype=torch.uint8)[:size_bytes]

    def taken(self) -> Iterator[torch.Tensor]:
        for each in self._maps:
            yield torch.frombuffer(each, dtype=torch.uint8)

    def room_for_copy(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def unmap(self) -> None:
        for each in self._maps:
            each.madvise(mmap.MADV_DONTNEED)
        self._is_mapped = False

    def map(self) -> None:
        self._is_mapped = True


class HostRoom:
    """A `Room` of host memory."""

    granularity = mmap.PAGESIZE

    def __init__(self, max_bytes: int) -> None:
        self._memory = mmap.mmap(-1, whole(max_bytes, self), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.mapped_bytes = 0

    @property
    def bytes(self) -> torch.Tensor:
        return torch.frombuffer(self._memory, dtype=torch.uint8)

    def resize(self, size_bytes: int) -> None:
        before, self.mapped_bytes = self.mapped_bytes, whole(size_bytes, self)
        if self.mapped_bytes < before:
            self._memory.madvise(mmap.MADV_DONTNEED, self.mapped_bytes, before - self.mapped_bytes)


class Granular(Protocol):
    @property
    def granularity(self) -> int: ...


def whole(size_bytes: int, memory: Granular) -> int:
    """Return a size rounded up to a multiple of the memory's granularity."""
    return -(-size_bytes // memory.granularity) * memory.granularity


class SleepMemory:
    """Frees a device's memory for sleep. Kept tensors are copied to the host at the first sleep, or to
    another GPU at each sleep; rooms lose their contents.
    """

    def __init__(
        self,
        device: torch.device,
        make_range: Callable[[], AddressRange] = HostRange,
        make_room: Callable[[int], Room] | None = None,
    ) -> None:
        """`make_range` creates an address range of the device. With `make_room(max_bytes)`, each room of keys
        and values has its own addresses, so that it can grow.
        """
        self._device = device
        self._kept, self._rooms = make_range(), make_range()
        self._copies: list[torch.Tensor] = []
        self._make_room = make_room
        self._growing: dict[Room, int] = {}  # rooms that can grow, with their bytes after sleep

    @property
    def grows(self) -> bool:
        """Return whether rooms can grow."""
        return self._make_room is not None

    @property
    def shares(self) -> str:
        """Return the unique name of the device into whose memory rooms can grow; empty if they cannot."""
        if not self.grows:
            return ""
        if self._device.type == "cuda":
            return str(torch.cuda.get_device_properties(self._device).uuid)
        return str(self._device.type)

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Move constant tensors into this memory, in place. Tensors that share storage still share it.

        Raises NoMemory.
        """
        sharing: dict[int, list[torch.Tensor]] = {}
        for each in tensors:
            if each.nbytes:
                sharing.setdefault(each.untyped_storage().data_ptr(), []).append(each)
        while sharing:
            _, alike = sharing.popitem()
            storage = alike[0].untyped_storage()
            moved = self._kept.take(storage.nbytes())
            moved.copy_(torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage))
            for each in alike:
                bytes_of = moved[: len(moved) // each.dtype.itemsize * each.dtype.itemsize]
                place = each.size(), each.stride(), each.storage_offset()
                each.data = bytes_of.view(each.dtype).as_strided(*place)

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a tensor of zeros, which is zeroed again after sleep. Raises NoMemory."""
        return self._rooms.take(prod(shape) * dtype.itemsize).zero_().view(dtype).view(*shape)

    def growing_room(self, size_bytes: int, max_bytes: int) -> Room:
        """Return a room of zeros that its user can resize; after sleep it has `size_bytes` of zeros again.

        Raises NoMemory.
        """
        assert self._make_room is not None, "the rooms of this memory can grow"
        room = self._make_room(max_bytes)
        room.resize(size_bytes)
        room.bytes[:size_bytes].zero_()
        self._growing[room] = size_bytes
        return room

    def sleep(self) -> int:
        """Free the memory, which nothing may use until `wake`, and return the number of bytes freed.

        Raises NoMemory if there is no room for the copies; nothing has changed then.
        """
        if not self._copies:
            kept = list(self._kept.taken())
            if self._kept.copies_in_host:
                _check_host_memory(sum(piece.nbytes for piece in kept))
            copies = [self._kept.room_for_copy(piece.nbytes) for piece in kept]
            self._copies = [copy.copy_(piece) for copy, piece in zip(copies, kept, strict=True)]
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        freed = self._kept.mapped_bytes + self._rooms.mapped_bytes
        freed += sum(each.mapped_bytes for each in self._growing)
        self._unmap()
        return freed

    def wake(self) -> None:
        """Restore the kept tensors, and zero the rooms. Raises NoMemory, and then stays asleep."""
        try:
            self._kept.map()
            self._rooms.map()
            for each, size_bytes in self._growing.items():
                each.resize(size_bytes)
        except NoMemory:
            self._unmap()
            raise
        for piece, copy in zip(self._kept.taken(), self._copies, strict=True):
            piece.copy_(copy, non_blocking=True)
        grown = (each.bytes[:size_bytes] for each, size_bytes in self._growing.items())
        for room in (*self._rooms.taken(), *grown):
            room.zero_()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if not self._kept.copies_in_host:
            self._copies = []
            torch.cuda.empty_cache()

    def _unmap(self) -> None:
        self._kept.unmap()
        self._rooms.unmap()
        for each in self._growing:
            each.resize(0)


def _check_host_memory(size_bytes: int) -> None:
    """Raise NoMemory if the host reports less available memory than `size_bytes`."""
    try:
        found = dict(line.split(":") for line in MEMORY_OF_HOST.read_text().splitlines())
        free_bytes = int(found["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return
    if free_bytes < size_bytes:
        raise NoMemory(f"the copy of the weights has {size_bytes} bytes, and the host {free_bytes} free")
