"""Watches the load of every pool, says how many machines it should have, and tells the cloud where it may."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager

import httpx
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.domain import Site
from gateway.scaling.groups import Group, GroupFailed
from gateway.scaling.plan import ScalingPlan
from gateway.scaling.sizing import AT_WORK, Steady, busy_machines, by_pool, wanted
from gateway.telemetry.snapshot import Pool

log = logging.getLogger(__name__)


@asynccontextmanager
async def scaling(
    sites: Callable[[], Iterable[Site]], plan: ScalingPlan, clock: Callable[[], float]
) -> AsyncIterator[Scaler]:
    """A scaler that looks for as long as the context lasts."""
    async with httpx.AsyncClient() as http:
        groups = {name: pool.open(http) for name, pool in plan.pool.items()}
        scaler = Scaler(sites, plan, groups, clock)
        running = asyncio.create_task(scaler.run())
        try:
            yield scaler
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


class Scaler(Collector):
    """Replicas may all run one: each starts from the size that the group has, so they agree or wait.

    `desired` is by pool. A pool without a group is advised on only: the metric says what it should be.
    """

    def __init__(
        self,
        sites: Callable[[], Iterable[Site]],
        plan: ScalingPlan,
        groups: Mapping[str, Group],
        clock: Callable[[], float],
    ) -> None:
        self.desired: dict[str, int] = {}
        self.machines: dict[str, int] = {}
        self._sites, self._plan, self._groups, self._clock = sites, plan, groups, clock
        self._bounds = {name: pool.bounds() for name, pool in plan.pool.items()}
        self._steady: dict[str, Steady] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._plan.every_s)

    async def look(self) -> None:
        """One round over every pool. What a cloud refuses is logged and tried again in the next round.

        What is neither here nor planned any more is forgotten: machines without a pool come and go by name.
        """
        pools = by_pool(self._sites())
        busy = {name: busy_machines(sites) for name, sites in pools.items()}
        needed = wanted(busy, self._bounds, self._plan.budget_usd_per_hour)
        for gone in self.desired.keys() - needed.keys():
            del self.desired[gone], self.machines[gone], self._steady[gone]
        for name in needed.keys() | self._groups.keys():
            at_work = sum(site.state in AT_WORK for site in pools.get(name, ()))
            try:
                await self._settle(name, at_work, needed.get(name, 0))
            except GroupFailed as exc:
                log.warning("pool %s keeps its size: %s", name, exc)
            except Exception:
                log.exception("pool %s keeps its size: its cloud answered in an unforeseen way", name)

    async def _settle(self, name: str, at_work: int, needed: int) -> None:
        group = self._groups.get(name)
        now = await group.size() if group else at_work
        steady = self._steady.setdefault(name, Steady(self._plan.up_after_s, self._plan.down_after_s))
        self.machines[name] = at_work
        self.desired[name] = size = steady.size(self._clock(), now, needed)
        if group and size != now:
            await group.resize(size)
            log.info("pool %s: %d machines instead of %d", name, size, now)

    def pools(self) -> list[Pool]:
        """For the page, by name."""
        return [Pool(name, self.machines[name], size) for name, size in sorted(self.desired.items())]

    def collect(self) -> Iterator[Metric]:
        """For Prometheus."""
        desired = GaugeMetricFamily(
            "mico_pool_desired_machines", "Machines that a pool should have", labels=["pool"]
        )
        at_work = GaugeMetricFamily("mico_pool_machines", "Machines of a pool that serve", labels=["pool"])
        for name, size in self.desired.items():
            desired.add_metric([name], size)
            at_work.add_metric([name], self.machines[name])
        yield desired
        yield at_work
