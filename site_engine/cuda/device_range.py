"""Reserve device addresses whose physical memory can be released and mapped again.

Uses the CUDA driver's virtual memory: tensors, and graphs captured on them, stay valid as long as physical
memory is mapped at their addresses when they are used.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from site_engine.cuda.borrowed import BorrowedMemory
from site_engine.errors import NoMemory
from site_engine.model.sleep_memory import whole

ALIGNMENT = 512
TOUCHING_THREADS = 8
TOUCHED_BYTES = 1 << 28
_OUT_OF_MEMORY = 2
_PINNED = _DEVICE = _DESCRIPTOR = 1
_READ_WRITE = 3


class _Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int),
        ("shareable_as", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_size, _address, _memory = ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint64
_CALLS = {
    "cuMemGetAllocationGranularity": (ctypes.POINTER(_size), ctypes.POINTER(_Properties), ctypes.c_int),
    "cuMemAddressReserve": (ctypes.POINTER(_address), _size, _size, _address, ctypes.c_uint64),
    "cuMemAddressFree": (_address, _size),
    "cuMemCreate": (ctypes.POINTER(_memory), _size, ctypes.POINTER(_Properties), ctypes.c_uint64),
    "cuMemRelease": (_memory,),
    "cuMemMap": (_address, _size, _size, _memory, ctypes.c_uint64),
    "cuMemUnmap": (_address, _size),
    "cuMemSetAccess": (_address, _size, ctypes.POINTER(_Access), _size),
    "cuMemExportToShareableHandle": (ctypes.POINTER(ctypes.c_int), _memory, ctypes.c_int, ctypes.c_uint64),
    "cuMemImportFromShareableHandle": (ctypes.POINTER(_memory), ctypes.c_void_p, ctypes.c_int),
}


class _Part(NamedTuple):
    """A byte range with an allocation of its own. Parts are adjacent."""

    begin: int
    size: int


class Driver:
    """The driver's calls for memory of one device. They raise NoMemory if the device is out of memory."""

    def __init__(
        self, device: torch.device, neighbour: torch.device | None = None, *, shared: bool = False
    ) -> None:
        """`neighbour` is another device that copies from and to the memory. With `shared`, memory can be
        exported to other processes.
        """
        self._library = ctypes.CDLL("libcuda.so.1")
        for name, types in _CALLS.items():
            getattr(self._library, name).argtypes = types
        self._device = device
        torch.zeros(1, device=device)  # creates the CUDA context
        location = _Location(_DEVICE, torch.cuda.current_device() if device.index is None else device.index)
        self._properties = _Properties(_PINNED, _DESCRIPTOR if shared else 0, location)
        where = [location, *([] if neighbour is None else [_Location(_DEVICE, neighbour.index)])]
        self._access = (_Access * len(where))(*(_Access(each, _READ_WRITE) for each in where))
        granularity = _size()
        self._call("cuMemGetAllocationGranularity", granularity, self._properties, 0)
        self.granularity = granularity.value
        self.total_bytes = int(torch.cuda.get_device_properties(device).total_memory)

    def reserve(self, size_bytes: int) -> int:
        """Reserve a range of `size_bytes` addresses and return the first."""
        address = _address()
        self._call("cuMemAddressReserve", address, size_bytes, 0, 0, 0)
        return int(address.value)

    def create(self, size_bytes: int) -> int:
        """Allocate physical memory without an address and return its handle."""
        memory = _memory()
        try:
            self._call("cuMemCreate", memory, size_bytes, self._properties, 0)
        except NoMemory:
            torch.cuda.empty_cache()  # free PyTorch's cached memory
            self._call("cuMemCreate", memory, size_bytes, self._properties, 0)
        return int(memory.value)

    def map(self, address: int, size_bytes: int, memory: int) -> None:
        self._call("cuMemMap", address, size_bytes, 0, memory, 0)
        self._call("cuMemSetAccess", address, size_bytes, self._access, len(self._access))

    def unmap(self, address: int, size_bytes: int) -> None:
        self._call("cuMemUnmap", address, size_bytes)

    def free(self, address: int, size_bytes: int) -> None:
        """Free a range of reserved addresses without mapped memory."""
        self._call("cuMemAddressFree", address, size_bytes)

    def release(self, memory: int) -> None:
        self._call("cuMemRelease", memory)

    def descriptor_of(self, memory: int) -> int:
        """Export memory as a file descriptor that another process can pass to `take_over`."""
        descriptor = ctypes.c_int()
        self._call("cuMemExportToShareableHandle", descriptor, memory, _DESCRIPTOR, 0)
        return int(descriptor.value)

    def take_over(self, descriptor: int) -> int:
        """Import memory of another process, of any device. Close the descriptor and return the handle.

        The memory is freed when both processes have released it.
        """
        memory = _memory()
        try:
            self._call("cuMemImportFromShareableHandle", memory, descriptor, _DESCRIPTOR)
        finally:
            os.close(descriptor)
        return int(memory.value)

    def bytes_at(self, address: int, size_bytes: int) -> torch.Tensor:
        return torch.as_tensor(BorrowedMemory(address, size_bytes), device=self._device)

    def _call(self, name: str, *given: object) -> None:
        status = getattr(self._library, name)(*given)
        if status == _OUT_OF_MEMORY:
            free_bytes, _ = torch.cuda.mem_get_info(self._device)
            raise NoMemory(f"{self._device} has {free_bytes} bytes free, which is too little")
        if status:
            raise RuntimeError(f"{name} failed with {status}")


class DeviceRange:
    """An `AddressRange` of a GPU, as large as its memory. Memory is taken from the front."""

    def __init__(self, driver: Driver, neighbour: torch.device | None = None) -> None:
        """`neighbour` is the GPU that holds the copies, instead of the host."""
        self._driver = driver
        self._neighbour = neighbour
        self.copies_in_host = neighbour is None
        self._capacity_bytes = whole(driver.total_bytes, driver)
        self._address = driver.reserve(self._capacity_bytes)
        self._parts: list[_Part] = []
        self._memory: list[int] = []  # the handles of the mapped parts, which are the first
        self._taken_bytes = 0

    @property
    def mapped_bytes(self) -> int:
        return sum(part.size for part in self._parts[: len(self._memory)])

    def take(self, size_bytes: int) -> torch.Tensor:
        begin = -(-self._taken_bytes // ALIGNMENT) * ALIGNMENT
        has = self.mapped_bytes
        if begin + size_bytes > has:
            part = _Part(has, whole(begin + size_bytes - has, self._driver))
            if part.begin + part.size > self._capacity_bytes:
                raise NoMemory(f"{begin + size_bytes} bytes are more than the device has")
            self._map([part])
            self._parts.append(part)
        self._taken_bytes = begin + size_bytes
        return self._driver.bytes_at(self._address + begin, size_bytes)

    def taken(self) -> Iterator[torch.Tensor]:
        if self._taken_bytes:
            yield self._driver.bytes_at(self._address, self._taken_bytes)

    def room_for_copy(self, size_bytes: int) -> torch.Tensor:
        """Return memory on the neighbour, or pinned host memory, whose pages several threads touch first.

        PyTorch's own pinned memory takes longer to allocate and up to twice the memory. Raises NoMemory.
        """
        if self._neighbour is not None:
            try:
                return torch.empty(size_bytes, dtype=torch.uint8, device=self._neighbour)
            except torch.OutOfMemoryError as exc:
                raise NoMemory(f"the neighbour has no {size_bytes} bytes free for the weights") from exc
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        found = torch.frombuffer(memory, dtype=torch.uint8)
        with ThreadPoolExecutor(TOUCHING_THREADS) as threads:
            list(threads.map(torch.Tensor.zero_, found.split(TOUCHED_BYTES)))
        status = torch.cuda.cudart().cudaHostRegister(found.data_ptr(), size_bytes, 0)
        if status != torch.cuda.cudart().cudaError.success:
            raise NoMemory(f"{size_bytes} bytes of host memory cannot be pinned: {status}")
        return found

    def unmap(self) -> None:
        if self._memory:
            self._driver.unmap(self._address, self.mapped_bytes)
            self._release(self._memory)
            self._memory = []

    def map(self) -> None:
        self._map(self._parts)

    def _map(self, parts: Sequence[_Part]) -> None:
        got: list[int] = []
        try:
            for part in parts:
                got.append(self._driver.create(part.size))
        except NoMemory:
            self._release(got)
            raise
        for part, memory in zip(parts, got, strict=True):
            self._driver.map(self._address + part.begin, part.size, memory)
        self._memory += got

    def _release(self, memory: Sequence[int]) -> None:
        for each in memory:
            self._driver.release(each)


class DeviceRoom:
    """A `Room` of a GPU."""

    def __init__(self, driver: Driver, max_bytes: int) -> None:
        self._driver = driver
        self.granularity = driver.granularity
        self._max_bytes = whole(max_bytes, driver)
        self._address = driver.reserve(self._max_bytes)
        self._parts: list[tuple[_Part, int]] = []  # with the handles of their memory

    @property
    def mapped_bytes(self) -> int:
        return sum(part.size for part, _ in self._parts)

    @property
    def bytes(self) -> torch.Tensor:
        return self._driver.bytes_at(self._address, self._max_bytes)

    def resize(self, size_bytes: int) -> None:
        wanted = whole(size_bytes, self)
        while self.mapped_bytes > wanted:
            part, memory = self._parts.pop()
            self._driver.unmap(self._address + part.begin, part.size)
            self._driver.release(memory)
        begin = self.mapped_bytes
        if begin < wanted:
            part = _Part(begin, wanted - begin)
            memory = self._driver.create(part.size)
            self._driver.map(self._address + begin, part.size, memory)
            self._parts.append((part, memory))
