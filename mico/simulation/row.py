"""A request of which only lengths are known, as a simulated site serves it."""

from __future__ import annotations

from bisect import bisect_right
from math import inf
from typing import NamedTuple, cast

from site_engine.core.request import Lane, RemainingCurve, Request

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


class Row(Request):
    """A request of the engine of which only lengths are known. `produced`: response tokens out so far.

    Of a request's fields it has those that a queue reads: there is one for every simulated query.
    """

    __slots__ = ("_line", "ends_at", "produced", "reserved", "response_tokens", "to_prefill", "typical")

    def __init__(
        self,
        id: str,  # noqa: A002  # a request's own name
        prompt_tokens: int,
        remaining: RemainingCurve,
        *,
        typical: float = 1.0,
        tenant: str = "",
        lane: Lane = Lane.CHAT,
        response_tokens: int = 1,
        produced: int = 0,
    ) -> None:
        self.id, self.tenant, self.lane, self.priority = id, tenant, lane, 0
        self.prompt_len, self.response_tokens, self.produced = prompt_tokens, response_tokens, produced
        self.remaining, self.typical, self.max_tokens = remaining, typical, ENDLESS
        self.started_s = self.first_token_s = None
        self.ends_at = 0  # the site's iteration that brings the last token
        self.reserved = 0  # tokens of KV set aside for it, held ones included
        self.to_prefill = 0
        self._line = NO_LINE
        self.start_over()

    def start_over(self) -> None:
        """What is to be computed before the next token: the prompt and the response so far."""
        self.tokens = cast("list[int]", range(self.prompt_len + self.produced))

    @property
    def generated(self) -> int:
        return self.produced

    def typical_length(self) -> float:
        return self.typical

    def expected_remaining(self) -> float:
        """As of any request; the part of the curve is kept, because every report asks and tokens are few."""
        first, after, at, slope = self._line
        produced = self.produced
        if not first <= produced < after:
            self._line = first, after, at, slope = Line.of(self.remaining, produced)
        expected = at + slope * (produced - first)
        return expected if expected > 1.0 else 1.0
