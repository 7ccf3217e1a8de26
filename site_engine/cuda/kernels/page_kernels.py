"""Triton kernels that copy pages of keys and values."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_pages(
    rooms,  # int64: the first room, the pages of one layer's keys or values
    distances,  # [rooms], int64: numbers from the first room to each
    starts,  # [rooms + 1], int64: numbers before each room's part of a packed page, and those of all
    pages,  # [pages], int64
    packed,  # [pages, numbers of a packed page], int64
    count,  # rooms
    PACK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy pages of all rooms into `packed`, where the parts of a page lie side by side, or from there back.
    One program for each BLOCK numbers of a page in a room.
    """
    room = tl.program_id(1)
    start = tl.load(starts + room)
    width = tl.load(starts + room + 1) - start
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    here = at < width
    page = tl.load(pages + tl.program_id(0))
    own = rooms + tl.load(distances + room) + page * width + at
    other = packed + tl.program_id(0) * tl.load(starts + count) + start + at
    if PACK:
        tl.store(other, tl.load(own, mask=here), mask=here)
    else:
        tl.store(own, tl.load(other, mask=here), mask=here)
