"""Estimate the lengths of a batch's remaining lines from the lines that have ended. Pure.

The lines of a batch are similar, so forecasts may be wrong for all of them by a common factor. Lengths are
modelled as lognormal around their forecasts, and the factor is the location of that distribution. Running
lines count as censored observations (Tobin, 1958), since short lines end first. The prior is a factor of 1
with the weight of eight lines.
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
"""Weight of the prior: after this many lines with one factor, half of its logarithm is applied."""
REMEMBERED_LINES = 256
"""Ended lines after which older ones count half, since a tenant's next batch may differ."""
MAX_KINDS = 256
MIN_DEVIATION = 0.05


class Kind(NamedTuple):
    """Lines that share a factor. Short answers after long prompts do not predict long answers."""

    tenant: str
    prefill_heavy: bool


class LengthFactors:
    """The ratio of actual to forecast length for each kind of line."""

    def __init__(self) -> None:
        self._logs: dict[Kind, float] = {}
        self._ended: dict[Kind, tuple[float, float]] = {}  # lines, and the sum of their log factors

    def factor(self, request: Request) -> float:
        if request.lane is not Lane.BATCH or not self._logs:
            return 1.0
        return exp(self._logs.get(Kind(request.tenant, request.prefill_heavy), 0.0))

    def ended(self, request: Request, generated: int) -> None:
        """Learn from a batch line that has ended before its token limit, after `generated` tokens."""
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
        """Update the factors by one step of expectation maximization over ended and running lines."""
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
    """Return the mean and standard deviation of the logarithms of the likely lengths."""
    logs = [log(max(1.0, length)) for length in likely_lengths(curve)]
    return fmean(logs), max(MIN_DEVIATION, pstdev(logs))


def _mean_above(least: float) -> float:
    """Return the mean of a standard normal variable that is above `least`."""
    if least > 6.0:
        return least + 1 / least
    return sqrt(2 / pi) * exp(-least * least / 2) / erfc(least / sqrt(2))
