"""Assign slots on the device to adapters: each rank class has a fixed number of slots.

Holds no tensors. All adapters are also in host memory. An adapter keeps its slot while its requests run, and
afterwards until another adapter needs the slot; the least recently used adapter is evicted. While a request
waits for a slot, requests of adapters with a slot or of another rank class may start. Once it has waited for
PATIENCE_S, the adapter with the fewest running requests is closed: only as many of its requests still start
as waited for the adapter when it got its slot.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from weakref import WeakSet

from site_engine.core.chain import ServedVariant
from site_engine.core.request import Request

RANK_CLASSES = (8, 16, 32, 64)
PATIENCE_S = 1.0
"""Seconds that a request waits for a slot before an adapter in use is closed to new requests."""


class AdapterSlots:
    """Manages `slots` slots in each rank class. `place(variant, slot)` copies an adapter into a slot before
    the next step.
    """

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
        self._expected: dict[ServedVariant, int] = {}  # requests to start of those the slot was filled for
        self._idle: dict[int, OrderedDict[ServedVariant, None]] = {size: OrderedDict() for size in classes}
        self._forgotten: WeakSet[ServedVariant] = WeakSet()

    def _class(self, variant: ServedVariant) -> int:
        """Return the smallest class that holds the variant's rank. Raises ValueError if none does."""
        for size in self._classes:
            if variant.rank <= size:
                return size
        raise ValueError(f"rank {variant.rank} is beyond {self._classes[-1]}")

    @property
    def resident(self) -> frozenset[str]:
        """Fingerprints of the adapters that have a slot."""
        return frozenset(each.fingerprint for each in self._slots)

    def fits(self, request: Request) -> bool:
        """Return whether the adapter of a request has a slot or can get one now; True without an adapter."""
        variant = request.variant
        if variant is None or not request.has_adapter or variant in self._slots:
            return True
        size = self._class(variant)
        return bool(self._free[size] or self._idle[size])

    def may_overtake(self, first: Request, now: float) -> Callable[[Request], bool]:
        """Return a predicate: whether a request may start while `first` waits for a slot.

        A request may if it needs no slot of the same class, or if its lane is not lower and its adapter has a
        slot that is not closed.
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
        """Return the adapter to close: the one in the rank class with the fewest running requests.

        All slots of the class are held.
        """
        assert first.variant is not None
        size = self._class(first.variant)
        return min((each for each in self._held if self._class(each) == size), key=self._held.__getitem__)

    def hold(self, request: Request, waiting: Iterable[Request], rows: int) -> None:
        """Hold a slot for a request that starts and fits; place its adapter if it has no slot yet.

        A newly placed adapter is expected to serve its `waiting` requests too, at most `rows` in all.
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
        """Release the slot hold of a request that stops running."""
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
        """Free the slot of a removed variant once none of its requests runs; no more will start."""
        self._forgotten.add(variant)
        if variant in self._slots and variant not in self._held:
            size = self._class(variant)
            del self._idle[size][variant]
            self._vacate(variant, size)

    def _vacate(self, variant: ServedVariant, size: int) -> None:
        del self._expected[variant]
        self._free[size].append(self._slots.pop(variant))
