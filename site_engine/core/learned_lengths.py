"""Learn from the lines of a batch that have ended how long its others will be. Pure.

The lines of a batch are of one kind, and forecasts may be wrong for all of them by one factor. Lengths are
taken as lognormal around their forecasts, and the factor is their location given what has ended, and what
still runs and is longer than it is by now (Tobin, 1958): those that end first are the short ones. Until lines
have ended it is 1, and eight lines count for that.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import erfc, exp, log, pi, sqrt
from statistics import fmean, pstdev
from typing import NamedTuple

from site_engine.core.remaining_curve import RemainingCurve, likely_lengths
from site_engine.core.request import Lane, Request

DOUBTED_LINES = 8
"""Lines that agree on a factor before it is believed by half."""
REMEMBERED_LINES = 256
"""Ended lines after which the older ones count half: a tenant's next batch may be of another kind."""
MAX_KINDS = 256
MIN_DEVIATION = 0.05


class Kind(NamedTuple):
    """Lines that are corrected together: few tokens after long prompts say nothing of long answers."""

    tenant: str
    prefill_heavy: bool


class LengthFactors:
    """The factor by which lines of each kind are longer than forecast."""

    def __init__(self) -> None:
        self._logs: dict[Kind, float] = {}
        self._ended: dict[Kind, tuple[float, float]] = {}  # number, and the sum of the logarithms of factors

    def factor(self, request: Request) -> float:
        if request.lane is not Lane.BATCH or not self._logs:
            return 1.0
        return exp(self._logs.get(Kind(request.tenant, request.prefill_heavy), 0.0))

    def ended(self, request: Request, generated: int) -> None:
        """Learn from a line of a batch that has ended by itself, before its limit, after so many tokens."""
        if request.lane is not Lane.BATCH or not 0 < generated < request.max_tokens:
            return
        kind = Kind(request.tenant, request.prefill_heavy)
        lines, total = self._ended.pop(kind, (0.0, 0.0))
        if lines >= REMEMBERED_LINES:
            lines, total = lines / 2, total / 2
        mean, _ = _log_lengths(request.remaining)
        self._ended[kind] = lines + 1, total + log(generated) - mean
        if len(self._ended) > MAX_KINDS:
            del self._ended[next(iter(self._ended))]

    def update(self, running: Iterable[Request]) -> None:
        """Estimate the factors anew by one step of expectation maximization, over ended and running lines."""
        found = dict(self._ended)
        for request in running if found else ():
            kind = Kind(request.tenant, request.prefill_heavy)
            if kind in found and request.lane is Lane.BATCH and request.generated:
                lines, total = found[kind]
                mean, deviation = _log_lengths(request.remaining)
                location = self._logs.get(kind, 0.0)
                above = (log(request.generated) - mean - location) / deviation
                found[kind] = lines + 1, total + location + deviation * _mean_above(above)
        self._logs = {kind: total / (lines + DOUBTED_LINES) for kind, (lines, total) in found.items()}


@lru_cache(maxsize=4096)
def _log_lengths(curve: RemainingCurve) -> tuple[float, float]:
    """Return mean and standard deviation of the logarithms of the likely lengths."""
    logs = [log(max(1.0, length)) for length in likely_lengths(curve)]
    return fmean(logs), max(MIN_DEVIATION, pstdev(logs))


def _mean_above(least: float) -> float:
    """Return the mean of a standard normal variable that is above `least`."""
    if least > 6.0:
        return least + 1 / least
    return sqrt(2 / pi) * exp(-least * least / 2) / erfc(least / sqrt(2))
