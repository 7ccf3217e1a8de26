"""Triton kernels of adapters: rows of one slot are gathered into tiles, shrunk to the rank, expanded again.

Slots without rows are neither read nor written.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE_ROWS = tl.constexpr(16)


@triton.jit
def shrink_rows(
    x,  # [tokens, depth]
    down,  # [slots, layers, GROUPS * RANK, depth], from the layer on
    scales,  # [slots, layers, GROUPS] in float32, from the layer on
    tiles,  # [tiles, 1 + TILE_ROWS]: slot, or -1 for the base; tokens, or -1 for none
    shrunk,  # [parts, tokens, GROUPS * RANK] in float32
    tokens,
    depth,
    slot_stride,
    scale_stride,
    part_depth,
    RANK: tl.constexpr,
    GROUPS: tl.constexpr,
    TOGETHER: tl.constexpr,  # groups of one program
    WIDTH: tl.constexpr,  # at least their ranks
    DEPTH: tl.constexpr,  # of one block
):
    """Compute each part of the depth of scale * (x down^T), for the rows of one tile and some groups."""
    tile = tiles + tl.program_id(0) * (1 + TILE_ROWS)
    slot = tl.load(tile)
    if slot >= 0:
        rows = tl.load(tile + 1 + tl.arange(0, TILE_ROWS))
        shrink_tile(x, down, scales, rows, slot.to(tl.int64), shrunk, tl.program_id(1) * TOGETHER,
                tl.program_id(2), tokens, depth, slot_stride, scale_stride, part_depth, RANK, GROUPS,
                TOGETHER, WIDTH, DEPTH)  # fmt: skip


@triton.jit
def shrink_tile(
    x, down, scales, rows, slot, shrunk, group, part, tokens, depth, slot_stride, scale_stride, part_depth,
    RANK: tl.constexpr, GROUPS: tl.constexpr, TOGETHER: tl.constexpr, WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    real = rows >= 0
    at = tl.where(real, rows, 0).to(tl.int64)
    exists = tl.arange(0, WIDTH) < TOGETHER * RANK
    ranks = group * RANK + tl.where(exists, tl.arange(0, WIDTH), 0)
    scale = tl.load(scales + slot * scale_stride + ranks // RANK)
    k = tl.arange(0, DEPTH)
    begin = part * part_depth
    end = tl.minimum(begin + part_depth, depth)
    total = tl.zeros([TILE_ROWS, WIDTH], tl.float32)
    for block in range(begin, end, DEPTH):
        inside = block + k < end
        some = tl.load(
            x + at[:, None] * depth + block + k[None, :], mask=real[:, None] & inside[None, :], other=0.0
        )
        factor = tl.load(
            down + slot * slot_stride + ranks[None, :] * depth + block + k[:, None],
            mask=inside[:, None] & exists[None, :],
            other=0.0,
        )
        total = tl.dot(some, factor, total, input_precision="ieee")
    to = shrunk + (part * tokens + at[:, None]) * (GROUPS * RANK) + ranks[None, :]
    tl.store(to, total * scale[None, :], mask=real[:, None] & exists[None, :])


@triton.jit
def expand_rows(
    shrunk,  # [parts, tokens, groups * RANK] in float32
    up,  # [slots, layers, columns, RANK], from the layer on
    biases,  # [slots, layers, columns], from the layer on; BIASED: what is added to the base's
    tiles,  # [tiles, 1 + TILE_ROWS]
    columns_of,  # [spans, 3]: group, first column, column after the last
    out,  # [tokens, columns], added to in place
    tokens,
    columns,
    width,
    slot_stride,
    bias_stride,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,  # of one program, at least those of a span
    BIASED: tl.constexpr,
):
    """Add shrunk up^T, and the bias, for the rows of one tile and one span of columns."""
    tile = tiles + tl.program_id(0) * (1 + TILE_ROWS)
    slot = tl.load(tile).to(tl.int64)
    span = columns_of + tl.program_id(1) * 3
    group = tl.load(span)
    n = tl.load(span + 1) + tl.arange(0, COLUMNS)
    exists = n < tl.load(span + 2)
    if slot >= 0:
        rows = tl.load(tile + 1 + tl.arange(0, TILE_ROWS))
        real = rows >= 0
        at = tl.where(real, rows, 0).to(tl.int64)
        r = tl.arange(0, RANK)
        given = tl.zeros([TILE_ROWS, RANK], tl.float32)
        for part in tl.static_range(PARTS):
            some = shrunk + (part * tokens + at[:, None]) * width + group * RANK + r[None, :]
            given += tl.load(some, mask=real[:, None], other=0.0)
        factor = up + slot * slot_stride + n[None, :] * RANK + r[:, None]
        its = tl.load(factor, mask=exists[None, :], other=0.0)
        added = tl.dot(given.to(its.dtype), its, input_precision="ieee")
        if BIASED:
            added += tl.load(biases + slot * bias_stride + n, mask=exists, other=0.0).to(tl.float32)[None, :]
        to = out + at[:, None] * columns + n[None, :]
        written = real[:, None] & exists[None, :]
        added += tl.load(to, mask=written, other=0.0).to(tl.float32)
        tl.store(to, added.to(out.dtype.element_ty), mask=written)


@triton.jit
def prepare_rows(
    tiles,  # [count, 1 + TILE_ROWS]
    slots,  # [rows]
    used,  # [count]
    counts,  # [2]
    arrived,  # [counters]
    count,
    counters,
    COUNT_PAD: tl.constexpr,
    COUNTERS_PAD: tl.constexpr,
    FEW: tl.constexpr,
):
    """Write the slot of each row; FEW: and the slots that have rows, and their number; set counters to 0.

    The tiles of one slot are side by side.
    """
    tile = tiles + tl.program_id(0) * (1 + TILE_ROWS)
    rows = tl.load(tile + 1 + tl.arange(0, TILE_ROWS))
    tl.store(slots + rows, tl.load(tile) + rows * 0, mask=rows >= 0)
    if FEW and tl.program_id(0) == 0:
        t = tl.arange(0, COUNT_PAD)
        slot = tl.load(tiles + t * (1 + TILE_ROWS), mask=t < count, other=-1)
        before = tl.load(tiles + (t - 1) * (1 + TILE_ROWS), mask=(t > 0) & (t < count), other=-1)
        starts = (slot >= 0) & (slot != before)
        tl.store(used + tl.cumsum(starts.to(tl.int32), 0) - 1, slot, mask=starts)
        tl.store(counts, tl.sum((slot >= 0).to(tl.int32), 0))
        tl.store(counts + 1, tl.sum(starts.to(tl.int32), 0))
        c = tl.arange(0, COUNTERS_PAD)
        tl.store(arrived + c, c * 0, mask=c < counters)
