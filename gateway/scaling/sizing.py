"""Compute the number of machines that each pool needs from the load of its sites. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gateway.domain import Site, SiteState
from gateway.telemetry.metrics import capacity_tokens

BUSY_SHARE = 0.7
"""Target utilization of a machine; the rest is kept free for bursts."""

SERVING_STATES = frozenset({SiteState.READY, SiteState.DRAINING, SiteState.PAUSED})
UNBOUNDED = 2**31


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of one pool, in machines. A pool without bounds is never resized."""

    fewest: int = 0
    most: int = UNBOUNDED
    usd_per_hour: float = 0.0  # per machine

    def __post_init__(self) -> None:
        if not 0 <= self.fewest <= self.most:
            raise ValueError(f"fewest is {self.fewest} and most {self.most}; 0 <= fewest <= most must hold")
        if self.usd_per_hour < 0:
            raise ValueError(f"usd_per_hour is {self.usd_per_hour}; it can't be negative")


def by_pool(sites: Iterable[Site]) -> dict[str, list[Site]]:
    """Group sites by pool. Each site is one machine; a site without a pool is a pool of its own name."""
    pools: dict[str, list[Site]] = {}
    for site in sites:
        pools.setdefault(site.identity.pool or site.name, []).append(site)
    return pools


def busy_machines(sites: Iterable[Site]) -> float:
    """Return the load in machines: the shares of used slots, and waiting tokens relative to the capacity."""
    return sum(_busy(site) for site in sites if site.state in SERVING_STATES)


def _busy(site: Site) -> float:
    load, slots = site.load, max(1, site.identity.slots)
    running = min(1.0, load.running / slots)
    waiting_tokens = load.pending_prompt_tokens + load.pending_response_tokens
    capacity = capacity_tokens(site)
    return running + (waiting_tokens / capacity if capacity else load.pending / slots)


def desired_machines(
    busy: Mapping[str, float], bounds: Mapping[str, Bounds], budget_usd_per_hour: float = math.inf
) -> dict[str, int]:
    """Return the machines per pool. Load that a full pool can't take goes to the cheapest pool with room.

    `busy`: the load by pool, in machines. A pool without bounds may have any number of machines. The budget
    limits all machines beyond the `fewest` of each pool.
    """
    limits = {name: bounds.get(name, Bounds()) for name in {**bounds, **busy}}
    wanted = {name: min(UNBOUNDED, busy.get(name, 0.0) / BUSY_SHARE) for name in limits}
    needed = {name: math.ceil(count - 1e-9) for name, count in wanted.items()}
    machines = {name: min(max(needed[name], limit.fewest), limit.most) for name, limit in limits.items()}
    left_over = sum(max(0, needed[name] - limit.most) for name, limit in limits.items())
    for name in _cheapest_first(limits):
        if name in bounds:
            more = min(left_over, limits[name].most - machines[name])
            machines[name] += more
            left_over -= more
    return _affordable(machines, limits, budget_usd_per_hour)


def needed_machines(
    busy: Mapping[str, float],
    linked: Mapping[str, int],
    sizes: Mapping[str, int],
    bounds: Mapping[str, Bounds],
    budget_usd_per_hour: float = math.inf,
) -> dict[str, int]:
    """Return the machines per pool as `desired_machines` does, but shrink no pool by an incomplete view.

    `busy` covers the `linked` machines alone. Where a pool of a known size would shrink, its other machines
    are assumed to be as busy as those. A pool grows by the observed load only: the others may be starting.
    """
    assumed = dict(busy)
    for name, machines in desired_machines(busy, bounds, budget_usd_per_hour).items():
        size = sizes.get(name, 0)
        if machines < size and 0 < linked.get(name, 0) < size:
            assumed[name] = max(busy[name], min(busy[name] * size / linked[name], size * BUSY_SHARE))
    return desired_machines(assumed, bounds, budget_usd_per_hour)


def _affordable(machines: Mapping[str, int], limits: Mapping[str, Bounds], budget: float) -> dict[str, int]:
    left = max(0.0, budget - sum(limit.fewest * limit.usd_per_hour for limit in limits.values()))
    granted = {}
    for name in _cheapest_first(limits):
        limit = limits[name]
        more = machines[name] - limit.fewest
        if limit.usd_per_hour and left < more * limit.usd_per_hour:
            more = int(min(more, left / limit.usd_per_hour + 1e-9))
        left -= more * limit.usd_per_hour
        granted[name] = limit.fewest + more
    return granted


def _cheapest_first(limits: Mapping[str, Bounds]) -> list[str]:
    return sorted(limits, key=lambda name: (limits[name].usd_per_hour, name))


class Stabilizer:
    """Hysteresis: grow after `up_after_s` of higher demand, shrink after `down_after_s` of lower."""

    def __init__(self, up_after_s: float, down_after_s: float) -> None:
        self._up_after_s, self._down_after_s = up_after_s, down_after_s
        self._demand: deque[tuple[float, int]] = deque()
        self._since_s: float | None = None

    def observe(self, now_s: float, desired_now: int) -> None:
        """Add the machines desired now to the window."""
        self._since_s = now_s if self._since_s is None else self._since_s
        self._demand.append((now_s, desired_now))
        keep_s = max(self._up_after_s, self._down_after_s)
        while self._demand[0][0] < now_s - keep_s:
            self._demand.popleft()

    @property
    def newest(self) -> int:
        """The machines desired last."""
        return self._demand[-1][1] if self._demand else 0

    def restart(self) -> None:
        """Clear the window, as the demand was unknown."""
        self._demand.clear()
        self._since_s = None

    def size(self, machines: int) -> int:
        """Return the new size: the smallest change that all of the window supports, else `machines`."""
        if self._since_s is None:
            return machines
        now_s = self._demand[-1][0]
        watched_s = now_s - self._since_s
        recent = [count for at_s, count in self._demand if at_s >= now_s - self._up_after_s]
        if watched_s >= self._up_after_s and min(recent) > machines:
            return min(recent)
        longer = [count for at_s, count in self._demand if at_s >= now_s - self._down_after_s]
        if watched_s >= self._down_after_s and max(longer) < machines:
            return max(longer)
        return machines
