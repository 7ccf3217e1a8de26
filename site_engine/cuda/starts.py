"""How many requests may start in the next iteration, so that the device is neither idle nor badly filled.

Does not choose whom: the scheduler does.
"""

from __future__ import annotations

MOST_NEW = 32  # starting more takes the host longer than the device computes
BUNCH_PART = 16  # of the slots, one in so many makes a bunch
HELD_STEPS = 4


class Starts:
    """While more wait than can start, they start in bunches: a step that carries a few prompt tokens beside
    its rows costs nearly as much as one that carries many. Who is held waits a few steps longer, in a queue.
    """

    def __init__(self, slots: int) -> None:
        self._bunch = slots // BUNCH_PART
        self._held = 0

    def most(self, waiting: int, free_slots: int) -> int:
        """Called once an iteration."""
        if 0 < free_slots < min(self._bunch, waiting) and self._held < HELD_STEPS:
            self._held += 1
            return 0
        self._held = 0
        return MOST_NEW
