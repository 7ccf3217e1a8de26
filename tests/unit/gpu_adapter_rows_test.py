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
from site_engine.core.scheduler import ScheduledChunk, SchedulePlan
from site_engine.cuda import skinny_gemm
from site_engine.cuda.adapters import TILE_NUMBERS, AdapterArenas, StepAdapters
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
        self.slots = [*slots, *[None] * padding]
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


def test_rows_expanded_before_attention_are_those_of_their_slot(scene: Scene) -> None:
    projection = Projection.QUERY_KEY_VALUE
    given, weight, wanted = scene.product(projection)
    out, shrunk = skinny_gemm.shrunk_whole(
        given, weight, None, scene.step.shrink(LAYER, projection), pdl=False
    )
    got = scene.step.expand(LAYER, projection, shrunk, out, pdl=False)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_rows_expanded_in_the_gate_are_those_of_their_slot(scene: Scene) -> None:
    given, weight, wanted = scene.product(Projection.GATE_UP)
    shrink = scene.step.shrink(LAYER, Projection.GATE_UP)
    both = skinny_gemm.shrunk_whole(given, weight, None, shrink, pdl=False)
    gate, up = wanted.chunk(2, -1)
    torch.testing.assert_close(
        scene.step.gate(LAYER, *both, pdl=False), F.silu(gate) * up, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("projection", [Projection.OUTPUT, Projection.DOWN])
def test_rows_expanded_in_the_norm_are_those_of_their_slot(scene: Scene, projection: Projection) -> None:
    given, weight, wanted = scene.product(projection)
    residual, scale = scene.some(scene.rows, DEPTH), scene.some(DEPTH)
    total = residual + wanted
    both = skinny_gemm.shrunk_parts(given, weight, scene.step.shrink(LAYER, projection), pdl=False)
    assert len(both[0]) == len(both[1]) == (3 if projection is Projection.DOWN else 1)
    normed = scene.step.add_parts_norm(LAYER, projection, *both, residual, scale, 1e-6, pdl=False)
    torch.testing.assert_close(residual, total, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(normed, F.rms_norm(total, (DEPTH,), scale, 1e-6), rtol=1e-4, atol=1e-4)
