"""Time the parts of a start, some of which run concurrently in several threads and processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

Result = TypeVar("Result")


class Part(NamedTuple):
    """A part of a start; seconds on the machine's monotonic clock, which its processes share."""

    name: str
    began_s: float
    ended_s: float


class StartUp:
    """Collects the parts of a start. May be used by several threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.parts: list[Part] = []
        self._clock = clock

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the body of the `with` statement, even if it fails."""
        began_s = self._clock()
        try:
            yield
        finally:
            self.parts.append(Part(name, began_s, self._clock()))

    def timed(self, name: str, function: Callable[[], Result]) -> Callable[[], Result]:
        """Return `function` wrapped so that its run is timed as a part of the start."""

        def run() -> Result:
            with self.part(name):
                return function()

        return run


def describe(parts: Iterable[Part], origin_s: float) -> str:
    """Return the parts in order of their begin, with begin and end in seconds since `origin_s`."""
    return ", ".join(
        f"{name} {began_s - origin_s:.1f}-{ended_s - origin_s:.1f}"
        for name, began_s, ended_s in sorted(parts, key=lambda part: part.began_s)
    )
