"""Reusable pinned host memory for copies to and from the device. Allocating pinned memory is slow."""

from __future__ import annotations

import torch

MOST_PARTS = 512
"""Maximum number of views that a buffer caches by size. Creating a view takes longer than a lookup."""


class HostBuffers:
    """Pinned buffers of int32 numbers, reused round-robin.

    A buffer is returned again after IN_TURN calls. By then the engine has waited for the step that used it,
    since at most one step is launched before the previous one is read.
    """

    IN_TURN = 4

    def __init__(self, size: int, *, pinned: bool) -> None:
        self._size, self._pinned = size, pinned
        self._buffers = [self._new(size) for _ in range(self.IN_TURN)]
        self._parts: list[dict[int, torch.Tensor]] = [{} for _ in range(self.IN_TURN)]
        self._next = 0

    def take(self, size: int) -> torch.Tensor:
        """Return memory for `size` numbers with any contents; more than usual are allocated anew."""
        if size > self._size:
            return self._new(size)
        self._next = (self._next + 1) % self.IN_TURN
        parts = self._parts[self._next]
        part = parts.get(size)
        if part is None:
            if len(parts) == MOST_PARTS:
                parts.clear()
            part = parts[size] = self._buffers[self._next][:size]
        return part

    def _new(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, pin_memory=self._pinned)


class StepBuffers:
    """Pinned buffers for the rules of one step at a time. The next step reuses them.

    A step's buffers are filled after the previous step has been read, so all copies of that step are done.
    """

    def __init__(self, size: int, dtype: torch.dtype, *, pinned: bool) -> None:
        self._size, self._dtype, self._pinned = size, dtype, pinned
        self._buffers: list[torch.Tensor] = []
        self._taken = 0

    def begin(self) -> None:
        """Begin a step. All buffers returned before become reusable."""
        self._taken = 0

    def take(self, size: int) -> torch.Tensor:
        """Return memory for `size` numbers with any contents; more than usual are allocated anew."""
        if size > self._size:
            return self._new(size)
        if self._taken == len(self._buffers):
            self._buffers.append(self._new(self._size))
        self._taken += 1
        return self._buffers[self._taken - 1][:size]

    def _new(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=self._dtype, pin_memory=self._pinned)
