"""Memory shared by processes of this host, identified by a file descriptor."""

from __future__ import annotations

import mmap
import os
from typing import Protocol

import torch


class SharedMemory(Protocol):
    """Creates and maps shared memory of one device."""

    def create(self, size_bytes: int) -> tuple[int, torch.Tensor]:
        """Allocate zeroed memory; return its descriptor and bytes. Raises NoMemory."""

    def open(self, descriptor: int, size_bytes: int) -> torch.Tensor:
        """Map memory that another process has created, on any device; close the descriptor."""

    def close(self, memory: torch.Tensor) -> None:
        """Unmap opened memory, which must no longer be used."""


class SharedHostMemory:
    """Creates and maps shared memory of the host."""

    def create(self, size_bytes: int) -> tuple[int, torch.Tensor]:
        descriptor = os.memfd_create("mico")
        os.ftruncate(descriptor, size_bytes)
        return descriptor, _mapped(descriptor, size_bytes)

    def open(self, descriptor: int, size_bytes: int) -> torch.Tensor:
        try:
            return _mapped(descriptor, size_bytes)
        finally:
            os.close(descriptor)

    def close(self, memory: torch.Tensor) -> None:
        """Do nothing: the memory is freed with the last tensor that uses it."""


def _mapped(descriptor: int, size_bytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=torch.uint8)
