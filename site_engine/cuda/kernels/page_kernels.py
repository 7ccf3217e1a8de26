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
    packed,  # [1], int64: numbers from the first room to memory, perhaps another device's
    offset,  # numbers from there to packed pages [pages, numbers of a packed page]
    count,  # rooms
    PACK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy pages of all rooms into packed ones, where the parts of a page lie side by side, or from there
    back. One program for each BLOCK numbers of a page in a room.
    """
    at = tl.program_id(0).to(tl.int64)
    room = tl.program_id(1)
    part = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(starts + room)
    width = tl.load(starts + room + 1) - start
    here = part < width
    own = rooms + (tl.load(distances + room) + tl.load(pages + at) * width + part)
    other = rooms + (tl.load(packed) + offset + at * tl.load(starts + count) + start + part)
    if PACK:
        tl.store(other, tl.load(own, mask=here), mask=here)
    else:
        tl.store(own, tl.load(other, mask=here), mask=here)
