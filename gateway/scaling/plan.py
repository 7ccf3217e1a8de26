"""Read the scaling plan: the pools that the gateway may resize, their bounds and the hourly budget."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import httpx
import msgspec

from gateway.scaling.groups import AwsGroup, AzureGroup, GcpGroup, Group
from gateway.scaling.sizing import Bounds

Positive = Annotated[float, msgspec.Meta(gt=0)]


class PoolPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One pool. `group` is the cloud's name of the machine group; the other address fields depend on the
    cloud.

    A pool may become empty only with `fewest = 0`. Queries that no site can serve are refused and do not
    count as load, so an empty pool grows again only by load that the other pools can't take.
    """

    cloud: Literal["aws", "gcp", "azure"]
    group: str
    most: Annotated[int, msgspec.Meta(ge=0)]
    fewest: Annotated[int, msgspec.Meta(ge=0)] = 1
    usd_per_hour: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    region: str = ""
    project: str = ""
    subscription: str = ""
    resource_group: str = ""

    def __post_init__(self) -> None:
        self.bounds()
        needs = {
            "aws": ("region",),
            "gcp": ("region", "project"),
            "azure": ("subscription", "resource_group"),
        }
        if missing := [name for name in needs[self.cloud] if not getattr(self, name)]:
            raise ValueError(f"a pool of {self.cloud} needs {' and '.join(missing)}")

    def bounds(self) -> Bounds:
        """Return the pool's bounds. Raises ValueError if they contradict each other."""
        return Bounds(self.fewest, self.most, self.usd_per_hour)

    def open(self, http: httpx.AsyncClient) -> Group:
        """Return the client of the pool's machine group."""
        if self.cloud == "aws":
            return AwsGroup(self.group, self.region)
        if self.cloud == "gcp":
            return GcpGroup(self.project, self.region, self.group, http)
        return AzureGroup(self.subscription, self.resource_group, self.group, http)


class ScalingPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole plan, by pool name. Times in seconds. Without a budget, only `most` limits a pool's cost."""

    pool: dict[str, PoolPlan] = {}
    budget_usd_per_hour: Positive = math.inf
    up_after_s: Positive = 30.0
    down_after_s: Positive = 600.0
    every_s: Positive = 10.0


def read_plan(path: Path) -> ScalingPlan:
    """Read and validate the plan. Raises ValueError that names the file and the mistake."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=ScalingPlan)
    except (OSError, ValueError) as exc:
        raise ValueError(f"{path}: {exc}") from exc
