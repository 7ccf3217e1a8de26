"""Triton kernels of adapters: rows of one slot are gathered into tiles, shrunk to the rank, expanded again.

Slots without rows are neither read nor written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from site_engine.cuda.kernels.skinny_gemm_kernels import LINE, fetch_lines, product, store_product
from site_engine.cuda.kernels.version_kernels import at_version, versions_of

TILE_ROWS = tl.constexpr(16)
LEAST = tl.constexpr(-(1 << 62))


@triton.jit
def shrink_rows(
    x,  # [tokens, depth]
    down,  # [slots, layers, groups * RANK, depth], from the layer on
    scales,  # [slots, layers, groups] in float32, from the layer on
    tiles,  # [tiles, 1 + TILE_ROWS]: slot, or -1 for the base; tokens, or -1 for none
    shrunk,  # [parts, tokens, groups * RANK] in float32
    tokens,
    depth,
    width,  # groups * RANK
    slot_stride,
    scale_stride,
    part_depth,
    RANK: tl.constexpr,
    DEPTH: tl.constexpr,  # of one block
):
    """Compute each part of the depth of scale * (x down^T), for the rows of one tile and one group."""
    _shrink(x, down, scales, tiles, shrunk, tl.program_id(0), tl.program_id(1), tl.program_id(2),
            tokens, depth, width, slot_stride, scale_stride, part_depth, RANK, DEPTH)  # fmt: skip


@triton.jit
def _shrink(
    x,
    down,
    scales,
    tiles,
    shrunk,
    number,  # of the tile
    group,
    part,
    tokens,
    depth,
    width,
    slot_stride,
    scale_stride,
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
        tl.store(to, total * tl.load(scales + slot * scale_stride + group), mask=real[:, None])


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


# compile once for any number of rows and tiles, and for any layer's place in `scales` and `own`
@triton.jit(do_not_specialize=["rows", "count"], do_not_specialize_on_alignment=["scales", "own"])
def adapted_gemm_rows(
    x,  # [rows, depth]
    weight,  # [columns, depth]; GATED: the gate's rows, then the up projection's
    bias,  # [columns], only if BIAS
    out,  # [rows, columns]; SPLIT: [parts, rows, columns] in float32
    down,  # [slots, layers, groups * RANK, depth], from the layer on, as `up`, `scales` and `biases`
    up,  # [slots, layers, columns (GATED: twice as many), RANK]
    scales,  # [slots, layers, groups] in float32
    biases,  # [slots, layers, columns], only if BIASED
    tiles,  # [count, 1 + TILE_ROWS]: slot, or -1 for the base; tokens, or -1 for none
    slots,  # [rows]: of each row, or -1 for the base
    used,  # [count]: the slots of the step's rows, each once
    counts,  # [2]: tiles with a slot, slots in `used`
    shrunk,  # [SHRUNK_PARTS, rows, groups * RANK] in float32
    arrived,  # [1]: 0; counts the programs that have shrunk rows
    own,  # [slots, layers, numbers], only if OWN: where the slot's version of `weight` lies
    rows,
    columns,
    depth,
    part_depth,
    shrunk_part_depth,
    part_count,
    count,
    first_end,  # columns of the first group
    second_end,  # and of the second
    down_stride,
    up_stride,
    scale_stride,
    bias_stride,
    own_stride,
    ROWS_PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,  # of several adapters, that one dot expands
    GROUPS: tl.constexpr,
    SHRUNK_PARTS: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    BIASED: tl.constexpr,  # adapters change the bias
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    OWN: tl.constexpr,  # some rows have own versions of the weight, each of which is read once
    EARLY: tl.constexpr,  # the first factors are read before the product, and kept in registers
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """Compute the base's product and add what adapters make of the same rows.

    The first programs shrink rows to the rank. The others compute the base's product, then wait for the
    first, which the device starts before them, and expand.
    """
    number = tl.program_id(0) - count * GROUPS * SHRUNK_PARTS
    if number < 0:
        job = tl.program_id(0)
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        slot = tl.load(tiles + job % count * (1 + TILE_ROWS))
        if slot >= 0:
            which = job // count
            _shrink(x, down, scales, tiles, shrunk, job % count, which % GROUPS, which // GROUPS, rows,
                    depth, GROUPS * RANK, down_stride, scale_stride, shrunk_part_depth, RANK,
                    DEPTH)  # fmt: skip
            tl.debug_barrier()  # every thread's stores come before the counter
            tl.atomic_add(arrived, 1, sem="release")
    else:
        blocks = tl.cdiv(columns, COLUMNS)
        part = number // blocks
        begin = part * part_depth
        end = tl.minimum(begin + part_depth, depth)
        n = number % blocks * COLUMNS + tl.arange(0, COLUMNS)
        exists = n < columns
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            if PREFETCH > 0:
                line = tl.minimum(begin + tl.arange(0, PREFETCH) * LINE, depth - 1)
                lines = weight + tl.where(exists, n, 0)[:, None] * depth + line[None, :]
                fetch_lines(lines)
                if GATED:
                    fetch_lines(lines + columns * depth)
        m = tl.arange(0, ROWS_PAD)
        its_slots = tl.load(slots + m, mask=m < rows, other=-1)
        expanded = tl.load(counts + 1)
        # of a product in parts, each part adds what some of the slots do
        at = part * (RANKS // RANK)
        first = _group(number % blocks * COLUMNS, first_end, second_end)
        last = _group(tl.minimum(number % blocks * COLUMNS + COLUMNS, columns) - 1, first_end, second_end)
        factor = 0
        more = 0
        if EARLY:
            factor = _factor(up, used, at, expanded, n, exists, first, first_end, second_end, up_stride, RANK,
                             RANKS)  # fmt: skip
            if GATED:
                more = _factor(up + columns * RANK, used, at, expanded, n, exists, first, first_end,
                               second_end, up_stride, RANK, RANKS)  # fmt: skip
        if PDL:
            tl.extra.cuda.gdc_wait()
        if not OWN:
            _adapted_product(x, weight, bias, out, up, biases, used, shrunk, arrived, factor, more, n, exists,
                             m < rows, its_slots, counts, expanded, part, at, first, last, begin, end, rows,
                             columns, depth, part_count, first_end, second_end, up_stride, bias_stride,
                             ROWS_PAD, COLUMNS, DEPTH, RANK, RANKS, GROUPS, SHRUNK_PARTS, GATED, BIAS, BIASED,
                             SPLIT, EVEN, EARLY, PDL)  # fmt: skip
        else:
            version = versions_of(own, its_slots, own_stride)
            left = m < rows
            while tl.sum(left.to(tl.int32), 0) > 0:
                its = tl.max(tl.where(left, version, LEAST), 0)
                mine = left & (version == its)
                left = left & (version != its)
                _adapted_product(x, at_version(weight, its), bias, out, up, biases, used, shrunk, arrived,
                                 factor, more, n, exists, mine, tl.where(mine, its_slots, -1), counts,
                                 expanded, part, at, first, last, begin, end, rows, columns, depth,
                                 part_count, first_end, second_end, up_stride, bias_stride, ROWS_PAD, COLUMNS,
                                 DEPTH, RANK, RANKS, GROUPS, SHRUNK_PARTS, GATED, BIAS, BIASED, SPLIT, EVEN,
                                 EARLY, PDL)  # fmt: skip


@triton.jit
def _adapted_product(
    x, weight, bias, out, up, biases, used, shrunk, arrived, factor, more, n, exists, real, its_slots, counts,
    expanded, part, at, first, last, begin, end, rows, columns, depth, part_count, first_end, second_end,
    up_stride, bias_stride,
    ROWS_PAD: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, RANK: tl.constexpr,
    RANKS: tl.constexpr, GROUPS: tl.constexpr, SHRUNK_PARTS: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, BIASED: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute the product of the `real` rows by one version of the weight, and what their adapters add."""
    total, other = product(x, weight, n, exists, begin, end, rows, columns, depth, ROWS_PAD, COLUMNS,
                           DEPTH, GATED, EVEN)  # fmt: skip
    if not EARLY:
        factor = _factor(up, used, at, expanded, n, exists, first, first_end, second_end, up_stride, RANK,
                         RANKS)  # fmt: skip
        if GATED:
            more = _factor(up + columns * RANK, used, at, expanded, n, exists, first, first_end,
                           second_end, up_stride, RANK, RANKS)  # fmt: skip
    if at < expanded:
        _wait(arrived, tl.load(counts) * GROUPS * SHRUNK_PARTS, PDL)
    group = first
    while at < expanded:
        its_at = at
        its_group = group
        at += tl.where(group == last, part_count * (RANKS // RANK), 0)
        group = tl.where(group == last, first, group + 1)
        following = _factor(up, used, at, expanded, n, exists, group, first_end, second_end, up_stride,
                            RANK, RANKS)  # fmt: skip
        if GATED:
            more_following = _factor(up + columns * RANK, used, at, expanded, n, exists, group, first_end,
                                     second_end, up_stride, RANK, RANKS)  # fmt: skip
        given = _given(shrunk, used, its_at, expanded, its_slots, rows, its_group, RANK, RANKS, GROUPS,
                       SHRUNK_PARTS)  # fmt: skip
        total = tl.dot(given.to(factor.dtype), factor, total, input_precision="ieee")
        factor = following
        if GATED:
            given = _given(shrunk, used, its_at, expanded, its_slots, rows, 1, RANK, RANKS, GROUPS,
                           SHRUNK_PARTS)  # fmt: skip
            other = tl.dot(given.to(more.dtype), more, other, input_precision="ieee")
            more = more_following
    if BIASED:
        its = biases + its_slots[:, None].to(tl.int64) * bias_stride + n[None, :]
        has = (its_slots >= 0)[:, None] & exists[None, :]
        total += tl.load(its, mask=has, other=0.0).to(tl.float32)
    store_product(out, bias, total, other, n, exists, real, part, rows, columns, GATED, BIAS,
                  SPLIT)  # fmt: skip


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["own"])
def owned_gemm_rows(
    x,  # [rows, depth]
    weight,  # [columns, depth], the base's
    bias,  # [columns], only if BIAS
    out,  # [rows, columns]
    own,  # as of `adapted_gemm_rows`, as what follows
    slots,
    rows,
    columns,
    depth,
    own_stride,
    ROWS_PAD: tl.constexpr,  # of one program
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Compute the product of any number of rows, each by its own version of the weight."""
    block = tl.program_id(0).to(tl.int64) * ROWS_PAD  # side by side, so that all read the same weights
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = n < columns
    m = tl.arange(0, ROWS_PAD)
    left = block + m < rows
    its_slots = tl.load(slots + block + m, mask=left, other=-1)
    version = versions_of(own, its_slots, own_stride)
    rows -= block.to(tl.int32)
    x += block * depth
    while tl.sum(left.to(tl.int32), 0) > 0:
        its = tl.max(tl.where(left, version, LEAST), 0)
        mine = left & (version == its)
        left = left & (version != its)
        total, other = product(x, at_version(weight, its), n, exists, 0, depth, rows, columns, depth,
                               ROWS_PAD, COLUMNS, DEPTH, False, EVEN)  # fmt: skip
        store_product(out + block * columns, bias, total, other, n, exists, mine, 0, rows, columns, False,
                      BIAS, False)  # fmt: skip


@triton.jit
def _group(column, first_end, second_end):
    """Return the group of a column, of three at most."""
    return (column >= first_end).to(tl.int32) + (column >= second_end).to(tl.int32)


@triton.jit
def _factor(
    up,
    used,
    at,
    expanded,
    n,
    exists,
    group,
    first_end,
    second_end,
    up_stride,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Return what expands to columns `n` of a group [RANKS, columns], for the slots from `at` on."""
    s = at + tl.arange(0, RANKS // RANK)
    slot = tl.load(used + s, mask=s < expanded, other=-1).to(tl.int64)[:, None, None]
    there = exists & (_group(n, first_end, second_end) == group)
    r = tl.arange(0, RANK)
    its = up + slot * up_stride + (n[None, :] * RANK + r[:, None])[None, :, :]
    its = tl.load(its, mask=(slot >= 0) & there[None, None, :], other=0.0)
    return tl.reshape(its, [RANKS, n.shape[0]])


@triton.jit
def _given(
    shrunk, used, at, expanded, slots, rows, group,
    RANK: tl.constexpr, RANKS: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Return the shrunk rows of a group [rows, RANKS], each at the ranks of its own slot, else zeros."""
    s = at + tl.arange(0, RANKS // RANK)
    slot = tl.load(used + s, mask=s < expanded, other=-1)
    own = ((slot[None, :] == slots[:, None]) & (slots >= 0)[:, None])[:, :, None]
    m = tl.arange(0, slots.shape[0])
    its = shrunk + (m[:, None] * GROUPS * RANK + tl.arange(0, RANK)[None, :])[:, None, :] + group * RANK
    given = tl.zeros([slots.shape[0], RANKS // RANK, RANK], tl.float32)
    for part in tl.static_range(PARTS):  # `.cg`: other programs have written them since this one began
        some = its + part * rows * GROUPS * RANK
        given += tl.load(tl.broadcast_to(some, given.shape), mask=own, other=0.0, cache_modifier=".cg")
    return tl.reshape(given, [slots.shape[0], RANKS])


@triton.jit
def _wait(counter, count, ACQUIRE: tl.constexpr):
    """Wait until `counter` is `count`, and see all that was written before it was counted up."""
    seen = _seen(counter, ACQUIRE)
    while seen < count:
        seen = _seen(counter, ACQUIRE)


@triton.jit
def _seen(counter, ACQUIRE: tl.constexpr):
    if ACQUIRE:  # a load that many programs repeat holds nobody up, as atomics would
        return tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [counter.to(tl.int64)], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
    else:  # noqa: RET505 - Triton takes no return after a constant branch
        return tl.atomic_add(counter, 0, sem="acquire")


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
