"""Queries to a simulated federation, their forecasts, and their results."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import NamedTuple

from gateway.domain import Lane, Sampling
from gateway.routing.demand import Demand
from gateway.routing.prefixes import Prefix
from mico.simulation.specification import MODEL
from predictor.forecast import Forecast
from site_engine.core.remaining_curve import RemainingCurve

NO_PREFIX = Prefix((), 0)


@dataclass(frozen=True, slots=True)
class Query:
    """A query. Its `response_tokens` are known to the simulated engine, and not to the gateway.

    Forecasts read `text` and `model`, which come from the corpus. `regions`: where it may be answered; None
    is everywhere. `blocks`: ids of the blocks of its prompt, and of its response where a later prompt has it;
    equal ids are equal blocks after equal ones. `prefix`: what a gateway makes of the prompt.
    """

    number: int
    arrival_s: float
    prompt_tokens: int
    response_tokens: int
    text: str = ""
    model: str = ""
    tenant: str = "t0"
    lane: Lane = Lane.INTERACTIVE
    regions: frozenset[str] | None = None
    blocks: tuple[int, ...] = ()
    prefix: Prefix = NO_PREFIX
    session: int = 0


class Expected(NamedTuple):
    """A query's forecast in the forms that gateway and site use for decisions and ordering."""

    forecast: Forecast
    demand: Demand
    curve: RemainingCurve
    typical: float  # length, as the curve has it


def demand_of(query: Query, forecast: Forecast, delivered: int = 0) -> Demand:
    """Return the demand of a query of whose answer `delivered` tokens exist."""
    return Demand.of(
        MODEL,
        query.prompt_tokens,
        forecast,
        Sampling(),
        delivered=delivered,
        lane=query.lane,
        regions=query.regions,
    )


def expected_length(expected: Expected) -> float:
    """Return the mean of the forecast, in tokens."""
    return expected.demand.response_tokens


@dataclass(slots=True)
class Record:
    """The result of a query. Times are seconds since its arrival as its client saw them, nan before."""

    query: Query
    first_token_s: float = nan
    finish_s: float = nan
    attempts: int = 0
    moves: int = 0
    site: str = ""
    cached_tokens: int = 0
