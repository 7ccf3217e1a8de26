"""Memory that several processes of this host have, by a file descriptor that stands for it."""

from __future__ import annotations

import mmap
import os
from typing import Protocol

import torch


class SharedMemory(Protocol):
    """Creates and maps shared memory of one device."""

    def create(self, size_bytes: int) -> tuple[int, torch.Tensor]:
        """Return a descriptor of zeros, and their bytes. Raises NoMemory."""

    def open(self, descriptor: int, size_bytes: int) -> torch.Tensor:
        """Return the bytes of what another process has created, of any device; close the descriptor."""

    def close(self, memory: torch.Tensor) -> None:
        """Give up bytes that were opened, which nothing may use any more."""


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
        """Do nothing: the memory goes with the last tensor that uses it."""


def _mapped(descriptor: int, size_bytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=torch.uint8)
