"""Pages of all layers come packed and go back as they were, by PyTorch and by the kernel, interpreted."""

from __future__ import annotations

import pytest
import torch

from site_engine.cuda.page_copies import DevicePageCopies
from site_engine.model.page_copies import PageCopies
from tests.support import interpreted  # noqa: F401 - skips where there is no Triton

# isort: split

SHAPES = {
    "alike": [(4, 2, 16)] * 4,
    "of other widths": [(4, 2, 16), (4, 2, 24), (4, 1, 700)],
    "of odd bytes": [(1, 1, 2), (1, 1, 5)],
}


@pytest.mark.parametrize("made", [PageCopies, DevicePageCopies])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_pages_come_packed_and_go_back_as_they_were(
    made: type[PageCopies], shapes: list[tuple[int, int, int]]
) -> None:
    draw = torch.Generator().manual_seed(1)
    rooms = [torch.randn(9, *shape, generator=draw).to(torch.bfloat16) for shape in shapes]
    before = [room.clone() for room in rooms]
    copies, pages = made(rooms), torch.tensor([7, 2, 5])
    packed = torch.full((4, copies.page_bytes), 255, dtype=torch.uint8)
    copies.pack(pages, packed[:3])
    assert bool((packed[3] == 255).all())
    for at, page in enumerate(pages.tolist()):
        parts = [room[page].view(torch.uint8).flatten() for room in before]
        assert torch.equal(packed[at], torch.cat(parts))
    for room in rooms:
        room[pages] = 0
    copies.unpack(packed[1:3], pages[1:])
    for room, its in zip(rooms, before, strict=True):
        assert not room[7].any()
        its[7] = 0
        assert torch.equal(room, its)
