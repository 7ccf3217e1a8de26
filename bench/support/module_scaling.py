"""Replicate and move layers of a model over devices as CoCoServe does, and predict what that gains. Pure.

Wu et al., Unlock the Potential of Fine-grained LLM Serving via Dynamic Module Scaling (arXiv:2507.18006): its
scale-up, its scale-down in three phases, and its model of the speed-up, by which a layer on p devices takes
a p-th of its time. Beside it the time that a step of decoding takes: every replica reads all of the layer's
weights, whatever its share of the rows. Written from the published description; no code of it was used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from itertools import groupby
from typing import NamedTuple, TypeAlias

Holders: TypeAlias = tuple[frozenset[int], ...]
"""The devices that hold each layer, at least one."""


class LayerCost(NamedTuple):
    """Seconds of one layer in a step. `hop_s`: to scatter rows to other devices, or to gather them."""

    weights_s: float
    row_s: float
    kv_row_s: float = 0.0
    hop_s: float = 0.0

    def seconds(self, rows: int) -> float:
        return max(self.weights_s, self.row_s * rows) + self.kv_row_s * rows


def published_speedup(holders: Holders) -> float:
    """Return the speed-up by the published model: each layer's time is divided by its replicas."""
    return len(holders) / sum(1 / len(each) for each in holders)


def predicted_speedup(holders: Holders, rows: int, cost: LayerCost, rest_s: float = 0.0) -> float:
    """Return the speed-up of a step whose rows are divided over the devices of each layer.

    It takes a hop at both ends of each run of layers of the same devices. `rest_s`: of the step, beside
    layers.
    """
    once = rest_s + len(holders) * cost.seconds(rows)
    taken = rest_s + sum(cost.seconds(-(-rows // len(each))) for each in holders)
    runs = sum(len(devices) > 1 for devices, _ in groupby(holders))
    return once / (taken + 2 * runs * cost.hop_s)


def scale_up(
    holders: Holders,
    room: Mapping[int, int],
    speedup: Callable[[Holders], float] = published_speedup,
    least_gain: float = 0.0,
) -> Holders:
    """Replicate layers one by one to devices with `room` for so many, the roomiest device first.

    A device gets the layer that makes its run longest, so that rows change devices rarely; of equals the one
    with the fewest replicas, then the first. It ends with the room, or where a layer gains no more than
    `least_gain`.
    """
    for device in sorted(room, key=lambda each: (-room[each], each)):
        for _ in range(room[device]):
            layers = [layer for layer, its in enumerate(holders) if device not in its]
            if not layers:
                break
            layer = max(layers, key=lambda at: (_run(holders, at, device), -len(holders[at]), -at))
            more = _with(holders, layer, holders[layer] | {device})
            if speedup(more) - speedup(holders) <= least_gain:
                break
            holders = more
    return holders


def _run(holders: Holders, layer: int, device: int) -> int:
    """Return the layers of the run that a device holds once it has this one, too."""
    first = last = layer
    while first > 0 and device in holders[first - 1]:
        first -= 1
    while last + 1 < len(holders) and device in holders[last + 1]:
        last += 1
    return last - first + 1


def _with(holders: Holders, layer: int, devices: frozenset[int]) -> Holders:
    return (*holders[:layer], devices, *holders[layer + 1 :])


class Phase(Enum):
    MIGRATE = "migrate"
    EVICT = "evict"
    REDUCE = "reduce"


class Action(NamedTuple):
    """`layer` and `to` of a migration, `layer` of an eviction; `rows` that are taken out and offloaded."""

    phase: Phase
    layer: int = -1
    to: int = -1
    rows: int = 0


class Cluster(NamedTuple):
    """Layers on devices, and a batch whose keys and values are on one of them, `home`.

    `free_bytes` of a device is negative where it needs more than it has.
    """

    holders: Holders
    free_bytes: Mapping[int, int]
    layer_bytes: int
    home: int
    batch: int
    row_bytes: int


def scale_down(cluster: Cluster, device: int) -> tuple[Cluster, list[Action]]:
    """Relieve a device that lacks memory, by the least harm first.

    Migrate layers that it alone holds, the last first, to the device with the most room; then evict its
    replicas, first where most others hold the layer; then take rows out of the batch and offload their keys
    and values, down to one row.
    """
    actions: list[Action] = []
    while cluster.free_bytes[device] < 0:
        action = _migration(cluster, device) or _eviction(cluster, device) or _reduction(cluster, device)
        if action is None:
            break
        actions.append(action)
        cluster = _after(cluster, device, action)
    return cluster, actions


def _migration(cluster: Cluster, device: int) -> Action | None:
    others = [each for each in cluster.free_bytes if each != device]
    to = max(others, key=lambda each: cluster.free_bytes[each], default=None)
    alone = [at for at, its in enumerate(cluster.holders) if its == {device}]
    if to is None or not alone or cluster.free_bytes[to] < cluster.layer_bytes:
        return None
    return Action(Phase.MIGRATE, alone[-1], to)


def _eviction(cluster: Cluster, device: int) -> Action | None:
    replicated = [at for at, its in enumerate(cluster.holders) if device in its and len(its) > 1]
    if not replicated:
        return None
    return Action(Phase.EVICT, max(replicated, key=lambda at: (len(cluster.holders[at]), at)))


def _reduction(cluster: Cluster, device: int) -> Action | None:
    if device != cluster.home or cluster.batch < 2 or cluster.row_bytes < 1:
        return None
    lacking = -(cluster.free_bytes[device] // cluster.row_bytes)
    return Action(Phase.REDUCE, rows=min(lacking, cluster.batch - 1))


def _after(cluster: Cluster, device: int, action: Action) -> Cluster:
    free = dict(cluster.free_bytes)
    if action.phase is Phase.REDUCE:
        free[device] += action.rows * cluster.row_bytes
        return cluster._replace(free_bytes=free, batch=cluster.batch - action.rows)
    free[device] += cluster.layer_bytes
    left = cluster.holders[action.layer] - {device}
    if action.phase is Phase.MIGRATE:
        free[action.to] -= cluster.layer_bytes
        left = frozenset({action.to})
    return cluster._replace(free_bytes=free, holders=_with(cluster.holders, action.layer, left))
