"""What is asked of a simulated federation, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import NamedTuple

from gateway.domain import Lane, Sampling
from gateway.routing.demand import Demand
from mico.simulation.specification import MODEL
from predictor.forecast import Forecast
from site_engine.core.request import RemainingCurve


@dataclass(frozen=True, slots=True)
class Query:
    """`response_tokens` is what will be answered: known to the simulated engine, not to who decides.

    `text` and `model` are what a forecast reads; they come from the corpus. `regions`: where it may be
    answered, None is everywhere.
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


class Expected(NamedTuple):
    """A query as deciding and ordering see it: its forecast in the forms that gateway and site use."""

    forecast: Forecast
    demand: Demand
    curve: RemainingCurve
    typical: float  # length, as the curve has it


def demand_of(query: Query, forecast: Forecast, delivered: int = 0) -> Demand:
    """As deciding sees it once `delivered` tokens of the answer exist."""
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
    return expected.demand.response_tokens


def possible_length(expected: Expected) -> float:
    """What one answer in a thousand like it reaches: what a batch ends with is rarely forecast to be long."""
    last = expected.curve.points[-1]
    return last.generated + last.expected


@dataclass(slots=True)
class Record:
    """Seconds since the query's arrival, as its client saw them; nan until then."""

    query: Query
    first_token_s: float = nan
    finish_s: float = nan
    attempts: int = 0
    moves: int = 0
    site: str = ""
