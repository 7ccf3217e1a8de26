"""What a policy is given and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gateway.domain import Site
from gateway.routing.demand import Demand
from gateway.routing.estimate import Estimates
from gateway.routing.fleet import Figures, Numbers


class Candidates(NamedTuple):
    """The sites that may serve a demand: vectors over the whole fleet, `may[i]` is whether site `i` may."""

    sites: list[Site]
    may: NDArray[np.bool_]
    at: Figures
    estimates: Estimates
    now_s: float

    @property
    def places(self) -> NDArray[np.intp]:
        """Those that may; never empty."""
        return np.flatnonzero(self.may)

    def least(self, cost: Numbers, turn: int) -> int:
        """The cheapest; equals go in turn, so that equal sites share equally."""
        costs = np.where(self.may, cost, np.inf)
        first = int(costs.argmin())
        equals = costs == costs[first]
        count = np.count_nonzero(equals)
        return first if count == 1 else int(np.flatnonzero(equals)[turn % count])


class Choice(NamedTuple):
    """Which site of the fleet, and why, in words an operator reads. `cost`: what was compared, by site."""

    place: int
    reason: str
    cost: Numbers | None = None


Policy = Callable[[Demand, Candidates, int], Choice]
"""(demand, candidates, turn) → choice. Never without candidates; `turn` counts decisions and seeds draws."""
