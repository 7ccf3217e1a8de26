"""Alternate a loading thread with an engine's thread.

Both need the interpreter lock (GIL). A step of the engine releases the lock about ten times, and a thread
that computes in Python would take it and hold it for a while each time. So the loading thread stops at a call
of `pause` once its turn is over, and continues for a short time between two steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

TURN_S = 6e-4
"""Seconds of a turn after a short step; the device computes meanwhile."""
SHARE = 4
"""After a long wait a turn lasts for the wait divided by this, so that loads beside long steps finish."""
LONGER, KEPT_STEPS, MAX_WITHOUT = 1.4, 32, 4
"""After a step longer than LONGER times the mean of about KEPT_STEPS steps, no turn is given, since its
tokens are late already. After MAX_WITHOUT such steps without a turn, the next one is followed by a turn.
"""
LATE_S = 5e-3
"""Longest time that the engine's thread waits for the loading thread to pause."""
LONG_STEP_S = 0.1
"""The loading thread takes a turn by itself after waiting this long, as beside a long step."""

_here = threading.local()


class LoaderTurns:
    """Turns that an engine's thread gives to one loading thread."""

    def __init__(self) -> None:
        self._given, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._waits = self._holds = False  # whether the loading thread waits for a turn; holds a given turn
        self._idle = True
        self._until_s = 0.0
        self._began_s = 0.0  # when the current step began; 0 after idle time
        self._usual_s = 0.0  # mean duration of a step
        self._without = 0  # long steps since the last turn

    # ---- on the engine's thread

    def give(self) -> None:
        """Let the loading thread run for a turn after a step, if it waits for one."""
        self._idle = False
        was_long = self._was_long()
        if self._waits and (not was_long or self._without >= MAX_WITHOUT):
            self._without = 0
            while self._back.acquire(blocking=False):
                pass  # left over from a turn that exceeded LATE_S
            self._given.release()
            self._back.acquire(timeout=LATE_S)
        elif was_long:
            self._without += 1
        self._began_s = perf_counter()

    def leave(self) -> None:
        """Let the loading thread run until turns are given again: the engine has no work."""
        self._idle = True
        self._began_s = 0.0
        if self._waits:
            self._given.release()

    def _was_long(self) -> bool:
        """Return whether the step that has ended took longer than usual."""
        if not self._began_s:
            return False
        took_s = perf_counter() - self._began_s
        was_long = took_s > LONGER * (self._usual_s or took_s)
        self._usual_s += (took_s - self._usual_s) / (KEPT_STEPS if self._usual_s else 1)
        return was_long

    # ---- on the thread that loads

    def run(self, load: Callable[[], None]) -> None:
        """Run `load` in turns."""
        _here.turns = self
        self._take()
        try:
            load()
        finally:
            _here.turns = None
            self._give_back()

    def _pause(self) -> None:
        if perf_counter() >= self._until_s:
            self._give_back()
            self._take()

    def _take(self) -> None:
        began_s = perf_counter()
        if not self._idle:
            self._waits = True
            self._holds = self._given.acquire(timeout=LONG_STEP_S)
            self._waits = False
        now_s = perf_counter()
        self._until_s = now_s + max(TURN_S, (now_s - began_s) / SHARE)

    def _give_back(self) -> None:
        if self._holds:
            self._holds = False
            self._back.release()


def pause() -> None:
    """Wait for the next turn if this is a loading thread whose turn is over. Otherwise return at once."""
    turns: LoaderTurns | None = getattr(_here, "turns", None)
    if turns is not None:
        turns._pause()


@contextmanager
def released() -> Iterator[None]:
    """Let an engine's steps run while this thread waits, or computes without the interpreter."""
    turns: LoaderTurns | None = getattr(_here, "turns", None)
    if turns is None:
        yield
        return
    turns._give_back()
    _here.turns = None  # operations take no turns here
    try:
        yield
    finally:
        _here.turns = turns
        turns._take()
