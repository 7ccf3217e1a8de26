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
    """The sites that can serve a demand, as vectors over the whole fleet. `allowed` `[sites]`: whether each
    site can serve it. `places`: the indices of the sites that can; never empty when a policy is called.
    """

    sites: list[Site]
    allowed: NDArray[np.bool_]
    places: NDArray[np.intp]
    at: Figures
    estimates: Estimates
    now_s: float

    def narrowed(self, allowed: NDArray[np.bool_]) -> Candidates:
        """Return the candidates restricted to a mask `[sites]`."""
        return self._replace(allowed=allowed, places=allowed.nonzero()[0])

    def least_of(self, values: Numbers) -> float:
        """Return the least of `values` `[sites]` over the sites that can serve the demand."""
        return least(values[self.allowed])

    def least(self, cost: Numbers, turn: int) -> int:
        """Return the index of the site with the least cost. Ties rotate by `turn`, to share load equally."""
        costs = cost[self.allowed]
        equals = (costs == np.asarray(least(costs))).nonzero()[0]
        return int(self.places[equals[turn % len(equals)]])


class Choice(NamedTuple):
    """The index of the chosen site, and the reason as shown to operators. `cost` `[sites]`: the values that
    the policy compared, None if it compared none.
    """

    place: int
    reason: str
    cost: Numbers | None = None


Policy = Callable[[Demand, Candidates, int], Choice]
"""(demand, candidates, turn) → choice. There is always a candidate. `turn` counts decisions and seeds draws.
"""
