"""Divide the memory of a sleeping base among the awake engines on its device. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Lease:
    """The memory that one engine may use: the bytes last allowed, and those it may still hold from before.

    When the allowance shrinks, the engine may hold the old size until it confirms the new one.
    """

    allowed_bytes: int = 0
    held_bytes: int = 0

    @property
    def max_bytes(self) -> int:
        """Return the most that the engine can hold now."""
        return max(self.allowed_bytes, self.held_bytes)

    def confirm(self, size_bytes: int) -> None:
        """Record that the engine holds at most `size_bytes`. Ignored unless that is the last allowed size."""
        if size_bytes == self.allowed_bytes:
            self.held_bytes = size_bytes


def divide(size_bytes: int, leases: Collection[Lease]) -> list[Lease]:
    """Allow each engine an equal part of the memory, limited to what others no longer hold.

    Returns the leases whose allowance changed. Call again whenever an engine has confirmed, was added or was
    removed. The sum of `max_bytes` never exceeds `size_bytes`.
    """
    before = [each.allowed_bytes for each in leases]
    part = size_bytes // max(1, len(leases))
    for each in leases:
        if each.allowed_bytes > part:
            each.held_bytes = each.max_bytes
            each.allowed_bytes = part
    free_bytes = size_bytes - sum(each.max_bytes for each in leases)
    for each in leases:
        more = min(part - each.max_bytes, free_bytes)
        if more > 0 and each.allowed_bytes == each.max_bytes:
            each.allowed_bytes += more
            free_bytes -= more
    return [each for each, was in zip(leases, before, strict=True) if each.allowed_bytes != was]
