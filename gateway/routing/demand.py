"""The requirements of a query, as routing sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from gateway.decision import PlacementLimits
from gateway.domain import Credit, Lane, Sampling
from gateway.routing.prefixes import NOTHING_CACHED, Cached
from predictor.forecast import Forecast


class Arriving(NamedTuple):
    """What arrives for a model at a gateway, by its last queries.

    `tokens_per_s`: the response tokens that they bring, as forecast; 0 until known. `returning`: the share of
    them of whose prompt some site had a part cached.
    """

    tokens_per_s: float = 0.0
    returning: float = 0.0


NOTHING_ARRIVES: Final = Arriving()


@dataclass(frozen=True, slots=True)
class Demand:
    """One attempt to be placed. `response_tokens` are those still to come, already capped by max_tokens.

    `kv_tokens` is the KV room to reserve: the prompt (with the delivered part of a resumed answer) and the
    90% quantile of each choice. Each of the `choices` takes a slot. `cached`: tokens of the prompt. `regions`
    None means every one. `arriving`: for the same model. Computed once per query, not once per site.
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
        """Build a demand. `delivered` tokens of the answer exist: they count as prompt, the forecast as the
        rest. `cached`: shares of the prompt.
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
