"""Compute the desired machines of every pool from its load, and resize the pools that the plan allows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from math import inf
from typing import Any

import httpx
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.domain import Site
from gateway.scaling.groups import Group, GroupFailed
from gateway.scaling.plan import ScalingPlan
from gateway.scaling.sizing import SERVING_STATES, Stabilizer, busy_machines, by_pool, needed_machines
from gateway.tasks import cancel
from gateway.telemetry.snapshot import Pool

log = logging.getLogger(__name__)


@asynccontextmanager
async def scaling(
    sites: Callable[[], Iterable[Site]], plan: ScalingPlan, clock: Callable[[], float]
) -> AsyncIterator[Scaler]:
    """Run a scaler while the context is open."""
    async with httpx.AsyncClient() as http:
        groups = {name: pool.open(http) for name, pool in plan.pool.items()}
        scaler = Scaler(sites, plan, groups, clock)
        running = asyncio.create_task(scaler.run())
        try:
            yield scaler
        finally:
            await cancel(running)


class Scaler(Collector):
    """Sizes pools. Every replica may run one: each starts from the group's current size, so they agree or
    wait. A pool shrinks only by the load of all its machines, those without a link to this replica counted
    like the others; if none has one, it keeps its size.

    `desired` and `machines` are by pool. A pool without a group is not resized: the metric shows the desired
    size.
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
        self._sizes: dict[str, int] = {}  # of the groups, when their clouds last reported them
        self._stabilizers: dict[str, Stabilizer] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}  # by pool: requests in progress to its cloud
        self._unseen: dict[str, float] = {}  # by pool: since when no machine is linked; inf once logged

    async def run(self) -> None:
        """Reconcile every `every_s` until cancelled."""
        try:
            while True:
                await asyncio.gather(self.reconcile(), asyncio.sleep(self._plan.every_s))
        finally:
            for task in self._asking.values():
                task.cancel()

    async def reconcile(self) -> None:
        """Compute and apply the size of every pool once. A refusal of a cloud is logged, and retried in the
        next round. If a cloud takes longer than `every_s`, its pool is skipped until it has answered.
        """
        for name, work in self.due().items():
            self._asking[name] = asyncio.create_task(work, name=f"size of pool {name}")
        if self._asking:
            await asyncio.wait([*self._asking.values()], timeout=self._plan.every_s)

    def due(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Observe the need of every pool, and return the coroutines that apply it, by pool. Pools with a
        request in progress to their cloud are left out.

        Pools that have neither sites nor a plan any more are forgotten, as each machine without a pool is a
        pool of its own.
        """
        pools = by_pool(self._sites())
        linked = {name: sum(site.state in SERVING_STATES for site in pools[name]) for name in pools}
        busy = {name: busy_machines(sites) for name, sites in pools.items()}
        needed = needed_machines(busy, linked, self._sizes, self._bounds, self._plan.budget_usd_per_hour)
        for gone in self.desired.keys() - needed.keys():
            del self.desired[gone], self.machines[gone], self._stabilizers[gone]
        work = {}
        for name in needed.keys() | self._groups.keys():
            serving = linked.get(name, 0)
            stabilizer = self._stabilizers.setdefault(
                name, Stabilizer(self._plan.up_after_s, self._plan.down_after_s)
            )
            # Also while a request is in progress, so that the window has no gap.
            stabilizer.observe(self._clock(), needed.get(name, 0))
            if name not in self._asking:
                work[name] = self._reconcile_pool(name, serving, stabilizer)
        return work

    async def _reconcile_pool(self, name: str, serving: int, stabilizer: Stabilizer) -> None:
        try:
            await self._resize(name, serving, stabilizer)
        except GroupFailed as exc:
            log.warning("pool %s keeps its size: %s", name, exc)
        except Exception:
            log.exception("pool %s keeps its size: its cloud answered in an unforeseen way", name)
        finally:
            self._asking.pop(name, None)

    async def _resize(self, name: str, serving: int, stabilizer: Stabilizer) -> None:
        group = self._groups.get(name)
        now = await group.size() if group else serving
        if group:
            self._sizes[name] = now
        if group and not serving and stabilizer.newest < now:
            stabilizer.restart()
            self._report_unseen(name, now)
        else:
            self._unseen.pop(name, None)
        self.machines[name] = serving
        self.desired[name] = size = stabilizer.size(now)
        if group and size != now:
            await group.resize(size)
            log.info("pool %s: %d machines instead of %d", name, size, now)

    def _report_unseen(self, name: str, machines: int) -> None:
        """Log once that a pool keeps its size because none of its machines is linked here."""
        now_s = self._clock()
        if now_s - self._unseen.setdefault(name, now_s) >= self._plan.down_after_s:
            log.warning("pool %s keeps its size: none of its %d machines is linked here", name, machines)
            self._unseen[name] = inf

    def pools(self) -> list[Pool]:
        """Return all pools for the page, sorted by name."""
        return [Pool(name, self.machines[name], size) for name, size in sorted(self.desired.items())]

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges for Prometheus."""
        desired = GaugeMetricFamily(
            "mico_pool_desired_machines", "Machines that a pool should have", labels=["pool"]
        )
        serving = GaugeMetricFamily("mico_pool_machines", "Machines of a pool that serve", labels=["pool"])
        for name, size in self.desired.items():
            desired.add_metric([name], size)
            serving.add_metric([name], self.machines[name])
        yield desired
        yield serving
