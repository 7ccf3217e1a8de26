"""What deciding knows of a query."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.domain import Lane, Sampling
from predictor.forecast import Forecast


@dataclass(frozen=True, slots=True)
class Demand:
    """One attempt to be placed. `forecast` is of the tokens still to come, already capped by max_tokens.

    `kv_tokens` is the room it reserves: the prompt (with what a resumed answer has so far) and the 90%
    quantile of each choice. `regions` None means every one. Worked out once per query, not once per site.
    """

    model: str
    prompt_tokens: int
    response_tokens: float
    kv_tokens: int
    lane: Lane = Lane.INTERACTIVE
    needs: frozenset[str] = frozenset()
    regions: frozenset[str] | None = None

    @staticmethod
    def of(
        model: str,
        prompt_tokens: int,
        forecast: Forecast,
        sampling: Sampling,
        *,
        delivered: int = 0,
        lane: Lane = Lane.INTERACTIVE,
        needs: frozenset[str] = frozenset(),
        regions: frozenset[str] | None = None,
    ) -> Demand:
        """`delivered` tokens of the answer exist: they are prompt now; the forecast is of the rest."""
        capped = forecast if sampling.max_tokens is None else forecast.capped(sampling.max_tokens)
        rest = capped.quantile(0.9, delivered) - delivered
        return Demand(
            model=model,
            prompt_tokens=prompt_tokens + delivered,
            response_tokens=capped.expected(delivered) * sampling.n,
            kv_tokens=prompt_tokens + delivered + max(1, rest) * sampling.n,
            lane=lane,
            needs=needs,
            regions=regions,
        )
