"""Triton kernels of adapters: rows of one slot are gathered into tiles, shrunk to the rank, expanded again.

Rows are selected by index; what a tile lacks is neither read nor written.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE_ROWS = tl.constexpr(16)


@triton.jit
def shrink_rows(
    x,  # [tokens, depth]
    down,  # [slots, layers, groups * RANK, depth], from the layer on
    tiles,  # [tiles, 1 + TILE_ROWS]: slot, or -1 for the base; tokens, or -1 for none
    shrunk,  # [parts, tokens, groups * RANK] in float32
    tokens,
    depth,
    width,  # groups * RANK
    slot_stride,
    part_depth,
    RANK: tl.constexpr,
    DEPTH: tl.constexpr,  # of one block
):
    """Compute each part of the depth of x down^T, for the rows of one tile and one group."""
    tile = tiles + tl.program_id(0) * (1 + TILE_ROWS)
    slot = tl.load(tile).to(tl.int64)
    if slot < 0:
        return
    rows = tl.load(tile + 1 + tl.arange(0, TILE_ROWS))
    real = rows >= 0
    at = tl.where(real, rows, 0).to(tl.int64)
    ranks = tl.program_id(1) * RANK + tl.arange(0, RANK)
    k = tl.arange(0, DEPTH)
    begin = tl.program_id(2) * part_depth
    end = tl.minimum(begin + part_depth, depth)
    total = tl.zeros([TILE_ROWS, RANK], tl.float32)
    for block in range(begin, end, DEPTH):
        inside = block + k < end
        some = tl.load(
            x + at[:, None] * depth + block + k[None, :], mask=real[:, None] & inside[None, :], other=0.0
        )
        factor = tl.load(
            down + slot * slot_stride + ranks[None, :] * depth + block + k[:, None],
            mask=inside[:, None],
            other=0.0,
        )
        total = tl.dot(some, factor, total, input_precision="ieee")
    to = shrunk + (tl.program_id(2) * tokens + at[:, None]) * width + ranks[None, :]
    tl.store(to, total, mask=real[:, None])


@triton.jit
def expand_rows(
    shrunk,  # [parts, tokens, groups * RANK] in float32
    up,  # [slots, layers, columns, RANK], from the layer on
    scales,  # [slots, layers, groups] in float32, from the layer on
    biases,  # [slots, layers, columns], from the layer on; BIASED: what is added to the base's
    tiles,  # [tiles, 1 + TILE_ROWS]
    columns_of,  # [spans, 3]: group, first column, column after the last
    out,  # [tokens, columns], added to in place; ALONE: in float32, receives what is added, 0 for the base
    tokens,
    columns,
    width,
    slot_stride,
    scale_stride,
    bias_stride,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,  # of one program, at least those of a span
    ALONE: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Compute scale * (shrunk up^T), and the bias, for the rows of one tile and one span of columns."""
    tile = tiles + tl.program_id(0) * (1 + TILE_ROWS)
    slot = tl.load(tile).to(tl.int64)
    if slot < 0 and not ALONE:
        return
    rows = tl.load(tile + 1 + tl.arange(0, TILE_ROWS))
    real = rows >= 0
    at = tl.where(real, rows, 0).to(tl.int64)
    span = columns_of + tl.program_id(1) * 3
    group = tl.load(span)
    n = tl.load(span + 1) + tl.arange(0, COLUMNS)
    exists = n < tl.load(span + 2)
    to = out + at[:, None] * columns + n[None, :]
    written = real[:, None] & exists[None, :]
    if slot < 0:
        tl.store(to, tl.zeros([TILE_ROWS, COLUMNS], tl.float32).to(out.dtype.element_ty), mask=written)
        return
    r = tl.arange(0, RANK)
    given = tl.zeros([TILE_ROWS, RANK], tl.float32)
    for part in tl.static_range(PARTS):
        some = shrunk + (part * tokens + at[:, None]) * width + group * RANK + r[None, :]
        given += tl.load(some, mask=real[:, None], other=0.0)
    factor = tl.load(
        up + slot * slot_stride + n[None, :] * RANK + r[:, None], mask=exists[None, :], other=0.0
    )
    added = tl.dot(given.to(factor.dtype), factor, input_precision="ieee")
    added *= tl.load(scales + slot * scale_stride + group)
    if BIASED:
        added += tl.load(biases + slot * bias_stride + n, mask=exists, other=0.0).to(tl.float32)[None, :]
    if not ALONE:
        added += tl.load(to, mask=written, other=0.0).to(tl.float32)
    tl.store(to, added.to(out.dtype.element_ty), mask=written)
