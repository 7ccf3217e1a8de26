"""Turns of a thread that loads beside an engine's thread.

Both need the interpreter. A thread that computes in Python takes it whenever the other lets go of it, which a
step of the engine does about ten times, and keeps it for a while each time. So a loading thread stops where
it calls `pause`, and goes on for a short time between two steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

TURN_S = 6e-4
"""After a short step, which the device computes meanwhile."""
SHARE = 4
"""After a long one a turn lasts for this part of it, so that loads beside long steps end."""
LONGER, KEPT_STEPS, MAX_WITHOUT = 1.4, 32, 4
"""After a step that took so many times the usual, a mean over so many, no turn is given, which would delay
tokens that are late already; after one more than so many such steps it is.
"""
LATE_S = 5e-3
"""An engine's thread waits no longer for one that loads to pause."""
LONG_STEP_S = 0.1
"""A thread that loads takes a turn without being given it when a step takes longer."""

_here = threading.local()


class LoaderTurns:
    """Turns that an engine's thread gives to one thread that loads."""

    def __init__(self) -> None:
        self._given, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._waits = self._holds = False  # the thread that loads, for a turn; a turn that was given to it
        self._idle = True
        self._until_s = 0.0
        self._began_s = 0.0  # the step that runs now; 0 where none ran before it
        self._usual_s = 0.0  # of a step
        self._without = 0  # long steps since the last turn

    # ---- on the engine's thread

    def give(self) -> None:
        """Let the loading thread run for a turn after a step, if it waits for one."""
        self._idle = False
        was_long = self._was_long()
        if self._waits and (not was_long or self._without >= MAX_WITHOUT):
            self._without = 0
            while self._back.acquire(blocking=False):
                pass  # of a turn that it took too long for
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
    """Let an engine's step run first, if this thread loads beside it and its turn is over."""
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
