"""Bounds the memory of all tenants together, and keeps room for others beside the largest tenant."""

from __future__ import annotations

from typing import Self

TENANT_PARTS = 4
"""A tenant may use at most this many times the free amount. A single tenant gets four fifths of the total, so
that others always find room (Choudhury and Hahne, Dynamic queue length thresholds for shared-memory packet
switches, 1998).
"""


class MemoryBudget:
    """Counts the bytes in use, in total and by tenant."""

    def __init__(self, max_bytes: int) -> None:
        self.used_bytes = 0
        self._max_bytes = max_bytes
        self._of_tenants: dict[str, int] = {}

    def hold(self, tenant: str) -> Hold:
        return Hold(self, tenant)

    def take(self, tenant: str, count: int) -> bool:
        own, used = self._of_tenants.get(tenant, 0) + count, self.used_bytes + count
        if own > TENANT_PARTS * (self._max_bytes - used):
            return False
        self.used_bytes, self._of_tenants[tenant] = used, own
        return True

    def give_back(self, tenant: str, count: int) -> None:
        self.used_bytes -= count
        left = self._of_tenants.pop(tenant, 0) - count
        if left:
            self._of_tenants[tenant] = left


class Hold:
    """The bytes that one piece of work holds. A context manager: the bytes are returned at its end."""

    __slots__ = ("_budget", "_bytes", "_tenant")

    def __init__(self, budget: MemoryBudget, tenant: str) -> None:
        self._budget, self._tenant, self._bytes = budget, tenant, 0

    def take(self, count: int) -> bool:
        """Take `count` more bytes. Return False if they do not fit."""
        if not self._budget.take(self._tenant, count):
            return False
        self._bytes += count
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.give_back(self._tenant, self._bytes)
