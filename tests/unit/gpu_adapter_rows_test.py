"""Adapters in the products of few rows against each row alone, some rows of the base, some padding."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.support import interpreted  # noqa: F401 - skips where there is no Triton

# isort: split
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from site_engine.core.chain import Chain
from site_engine.core.request import Request
from site_engine.core.schedule_plan import ScheduledChunk, SchedulePlan
from site_engine.cuda import skinny_gemm
from site_engine.cuda.adapters import TILE_NUMBERS, AdapterArenas, StepAdapters
from site_engine.cuda.own_layers import UNIT_BYTES
from site_engine.variants.changes import LoadedVariant
from site_engine.variants.projections import Projection, Size

DEPTH, WIDTH, LAYER, SLOTS = 136, 600, 1, 4
SIZES = [
    Size(DEPTH, (72, 24, 24), True),
    Size(72, (DEPTH,), False),
    Size(DEPTH, (WIDTH, WIDTH), False),
    Size(WIDTH, (DEPTH,), False),
]
NOT_LOADED = 1  # a slot that no row may read
# the slots of rows, None for the base's; then the rows of padding
ROWS: list[tuple[list[int | None], int]] = [
    ([], 2),
    ([2], 0),
    ([2], 1),
    ([None, 0], 0),
    ([3, None, 0], 1),
    ([0] * 17, 0),
    ([None] * 17 + [2], 6),
    ([(None, 0, 2, 3)[at % 4] for at in range(40)], 24),
]


@pytest.fixture(autouse=True)
def fill_unwritten_memory() -> Iterator[None]:
    """Make what no kernel has written NaN, or the largest number."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


class Scene:
    """Arenas with random adapters and a step of the rows."""

    def __init__(self, slots: list[int | None], padding: int) -> None:
        self.draw = torch.Generator().manual_seed(len(slots))
        self.rows = len(slots) + padding
        self.slots = [*slots, *[slots[-1] if slots else None] * padding]
        self.arenas = AdapterArenas(SIZES, 2, SLOTS, rank=16, like=torch.zeros(1))
        for arena in self.arenas._arenas:
            for room in arena[:4]:
                room.copy_(self.some(*room.shape) * 0.3)
                room[NOT_LOADED] = torch.nan
        plan = SchedulePlan([ScheduledChunk(self.request(at, slot), 3, 1, True)
                             for at, slot in enumerate(slots)])  # fmt: skip
        tiles = np.zeros((self.arenas.tiles(self.rows), TILE_NUMBERS), dtype=np.int32)
        self.arenas.fill(tiles, plan, self.rows)
        self.step = StepAdapters(self.arenas, torch.from_numpy(tiles), self.rows)

    def request(self, at: int, slot: int | None) -> Request:
        request = Request(str(at), [0] * 9)
        if slot is not None:
            request.variant = LoadedVariant(Chain(str(at), str(at), (), 0, ()), {}, rank=16)
            self.arenas.slot_of[request.variant] = slot
        return request

    def some(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.draw)

    def product(self, projection: Projection) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return random rows, a random weight, and the product that each row has with its adapter."""
        size, arena = SIZES[projection], self.arenas._arenas[projection]
        given, weight = self.some(self.rows, size.depth), self.some(sum(size.columns), size.depth)
        weight *= size.depth**-0.5
        wanted = given @ weight.t()
        for row, slot in enumerate(self.slots):
            if slot is None:
                continue
            down, up, scales = (room[slot, LAYER] for room in arena[:3])
            shrunk = (down @ given[row]).view(len(size.columns), -1)
            parts = [part @ shrunk[at] for at, part in enumerate(up.split(size.columns))]
            wanted[row] += torch.cat([part * scale for part, scale in zip(parts, scales, strict=True)])
            wanted[row] += arena.biases[slot, LAYER] if size.biased else 0.0
        return given, weight, wanted


@pytest.fixture(params=ROWS, ids=lambda rows: f"{len(rows[0])} rows, {rows[1]} of padding")
def scene(request: pytest.FixtureRequest) -> Scene:
    return Scene(*request.param)


def test_a_product_adds_what_the_adapter_of_each_row_does(scene: Scene) -> None:
    projection = Projection.QUERY_KEY_VALUE
    given, weight, wanted = scene.product(projection)
    got = skinny_gemm.whole(given, weight, None, scene.step.product(LAYER, projection), pdl=False)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_a_gate_is_opened_with_what_adapters_add_to_both_of_its_products(scene: Scene) -> None:
    given, weight, wanted = scene.product(Projection.GATE_UP)
    got = skinny_gemm.gated(given, weight, scene.step.product(LAYER, Projection.GATE_UP), pdl=False)
    gate, up = wanted.chunk(2, -1)
    torch.testing.assert_close(got, F.silu(gate) * up, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("projection", [Projection.OUTPUT, Projection.DOWN])
def test_the_parts_of_a_product_add_up_to_it_with_the_adapters(scene: Scene, projection: Projection) -> None:
    given, weight, wanted = scene.product(projection)
    parts = skinny_gemm.parts(given, weight, scene.step.product(LAYER, projection), pdl=False)
    assert len(parts) == (3 if projection is Projection.DOWN else 1)
    torch.testing.assert_close(parts.sum(0), wanted, rtol=1e-4, atol=1e-4)


def test_a_step_without_adapters_is_the_base_s_bit_for_bit() -> None:
    scene = Scene([None, None], 0)
    for projection, product in (
        (
            Projection.QUERY_KEY_VALUE,
            lambda *given: skinny_gemm.whole(*given[:2], None, *given[2:], pdl=False),
        ),
        (Projection.GATE_UP, lambda *given: skinny_gemm.gated(*given, pdl=False)),
        (Projection.DOWN, lambda *given: skinny_gemm.parts(*given, pdl=False)),
    ):
        given, weight, _ = scene.product(projection)
        adapted = product(given, weight, scene.step.product(LAYER, projection))
        assert torch.equal(adapted, product(given, weight))


@pytest.mark.parametrize("projection", list(Projection))
def test_each_row_is_computed_by_its_version_of_the_weight(scene: Scene, projection: Projection) -> None:
    """Two slots share a version, the third and the base have the base's."""
    given, weight, wanted = scene.product(projection)
    version = scene.some(*weight.shape) * weight.shape[1] ** -0.5
    own = torch.zeros(SLOTS, dtype=torch.int64)
    own[[0, 3]] = (version.data_ptr() - weight.data_ptr()) // UNIT_BYTES
    other = [row for row, slot in enumerate(scene.slots) if slot in {0, 3}]
    wanted[other] += given[other] @ (version - weight).t()
    adapters = scene.step.product(LAYER, projection)._replace(own=own)
    if projection is Projection.QUERY_KEY_VALUE:
        got = skinny_gemm.whole(given, weight, None, adapters, pdl=False)
    elif projection is Projection.GATE_UP:
        gate, up = wanted.chunk(2, -1)
        wanted = F.silu(gate) * up
        got = skinny_gemm.gated(given, weight, adapters, pdl=False)
    else:
        got = skinny_gemm.parts(given, weight, adapters, pdl=False).sum(0)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [3, 150])
def test_versions_of_many_rows_are_computed_without_adapters(rows: int) -> None:
    draw = torch.Generator().manual_seed(rows)
    given, weight, version = (
        torch.randn(*shape, generator=draw) for shape in ((rows, 70), (40, 70), (40, 70))
    )
    own = torch.tensor([0, (version.data_ptr() - weight.data_ptr()) // UNIT_BYTES])
    slots = torch.randint(-1, 2, (rows,), generator=draw, dtype=torch.int32)
    got = skinny_gemm.owned(given, weight, weight[:, 0].contiguous(), skinny_gemm.Versions(own, slots))
    wanted = torch.where((slots == 1)[:, None], given @ version.t(), given @ weight.t()) + weight[:, 0]
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
