"""Estimate a demand at one site, by what the gateway works out for a fleet."""

from __future__ import annotations

import numpy as np

from gateway.decision import Estimate
from gateway.domain import Site
from gateway.routing.demand import Demand
from gateway.routing.estimate import estimates, estimates_at, sizes
from gateway.routing.fleet import Fleet


def estimate(demand: Demand, site: Site, now_s: float) -> Estimate:
    """Return the estimate for one site."""
    fleet = Fleet.of([site])
    found = estimates(sizes(demand, fleet), fleet.figures, fleet.remaining)
    return estimates_at(np.zeros(1, np.intp), [site], found, demand, now_s)[0]
