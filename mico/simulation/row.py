"""Requests of a simulated site: only their lengths are known."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import inf
from typing import NamedTuple, cast

from site_engine.core.remaining_curve import RemainingCurve
from site_engine.core.request import Lane, Request

ENDLESS = 1 << 20
"""A token limit above the length of any answer."""


class CurveSegment(NamedTuple):
    """One linear piece of a curve of remaining tokens.

    From `first` generated tokens until `after`, the expectation is `value` and `slope` more for each token.
    """

    first: int
    after: int
    value: float
    slope: float

    @staticmethod
    def of(curve: RemainingCurve, generated: int) -> CurveSegment:
        """Return the piece of a curve that holds at `generated` tokens."""
        points = curve.points
        after = bisect_right(points, (generated, inf))
        if after == len(points):
            return CurveSegment(points[-1].generated, ENDLESS, points[-1].expected, 0.0)
        if after == 0:
            return CurveSegment(0, points[0].generated, points[0].expected, 0.0)
        low, high = points[after - 1], points[after]
        slope = (high.expected - low.expected) / (high.generated - low.generated)
        return CurveSegment(low.generated, high.generated, low.expected, slope)


NO_SEGMENT = CurveSegment(0, 0, 0.0, 0.0)


class Row(Request):
    """A request of the engine of which only lengths are known. `produced`: response tokens so far.

    It has only the fields of a request that a queue reads, since there is one for every simulated query.
    """

    __slots__ = (
        "_segment",
        "blocks",
        "ends_at",
        "produced",
        "reserved",
        "response_tokens",
        "to_prefill",
        "typical",
    )

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
        blocks: Sequence[int] = (),
    ) -> None:
        self.id, self.tenant, self.lane, self.priority = id, tenant, lane, 0
        self.prompt_len, self.response_tokens, self.produced = prompt_tokens, response_tokens, produced
        self.remaining, self.typical, self.max_tokens = remaining, typical, ENDLESS
        self.resumed = range(produced)  # by another site
        self.started_s = self.first_token_s = None
        self.prefill_heavy = False
        self.ends_at = 0  # the site's iteration that brings the last token
        self.reserved = 0  # tokens of KV set aside for it, held ones included
        self.to_prefill = 0
        self.blocks = blocks  # ids of full blocks of prompt and response, as far as others may have them
        self.pages, self.cached_tokens = [], 0
        self._segment = NO_SEGMENT
        self.reset_tokens()

    def reset_tokens(self) -> None:
        """Reset the tokens to compute before the next one: the prompt and the response so far."""
        self.tokens = cast("list[int]", range(self.prompt_len + self.produced))

    @property
    def generated(self) -> int:
        return self.produced

    def typical_length(self) -> float:
        return self.typical

    def expected_remaining(self) -> float:
        """Return the expected remaining tokens, at least 1.

        Every report asks for it after few tokens, so the current piece of the curve is cached.
        """
        first, after, value, slope = self._segment
        produced = self.produced
        if not first <= produced < after:
            self._segment = first, after, value, slope = CurveSegment.of(self.remaining, produced)
        expected = value + slope * (produced - first)
        return expected if expected > 1.0 else 1.0
