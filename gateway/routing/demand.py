"""The requirements of a query, as routing sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from gateway.decision import PlacementLimits
from gateway.domain import Credit, Lane, Sampling
from gateway.routing.prefixes import NOTHING_CACHED, Cached
from predictor.forecast import Forecast


class Arriving(NamedTuple):
    """The recent traffic of a model at one gateway.

    `tokens_per_s`: the forecast response tokens of the arriving queries, per second; 0 until known.
    `returning`: the share of the queries whose prompt was expected to be partly cached at a site.
    """

    tokens_per_s: float = 0.0
    returning: float = 0.0


NOTHING_ARRIVES: Final = Arriving()


@dataclass(frozen=True, slots=True)
class Demand:
    """The requirements of one attempt to be placed. Computed once per attempt, not once per site.

    `response_tokens`: the expected tokens still to generate, truncated at max_tokens. `kv_tokens`: the KV
    memory to reserve, for the prompt (with the delivered part of a resumed answer) and the p90 of each
    choice. Each of the `choices` takes a slot. `cached`: prompt tokens expected in the sites' caches.
    `regions` None means all. `arriving`: the recent traffic of the same model.
    """

    model: str
    prompt_tokens: int
    response_tokens: float
    kv_tokens: int
    lane: Lane = Lane.INTERACTIVE
    needs: frozenset[str] = frozenset()
    regions: frozenset[str] | None = None
    cached: Cached = NOTHING_CACHED
    limits: PlacementLimits | None = None
    arriving: Arriving = NOTHING_ARRIVES
    choices: int = 1

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
        cached: Cached = NOTHING_CACHED,
        limits: PlacementLimits | None = None,
    ) -> Demand:
        """Build a demand. The first `delivered` tokens of the answer count as prompt, and the forecast is
        conditioned on them. `cached`: shares of the prompt, not tokens.
        """
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
            cached=cached.times(prompt_tokens),
            limits=limits,
            choices=sampling.n,
        )


def credit_with(credit: Credit, demand: Demand) -> Credit:
    """Return the credit of a site once one more demand is assigned to it."""
    return Credit(
        credit.requests + demand.choices,
        credit.prompt_tokens + demand.prompt_tokens,
        credit.response_tokens + demand.response_tokens,
    )
