"""Machines that start and stop as production's scaler wants, and what they cost."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gateway.domain import Site
from gateway.scaling.plan import ScalingPlan
from gateway.scaling.scaler import Scaler
from mico.errors import CommandFailed, ExitCode
from mico.simulation.clock import Clock
from mico.simulation.specification import SiteSpec

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Scaling:
    """A plan of pools, each the machines of one region. A machine serves `start_s` after it was asked for."""

    plan: ScalingPlan
    start_s: float


class Fleet(Protocol):
    """The sites that machines are."""

    def sites_now(self) -> Iterable[Site]: ...
    def is_lost(self, name: str) -> bool: ...
    def is_idle(self, name: str) -> bool: ...
    def bring_up(self, name: str) -> None: ...
    def drain(self, name: str) -> None: ...
    def take_down(self, name: str) -> None: ...


class Machines:
    """All pools of a plan. A machine costs from when it is asked for until it is gone, unless it is lost."""

    def __init__(self, scaling: Scaling, specs: Sequence[SiteSpec], fleet: Fleet, clock: Clock) -> None:
        self._scaling, self._clock = scaling, clock
        self.pools = {
            name: Pool(
                [spec.name for spec in specs if spec.region == name],
                [spec.name for spec in specs if spec.region == name and not spec.is_spare],
                fleet,
                clock,
                scaling.start_s,
            )
            for name in scaling.plan.pool
        }
        self._scaler = Scaler(fleet.sites_now, scaling.plan, self.pools, clock)

    def begin(self) -> None:
        """Take down the spare machines, and reconcile the pools from now on."""
        for pool in self.pools.values():
            pool.begin()
        self._reconcile()

    def is_wanted(self, name: str) -> bool:
        """Return whether a machine that is back may serve; so may one of no pool."""
        return all(name not in pool.names or name in pool.serving for pool in self.pools.values())

    def usd(self) -> float:
        """Return the cost of all machines until now."""
        plans = self._scaling.plan.pool
        return sum(pool.hours() * plans[name].usd_per_hour for name, pool in self.pools.items())

    def _reconcile(self) -> None:
        for pool in self.pools.values():
            pool.stop_drained()
        for work in self._scaler.due().values():
            _finish(work)
        self._clock.after(self._scaling.plan.every_s, self._reconcile)


class Pool:
    """The machines of a region, as a cloud's group of them. A cloud that is lost starts and stops none."""

    def __init__(
        self, names: list[str], first: list[str], fleet: Fleet, clock: Clock, start_s: float
    ) -> None:
        self.names, self.serving = names, list(first)
        self.most = len(first)  # that there were at a time
        self._fleet, self._clock, self._start_s = fleet, clock, start_s
        self._starting: dict[str, int] = {}  # the number of the start
        self._draining: list[str] = []
        self._starts = 0
        self._machine_s = self._counted_s = 0.0

    def begin(self) -> None:
        for name in self.names:
            if name not in self.serving:
                self._fleet.take_down(name)

    async def size(self) -> int:
        return len(self.serving) + len(self._starting)

    async def resize(self, machines: int) -> None:
        self._count()
        if any(self._fleet.is_lost(name) for name in self.names):
            return
        more = machines - len(self.serving) - len(self._starting)
        busy = {*self.serving, *self._starting, *self._draining}
        for name in [each for each in self.names if each not in busy][: max(0, more)]:
            self._starts += 1
            self._starting[name] = self._starts
            self._clock.after(self._start_s, self._started, name, self._starts)
        self.most = max(self.most, len(self.serving) + len(self._starting))
        for _ in range(-more):
            if self._starting:
                self._starting.popitem()
            else:
                self._draining.append(self.serving.pop())
                self._fleet.drain(self._draining[-1])

    def _started(self, name: str, start: int) -> None:
        if self._starting.get(name) == start:  # not stopped meanwhile
            del self._starting[name]
            self.serving.append(name)
            if not self._fleet.is_lost(name):  # else at the end of the outage
                self._fleet.bring_up(name)

    def stop_drained(self) -> None:
        """Stop the machines that were to end and have nothing left to do."""
        self._count()
        for name in [each for each in self._draining if self._fleet.is_idle(each)]:
            self._draining.remove(name)
            self._fleet.take_down(name)

    def hours(self) -> float:
        self._count()
        return self._machine_s / HOUR_S

    def _count(self) -> None:
        """Add up the time since the last call: of machines that start, serve or drain, and are not lost."""
        now_s = self._clock.now_s
        paid = [*self.serving, *self._starting, *self._draining]
        count = sum(not self._fleet.is_lost(name) for name in paid)
        self._machine_s += count * (now_s - self._counted_s)
        self._counted_s = now_s


def _finish(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in which nothing waits: pools of the simulation answer at once."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise RuntimeError("the scaler waited for a pool of the simulation")


def with_spares(specs: Sequence[SiteSpec], plan: ScalingPlan) -> list[SiteSpec]:
    """Return the sites and, for each pool, as many spare ones like its first as the plan may start.

    Raises CommandFailed for a pool without a site.
    """
    found = list(specs)
    for name, pool in plan.pool.items():
        here = [spec for spec in specs if spec.region == name]
        if not here:
            raise CommandFailed(
                f"the scaling plan has a pool {name!r}, and no site is in it",
                tip="name pools at the end of groups in --sites, for example 2x16@1.0~5=us",
                exit_code=ExitCode.WRONG_USAGE,
            )
        spares = range(len(found), len(found) + max(0, pool.most - len(here)))
        found += [replace(here[0], name=f"s{number:04d}", is_spare=True) for number in spares]
    return found
