"""Divide the memory of a base that sleeps among the engines that are awake on its device. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Lease:
    """Of one engine: the bytes that it was told last, and the most that it may still hold of earlier ones."""

    allowed_bytes: int = 0
    held_bytes: int = 0

    @property
    def most_bytes(self) -> int:
        return max(self.allowed_bytes, self.held_bytes)

    def confirm(self, size_bytes: int) -> None:
        """Note that the engine holds no more than what it was told once."""
        if size_bytes == self.allowed_bytes:
            self.held_bytes = size_bytes


def divide(size_bytes: int, leases: Collection[Lease]) -> list[Lease]:
    """Allow each an equal part of the memory, or what of it others do not hold any more; return what changed.

    To be called again whenever one has confirmed, has come or has gone: together they never hold more.
    """
    before = [each.allowed_bytes for each in leases]
    part = size_bytes // max(1, len(leases))
    for each in leases:
        if each.allowed_bytes > part:
            each.held_bytes = each.most_bytes
            each.allowed_bytes = part
    free_bytes = size_bytes - sum(each.most_bytes for each in leases)
    for each in leases:
        more = min(part - each.most_bytes, free_bytes)
        if more > 0 and each.allowed_bytes == each.most_bytes:
            each.allowed_bytes += more
            free_bytes -= more
    return [each for each, was in zip(leases, before, strict=True) if each.allowed_bytes != was]
