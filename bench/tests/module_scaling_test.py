"""The published scaling of modules: no plan exceeds memory, no layer is lost, phases come in their order."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.studies.modules import STEP_MS, cost_of_layer
from bench.support.module_scaling import (
    Action,
    Cluster,
    Holders,
    LayerCost,
    Phase,
    predicted_speedup,
    published_speedup,
    scale_down,
    scale_up,
)

ALONE: Holders = (frozenset({0}),) * 40
placements = st.lists(st.sets(st.integers(0, 3), min_size=1).map(frozenset), min_size=1, max_size=12).map(
    tuple
)


def spread(twice: int, replicas: int = 2, layers: int = 40) -> Holders:
    return tuple(frozenset(range(replicas if at < twice else 1)) for at in range(layers))


def test_the_published_model_divides_each_layers_time() -> None:
    assert published_speedup(ALONE) == 1.0
    assert published_speedup(spread(40)) == pytest.approx(2.0)
    assert published_speedup(spread(16, layers=32)) == pytest.approx(4 / 3)


def test_rows_that_do_not_fill_a_device_gain_nothing_by_a_second_one() -> None:
    cost = LayerCost(weights_s=1e-4, row_s=1e-6, hop_s=2e-5)
    assert predicted_speedup(spread(40), 8, cost._replace(hop_s=0.0)) == pytest.approx(1.0)
    assert predicted_speedup(spread(40), 8, cost) < 0.999
    assert predicted_speedup(spread(40), 10_000, cost) == pytest.approx(2.0, rel=0.01)


@given(placements, st.integers(1, 512))
def test_no_division_of_rows_gains_more_than_the_published_model_says(holders: Holders, rows: int) -> None:
    cost = LayerCost(1e-4, 1e-6, 1e-7)
    assert predicted_speedup(holders, rows, cost) <= published_speedup(holders) + 1e-9


def test_the_predicted_steps_are_within_a_quarter_of_those_that_were_measured() -> None:
    cost, rest_s = cost_of_layer()
    for rows, measured_ms in STEP_MS.items():
        assert (rest_s + 32 * cost.seconds(rows)) * 1e3 == pytest.approx(measured_ms, rel=0.25), rows


@given(placements, st.dictionaries(st.integers(0, 5), st.integers(0, 12)))
def test_scale_up_fills_no_device_beyond_its_room_and_never_slows_by_its_own_model(
    holders: Holders, room: dict[int, int]
) -> None:
    found = scale_up(holders, room)
    for device in range(6):
        added = sum(device in after - before for before, after in zip(holders, found, strict=True))
        assert added <= room.get(device, 0)
    assert all(before <= after for before, after in zip(holders, found, strict=True))
    assert published_speedup(found) >= published_speedup(holders)


def test_scale_up_replicates_runs_on_the_roomiest_device_first() -> None:
    found = scale_up(ALONE, {1: 10, 2: 25})
    assert [its for its, _ in groupby(found)] == [{0, 2}, {0, 1}, {0}]
    assert [len(list(run)) for _, run in groupby(found)] == [25, 10, 5]
    assert scale_up(ALONE, {1: 10}, least_gain=1.0) == ALONE


def clusters() -> st.SearchStrategy[Cluster]:
    return st.builds(
        lambda holders, free, lacking, batch, row: Cluster(holders, {**free, 0: -lacking}, 10, 0, batch, row),
        placements,
        st.fixed_dictionaries({1: st.integers(0, 60), 2: st.integers(0, 60), 3: st.integers(0, 60)}),
        st.integers(1, 300),
        st.integers(1, 20),
        st.integers(1, 9),
    )


@given(clusters())
def test_scale_down_keeps_every_layer_and_takes_its_phases_in_order(cluster: Cluster) -> None:
    after, actions = scale_down(cluster, 0)
    assert all(after.holders)
    assert all(free >= 0 for device, free in after.free_bytes.items() if device != 0)
    order = [list(Phase).index(each.phase) for each in actions]
    assert order == sorted(order)
    assert after.batch >= 1
    if after.free_bytes[0] < 0:
        assert after.batch == 1
        assert not any(0 in its and len(its) > 1 for its in after.holders)


def test_scale_down_migrates_then_evicts_then_reduces() -> None:
    holders = (frozenset({0}), frozenset({0}), frozenset({0, 1}))
    cluster = Cluster(holders, {0: -25, 1: 10}, layer_bytes=10, home=0, batch=8, row_bytes=2)
    after, actions = scale_down(cluster, 0)
    assert actions == [
        Action(Phase.MIGRATE, 1, 1),
        Action(Phase.EVICT, 2),
        Action(Phase.REDUCE, rows=3),
    ]
    assert after.holders == (frozenset({0}), frozenset({1}), frozenset({1}))
    assert (after.free_bytes, after.batch) == ({0: 1, 1: 0}, 5)
