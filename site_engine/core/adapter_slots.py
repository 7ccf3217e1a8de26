"""Assign slots on the device to adapters: each rank class has a fixed number of slots.

Does not hold tensors. An adapter keeps its slot while requests of it run, and after them until another needs
the slot: the adapter that was used least recently makes room. All adapters also lie in host memory. Requests
of adapters that have a slot, or of another class, start while others wait for one. When the first of those
that wait has waited for long, no more requests start with the adapter that fewest run with, but for those
that waited for that adapter when it got its slot.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from weakref import WeakSet

from site_engine.core.chain import ServedVariant
from site_engine.core.request import Request

RANK_CLASSES = (8, 16, 32, 64)
PATIENCE_S = 1.0
"""Time that a request waits for a slot before an adapter is kept from running on for ever."""


class AdapterSlots:
    """`slots` slots in each rank class. `place` copies an adapter into a slot, before the next step."""

    def __init__(
        self,
        slots: int,
        place: Callable[[ServedVariant, int], None] = lambda variant, slot: None,
        classes: Sequence[int] = RANK_CLASSES,
    ) -> None:
        if slots < 1:
            raise ValueError(f"adapters need at least one slot, got {slots}")
        self._place = place
        self._classes = classes
        self._free = {size: list(range(slots - 1, -1, -1)) for size in classes}
        self._slots: dict[ServedVariant, int] = {}
        self._held: dict[ServedVariant, int] = {}  # running requests
        self._expected: dict[ServedVariant, int] = {}  # requests still to come of those it was placed for
        self._idle: dict[int, OrderedDict[ServedVariant, None]] = {size: OrderedDict() for size in classes}
        self._forgotten: WeakSet[ServedVariant] = WeakSet()

    def _class(self, variant: ServedVariant) -> int:
        """Return the least class that has room for the rank. Raises ValueError beyond the last."""
        for size in self._classes:
            if variant.rank <= size:
                return size
        raise ValueError(f"rank {variant.rank} is beyond {self._classes[-1]}")

    @property
    def resident(self) -> frozenset[str]:
        """Fingerprints of the adapters that have a slot."""
        return frozenset(each.fingerprint for each in self._slots)

    def fits(self, request: Request) -> bool:
        """Return whether the adapter of a request has a slot, or can have one now."""
        variant = request.variant
        if variant is None or not request.has_adapter or variant in self._slots:
            return True
        size = self._class(variant)
        return bool(self._free[size] or self._idle[size])

    def may_overtake(self, first: Request, now: float) -> Callable[[Request], bool]:
        """Return which requests may start while `first`, which does not fit, waits for a slot.

        They need no slot of its class, or are of no lower lane and their adapter has a slot that is not to
        become free.
        """
        assert first.variant is not None
        closed = self._closed_for(first) if now - first.arrived_s > PATIENCE_S else None
        size = self._class(first.variant)

        def may(request: Request) -> bool:
            variant = request.variant
            if variant is None or not request.has_adapter or self._class(variant) != size:
                return True
            if request.lane > first.lane or variant not in self._slots:
                return False
            return variant is not closed or self._expected[variant] > 0

        return may

    def share_slots(self, one: Request, other: Request) -> bool:
        """Return whether two requests need slots of the same class."""
        if one.variant is None or other.variant is None or not (one.has_adapter and other.has_adapter):
            return False
        return self._class(one.variant) == self._class(other.variant)

    def _closed_for(self, first: Request) -> ServedVariant:
        """Return the adapter of the rank class that fewest requests run with; all its slots are held."""
        assert first.variant is not None
        size = self._class(first.variant)
        return min((each for each in self._held if self._class(each) == size), key=self._held.__getitem__)

    def hold(self, request: Request, waiting: Iterable[Request], rows: int) -> None:
        """Hold the slot of a request that starts and fits; its adapter gets a slot if it has none.

        A new slot is also for the `waiting` requests of the adapter, for as many as there are `rows`.
        """
        variant = request.variant
        if variant is None or not request.has_adapter:
            return
        size = self._class(variant)
        if variant not in self._slots:
            if not self._free[size]:
                evicted, _ = self._idle[size].popitem(last=False)
                self._vacate(evicted, size)
            slot = self._free[size].pop()
            self._place(variant, slot)
            self._slots[variant] = slot
            self._expected[variant] = min(rows, sum(each.variant is variant for each in waiting))
        else:
            self._expected[variant] = max(0, self._expected[variant] - 1)
        self._idle[size].pop(variant, None)
        self._held[variant] = self._held.get(variant, 0) + 1

    def leave(self, request: Request) -> None:
        """Give back the hold of a request that stops running."""
        variant = request.variant
        if variant is None or not request.has_adapter:
            return
        self._held[variant] -= 1
        if not self._held[variant]:
            del self._held[variant]
            self._idle[self._class(variant)][variant] = None
            if variant in self._forgotten:
                self.forget(variant)

    def forget(self, variant: ServedVariant) -> None:
        """Free the slot of a removed variant, of which nothing more starts, once nothing of it runs."""
        self._forgotten.add(variant)
        if variant in self._slots and variant not in self._held:
            size = self._class(variant)
            del self._idle[size][variant]
            self._vacate(variant, size)

    def _vacate(self, variant: ServedVariant, size: int) -> None:
        del self._expected[variant]
        self._free[size].append(self._slots.pop(variant))
