"""The input and the output of a policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gateway.domain import Site
from gateway.routing.demand import Demand
from gateway.routing.estimate import Estimates
from gateway.routing.fleet import Figures, Numbers, least


class Candidates(NamedTuple):
    """The sites that can serve a demand: vectors over the whole fleet. `allowed[i]` is whether site `i` can,
    and `places` are the indices of those that can, never empty for a policy.
    """

    sites: list[Site]
    allowed: NDArray[np.bool_]
    places: NDArray[np.intp]
    at: Figures
    estimates: Estimates
    now_s: float

    def narrowed(self, allowed: NDArray[np.bool_]) -> Candidates:
        """Return fewer of the candidates."""
        return self._replace(allowed=allowed, places=allowed.nonzero()[0])

    def least_of(self, values: Numbers) -> float:
        """Return the least value of a site that can serve the demand."""
        return least(values[self.allowed])

    def least(self, cost: Numbers, turn: int) -> int:
        """Return the index of the cheapest site; ties go in turn, so that equal sites share equally."""
        costs = cost[self.allowed]
        equals = (costs == np.asarray(least(costs))).nonzero()[0]
        return int(self.places[equals[turn % len(equals)]])


class Choice(NamedTuple):
    """The index of the chosen site, and the reason in words for operators. `cost` `[sites]`: the values
    compared.
    """

    place: int
    reason: str
    cost: Numbers | None = None


Policy = Callable[[Demand, Candidates, int], Choice]
"""(demand, candidates, turn) → choice. There is always a candidate; `turn` counts decisions and seeds draws.
"""
