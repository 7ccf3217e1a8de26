"""Share GPU memory between processes, each of which may see only its own GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch

from site_engine.cuda.device_range import Driver
from site_engine.model.shared_memory import SharedHostMemory, SharedMemory
from site_engine.model.tensor_group import TensorGroup


class _Mapped(NamedTuple):
    """The driver's handle of mapped memory, and its size."""

    memory: int
    size_bytes: int


class SharedDeviceMemory:
    """Share memory through the driver's virtual memory, identified by a file descriptor in any process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._driver = Driver(device, shared=True)
        self._mapped: dict[int, _Mapped] = {}  # by address

    def create(self, size_bytes: int) -> tuple[int, torch.Tensor]:
        memory = self._driver.create(self._rounded(size_bytes))
        found = self._map(memory, size_bytes).zero_()
        torch.cuda.synchronize(self._device)
        return self._driver.descriptor_of(memory), found

    def open(self, descriptor: int, size_bytes: int) -> torch.Tensor:
        return self._map(self._driver.take_over(descriptor), size_bytes)

    def close(self, memory: torch.Tensor) -> None:
        torch.cuda.synchronize(self._device)
        address = memory.data_ptr()
        name, size_bytes = self._mapped.pop(address)
        self._driver.unmap(address, size_bytes)
        self._driver.release(name)
        self._driver.free(address, size_bytes)

    def _map(self, memory: int, size_bytes: int) -> torch.Tensor:
        rounded = self._rounded(size_bytes)
        address = self._driver.reserve(rounded)
        self._driver.map(address, rounded, memory)
        self._mapped[address] = _Mapped(memory, rounded)
        return self._driver.bytes_at(address, size_bytes)

    def _rounded(self, size_bytes: int) -> int:
        granularity = self._driver.granularity
        return -(-size_bytes // granularity) * granularity


def shared_memory(device: torch.device) -> SharedMemory:
    """Return the implementation of shared memory for a device."""
    return SharedDeviceMemory(device) if device.type == "cuda" else SharedHostMemory()


def memory_of_ranks(group: TensorGroup, size_bytes: int, device: torch.device) -> list[torch.Tensor]:
    """Return zeroed memory on every rank's device, in rank order, that all ranks can read and write."""
    memory = shared_memory(device)
    descriptor, own = memory.create(size_bytes)
    return [
        own if rank == group.rank else memory.open(its, size_bytes)
        for rank, its in enumerate(group.exchange(descriptor))
    ]
