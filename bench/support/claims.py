"""Keep the figures of a benchmark beside their limits, and print each as a line of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple


class Claim(NamedTuple):
    """A figure beside its limit."""

    what: str
    value: float
    limit: float
    at_least: bool

    @property
    def held(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


class Claims:
    """The claims of a run, in their order."""

    def __init__(self) -> None:
        self.claims: list[Claim] = []
        self._began_s = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Return the seconds since the run began."""
        return time.perf_counter() - self._began_s

    def log(self, **record: Any) -> None:
        print(json.dumps({"at_s": round(self.seconds, 1), **record}), flush=True)

    def claim(self, what: str, value: float, limit: float, *, at_least: bool) -> None:
        self.claims.append(Claim(what, value, limit, at_least))
        self.log(claim=what, value=round(value, 4), limit=limit, held=self.claims[-1].held)


def quantile(values: Sequence[float], part: float) -> float:
    """Return the value below which this part of the others lies."""
    ordered = sorted(values)
    return ordered[int(part * (len(ordered) - 1))]
