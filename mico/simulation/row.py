"""A request of which only lengths are known, as a simulated site serves it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, cast

from site_engine.request import RemainingCurve, Request

ENDLESS = 1 << 20
"""More tokens than any answer has."""


class Line(NamedTuple):
    """What is expected from `first` tokens on until `after`: `at`, and `slope` more for each token."""

    first: int
    after: int
    at: float
    slope: float

    @staticmethod
    def of(curve: RemainingCurve, generated: int) -> Line:
        """The part of a curve that holds for so many tokens."""
        points = curve.points
        after = bisect_right(points, (generated, inf))
        if after == len(points):
            return Line(points[-1].generated, ENDLESS, points[-1].expected, 0.0)
        if after == 0:
            return Line(0, points[0].generated, points[0].expected, 0.0)
        low, high = points[after - 1], points[after]
        slope = (high.expected - low.expected) / (high.generated - low.generated)
        return Line(low.generated, high.generated, low.expected, slope)


NO_LINE = Line(0, 0, 0.0, 0.0)


@dataclass(slots=True, eq=False)
class Row(Request):
    """A request of the engine of which only lengths are known. `produced`: response tokens out so far."""

    response_tokens: int = 1
    produced: int = 0
    to_prefill: int = field(default=0, init=False)
    ends_at: int = field(default=0, init=False)  # the site's iteration that brings the last token
    reserved: int = field(default=0, init=False)  # tokens of KV set aside for it, held ones included
    live: bool = field(default=True, init=False)
    _line: Line = field(default=NO_LINE, init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.prompt)
        self.max_tokens = ENDLESS
        self.start_over()

    def start_over(self) -> None:
        """What is to be computed before the next token: the prompt and the response so far."""
        self.tokens = cast("list[int]", range(self.prompt_len + self.produced))

    @property
    def generated(self) -> int:
        return self.produced

    def expected_remaining(self) -> float:
        """As of any request; the part of the curve is kept, because every report asks and tokens are few."""
        first, after, at, slope = self._line
        produced = self.produced
        if not first <= produced < after:
            self._line = Line.of(self.remaining, produced)
            first, after, at, slope = self._line
        return max(1.0, at + slope * (produced - first))
