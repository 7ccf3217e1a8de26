"""Triton kernels of adapters: rows of one slot are gathered into tiles, shrunk to the rank, expanded again.

Rows are selected by index; what a tile lacks is neither read nor written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from site_engine.cuda.kernels.skinny_gemm_kernels import fetch_lines, norm_sum, skinny_gemm_rows

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
    _shrink(x, down, tiles, shrunk, tl.program_id(0), tl.program_id(1), tl.program_id(2),
            tokens, depth, width, slot_stride, part_depth, RANK, DEPTH)  # fmt: skip


@triton.jit
def skinny_gemm_shrink_rows(
    x,  # [rows, depth]
    weight,  # [columns, depth]
    bias,  # [columns], only if BIAS
    out,  # [rows, columns]; SPLIT: [parts, rows, columns] in float32
    down,  # as of `shrink_rows`, as what follows
    tiles,
    shrunk,
    rows,
    columns,
    depth,
    part_depth,
    width,
    slot_stride,
    count,  # of tiles
    ROWS_PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    RANK: tl.constexpr,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """Compute the base's product and, by programs after its own, what adapters shrink the same rows to."""
    after = tl.program_id(0) - tl.cdiv(columns, COLUMNS)
    if after < 0:
        skinny_gemm_rows(x, weight, bias, out, rows, columns, depth, part_depth, ROWS_PAD, COLUMNS, DEPTH,
                         False, BIAS, SPLIT, EVEN, PDL, PREFETCH)  # fmt: skip
    else:
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        _shrink(x, down, tiles, shrunk, after % count, after // count, tl.program_id(1),
                rows, depth, width, slot_stride, part_depth, RANK, DEPTH)  # fmt: skip


@triton.jit
def _shrink(
    x,
    down,
    tiles,
    shrunk,
    number,  # of the tile
    group,
    part,
    tokens,
    depth,
    width,
    slot_stride,
    part_depth,
    RANK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    tile = tiles + number * (1 + TILE_ROWS)
    slot = tl.load(tile).to(tl.int64)
    if slot >= 0:
        rows = tl.load(tile + 1 + tl.arange(0, TILE_ROWS))
        real = rows >= 0
        at = tl.where(real, rows, 0).to(tl.int64)
        ranks = group * RANK + tl.arange(0, RANK)
        k = tl.arange(0, DEPTH)
        begin = part * part_depth
        end = tl.minimum(begin + part_depth, depth)
        total = tl.zeros([TILE_ROWS, RANK], tl.float32)
        for block in range(begin, end, DEPTH):
            inside = block + k < end
            some = tl.load(
                x + at[:, None] * depth + block + k[None, :],
                mask=real[:, None] & inside[None, :],
                other=0.0,
            )
            factor = tl.load(
                down + slot * slot_stride + ranks[None, :] * depth + block + k[:, None],
                mask=inside[:, None],
                other=0.0,
            )
            total = tl.dot(some, factor, total, input_precision="ieee")
        to = shrunk + (part * tokens + at[:, None]) * width + ranks[None, :]
        tl.store(to, total, mask=real[:, None])


@triton.jit
def expand_rows(
    shrunk,  # [parts, tokens, groups * RANK] in float32
    up,  # [slots, layers, columns, RANK], from the layer on
    scales,  # [slots, layers, groups] in float32, from the layer on
    biases,  # [slots, layers, columns], from the layer on; BIASED: what is added to the base's
    tiles,  # [tiles, 1 + TILE_ROWS]
    columns_of,  # [spans, 3]: group, first column, column after the last
    out,  # [tokens, columns], added to in place
    tokens,
    columns,
    width,
    slot_stride,
    scale_stride,
    bias_stride,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,  # of one program, at least those of a span
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add scale * (shrunk up^T), and the bias, for the rows of one tile and one span of columns."""
    tile = tiles + tl.program_id(0) * (1 + TILE_ROWS)
    slot = tl.load(tile).to(tl.int64)
    span = columns_of + tl.program_id(1) * 3
    group = tl.load(span)
    n = tl.load(span + 1) + tl.arange(0, COLUMNS)
    exists = n < tl.load(span + 2)
    factor = up + slot * slot_stride
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if slot >= 0:
            fetch_lines(factor + tl.where(exists, n, 0) * RANK)
        tl.extra.cuda.gdc_wait()
    if slot >= 0:
        rows = tl.load(tile + 1 + tl.arange(0, TILE_ROWS))
        real = rows >= 0
        at = tl.where(real, rows, 0).to(tl.int64)
        added = _expanded(shrunk, factor, scales + slot * scale_stride, at, real, n, exists, group,
                          tokens, width, RANK, PARTS)  # fmt: skip
        if BIASED:
            added += tl.load(biases + slot * bias_stride + n, mask=exists, other=0.0).to(tl.float32)[None, :]
        to = out + at[:, None] * columns + n[None, :]
        written = real[:, None] & exists[None, :]
        added += tl.load(to, mask=written, other=0.0).to(tl.float32)
        tl.store(to, added.to(out.dtype.element_ty), mask=written)


@triton.jit
def expand_gate(
    both,  # [tokens, 2 * size]: the base's gate, then its up projection
    shrunk,  # [parts, tokens, 2 * RANK] in float32
    up,  # [slots, layers, 2 * size, RANK], from the layer on
    scales,  # [slots, layers, 2] in float32, from the layer on
    tiles,  # [tiles, 1 + TILE_ROWS]
    out,  # [tokens, size]
    tokens,
    size,
    slot_stride,
    scale_stride,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,  # of one program
    PDL: tl.constexpr,
):
    """Compute silu(gate) * up with what adapters add to both, rounding as `silu_times` does."""
    tile = tiles + tl.program_id(0) * (1 + TILE_ROWS)
    slot = tl.load(tile).to(tl.int64)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = n < size
    factor = up + slot * slot_stride
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if slot >= 0:
            fetch_lines(factor + tl.where(exists, n, 0) * RANK)
            fetch_lines(factor + (size + tl.where(exists, n, 0)) * RANK)
        tl.extra.cuda.gdc_wait()
    rows = tl.load(tile + 1 + tl.arange(0, TILE_ROWS))
    real = rows >= 0
    at = tl.where(real, rows, 0).to(tl.int64)
    written = real[:, None] & exists[None, :]
    source = both + at[:, None] * 2 * size + n[None, :]
    opened = tl.load(source, mask=written, other=0.0).to(tl.float32)
    value = tl.load(source + size, mask=written, other=0.0).to(tl.float32)
    if slot >= 0:
        scale = scales + slot * scale_stride
        opened += _expanded(shrunk, factor, scale, at, real, n, exists, 0, tokens, 2 * RANK, RANK, PARTS)
        factor += size * RANK
        value += _expanded(shrunk, factor, scale, at, real, n, exists, 1, tokens, 2 * RANK, RANK, PARTS)
    dtype = out.dtype.element_ty
    gate = opened.to(dtype).to(tl.float32)
    gate = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    to = out + at[:, None] * size + n[None, :]
    tl.store(to, (gate * value.to(dtype).to(tl.float32)).to(dtype), mask=written)


@triton.jit
def _expanded(
    shrunk, factor, scales, at, real, n, exists, group, tokens, width,
    RANK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Return scale * (shrunk factor^T) for rows `at` and columns `n` of one slot and group."""
    r = tl.arange(0, RANK)
    given = tl.zeros([TILE_ROWS, RANK], tl.float32)
    for part in tl.static_range(PARTS):
        some = shrunk + (part * tokens + at[:, None]) * width + group * RANK + r[None, :]
        given += tl.load(some, mask=real[:, None], other=0.0)
    its = tl.load(factor + n[None, :] * RANK + r[:, None], mask=exists[None, :], other=0.0)
    return tl.dot(given.to(its.dtype), its, input_precision="ieee") * tl.load(scales + group)


@triton.jit
def expand_parts_norm(
    parts,  # [PARTS, rows, SIZE], as what follows of `add_parts_norm`
    residual,
    weight,
    out,
    shrunk,  # [PARTS, rows, RANK] in float32
    up,  # [slots, layers, SIZE, RANK], from the layer on
    scales,  # [slots, layers, 1] in float32, from the layer on
    slots,  # [rows]: of each row, or -1 for the base
    epsilon,
    rows,
    slot_stride,
    scale_stride,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,  # that are in registers at a time
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add and normalize as `add_parts_norm` does, with what the adapter of each row adds."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    at = tl.arange(0, SIZE_PAD)
    here = at < SIZE
    r = tl.arange(0, RANKS)
    factor = up + slot * slot_stride + at[:, None] * RANK + r[None, :]
    scale = tl.load(weight + at, mask=here, other=0.0)
    if PDL:
        if slot >= 0:
            fetch_lines(up + slot * slot_stride + tl.where(here, at, 0) * RANK)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    added = tl.load(parts + row * SIZE + at, mask=here, other=0.0)
    for part in tl.static_range(1, PARTS):
        added += tl.load(parts + (part * rows + row) * SIZE + at, mask=here, other=0.0)
    if slot >= 0:
        more = tl.zeros([SIZE_PAD], tl.float32)
        for first in tl.static_range(0, RANK, RANKS):
            given = tl.zeros([RANKS], tl.float32)
            for part in tl.static_range(PARTS):
                given += tl.load(shrunk + (part * rows + row) * RANK + first + r)
            its = tl.load(factor + first, mask=here[:, None], other=0.0)
            given = given.to(its.dtype).to(tl.float32)
            more += tl.sum(its.to(tl.float32) * given[None, :], 1)
        added += more * tl.load(scales + slot * scale_stride)
    norm_sum(added, residual + row * SIZE, scale, out + row * SIZE, at, here, epsilon, SIZE)


@triton.jit
def slots_of_rows(tiles, slots):
    """Write the slot of each row of a tile into `slots` [rows]."""
    tile = tiles + tl.program_id(0) * (1 + TILE_ROWS)
    rows = tl.load(tile + 1 + tl.arange(0, TILE_ROWS))
    tl.store(slots + rows, tl.load(tile) + rows * 0, mask=rows >= 0)
