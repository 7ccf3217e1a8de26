"""Triton kernels of products for rows with adapters, or with versions of the weight of their own."""

from __future__ import annotations

import triton
import triton.language as tl

from site_engine.cuda.kernels.adapter_kernels import TILE_ROWS, shrink_tile
from site_engine.cuda.kernels.skinny_gemm_kernels import (
    LINE,
    fetch_lines,
    fetch_weight,
    product,
    store_product,
)
from site_engine.cuda.kernels.version_kernels import at_version, versions_of

LEAST = tl.constexpr(-(1 << 62))
NOWHERE = tl.constexpr(-2)  # the slot of no row
FEW_RANKS = tl.constexpr(16)  # that few rows are expanded from at once


# compile once for any number of rows and tiles, and for any layer's place in `scales` and `own`
@triton.jit(do_not_specialize=["rows", "count"], do_not_specialize_on_alignment=["scales", "own"])
def adapted_gemm_rows(
    x,  # [rows, depth]
    weight,  # [columns, depth]; GATED: the gate's rows, then the up projection's
    bias,  # [columns], only if BIAS
    out,  # [rows, columns]; SPLIT: [parts, rows, columns] in float32
    down,  # [slots, layers, GROUPS * RANK, depth], from the layer on, as `up`, `scales` and `biases`
    up,  # [slots, layers, columns (GATED: twice as many), RANK]
    scales,  # [slots, layers, GROUPS] in float32
    biases,  # [slots, layers, columns], only if BIASED
    tiles,  # [count, 1 + TILE_ROWS]: slot, or -1 for the base; tokens, or -1 for none
    slots,  # [rows]: of each row, or -1 for the base
    used,  # [count]: the slots of the step's rows, each once
    counts,  # [2]: tiles with a slot, slots in `used`
    shrunk,  # [SHRUNK_PARTS, rows, GROUPS * RANK] in float32
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
    TOGETHER: tl.constexpr,  # groups that one program shrinks
    WIDTH: tl.constexpr,  # at least their ranks
    SHRUNK_PARTS: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    EXPAND_STAGES: tl.constexpr,
    FEW: tl.constexpr,  # rows, each of which is expanded by itself
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    BIASED: tl.constexpr,  # adapters change the bias
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    OWN: tl.constexpr,  # some rows have own versions of the weight, each of which is read once
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """Compute the base's product and add what adapters make of the same rows.

    The first programs shrink rows to the rank. The others compute the base's product, then wait for the
    first, which the device starts before them, and expand. Tiles without a slot wait for nothing, so that
    programs of products take their place while the kernel before runs.
    """
    jobs: tl.constexpr = GROUPS // TOGETHER * SHRUNK_PARTS  # of a tile
    number = tl.program_id(0) - count * jobs
    if number < 0:
        job = tl.program_id(0)
        tile = tiles + job % count * (1 + TILE_ROWS)
        slot = tl.load(tile)
        its_rows = tl.load(tile + 1 + tl.arange(0, TILE_ROWS))
        if slot >= 0:
            if PDL:
                tl.extra.cuda.gdc_launch_dependents()
                _fetch_down(down + slot.to(tl.int64) * down_stride, job // count // SHRUNK_PARTS * TOGETHER,
                            job // count % SHRUNK_PARTS * shrunk_part_depth, depth, shrunk_part_depth, RANK,
                            TOGETHER, WIDTH, DEPTH)  # fmt: skip
                tl.extra.cuda.gdc_wait()
            shrink_tile(x, down, scales, its_rows, slot.to(tl.int64), shrunk,
                        job // count // SHRUNK_PARTS * TOGETHER, job // count % SHRUNK_PARTS, rows, depth,
                        down_stride, scale_stride, shrunk_part_depth, RANK, GROUPS, TOGETHER, WIDTH,
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
            fetch_weight(weight, n, exists, begin, columns, depth, GATED, PREFETCH)
        its_slots = tl.load(slots + tl.arange(0, ROWS_PAD), mask=tl.arange(0, ROWS_PAD) < rows, other=-1)
        expanded = tl.load(counts + 1)
        shrinking = tl.load(counts) * jobs
        # all parts together fetch what the slots expand by
        first = part * (RANKS // RANK)
        step = part_count * (RANKS // RANK)
        if PDL:
            _fetch_up(up, used, first, step, expanded, number % blocks * COLUMNS, columns, up_stride, RANK,
                      RANKS, COLUMNS)  # fmt: skip
            if GATED:
                _fetch_up(up, used, first, step, expanded, columns + number % blocks * COLUMNS, 2 * columns,
                          up_stride, RANK, RANKS, COLUMNS)  # fmt: skip
            tl.extra.cuda.gdc_wait()
        if not OWN:
            _adapted_product(x, weight, bias, out, up, biases, used, shrunk, arrived, n, exists,
                             tl.arange(0, ROWS_PAD) < rows, its_slots, shrinking, expanded, part, part_count,
                             begin, end, rows, columns, depth, first_end, second_end, up_stride, bias_stride,
                             ROWS_PAD, COLUMNS, DEPTH, RANK, RANKS, GROUPS, SHRUNK_PARTS, PARTS_PAD,
                             EXPAND_STAGES, FEW, GATED, BIAS, BIASED, SPLIT, EVEN, PDL)  # fmt: skip
        else:
            version = versions_of(own, its_slots, own_stride)
            left = tl.arange(0, ROWS_PAD) < rows
            while tl.sum(left.to(tl.int32), 0) > 0:
                its = tl.max(tl.where(left, version, LEAST), 0)
                mine = left & (version == its)
                left = left & (version != its)
                _adapted_product(x, at_version(weight, its), bias, out, up, biases, used, shrunk, arrived, n,
                                 exists, mine, tl.where(mine, its_slots, -1), shrinking, expanded, part,
                                 part_count, begin, end, rows, columns, depth, first_end, second_end,
                                 up_stride, bias_stride, ROWS_PAD, COLUMNS, DEPTH, RANK, RANKS, GROUPS,
                                 SHRUNK_PARTS, PARTS_PAD, EXPAND_STAGES, FEW, GATED, BIAS, BIASED, SPLIT,
                                 EVEN, PDL)  # fmt: skip


@triton.jit
def _adapted_product(
    x, weight, bias, out, up, biases, used, shrunk, arrived, n, exists, real, its_slots, shrinking, expanded,
    part, part_count, begin, end, rows, columns, depth, first_end, second_end, up_stride, bias_stride,
    ROWS_PAD: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, RANK: tl.constexpr,
    RANKS: tl.constexpr, GROUPS: tl.constexpr, SHRUNK_PARTS: tl.constexpr, PARTS_PAD: tl.constexpr,
    EXPAND_STAGES: tl.constexpr, FEW: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    BIASED: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the product of the `real` rows by one version of the weight, and what their adapters add."""
    total, other = product(x, weight, n, exists, begin, end, rows, columns, depth, ROWS_PAD, COLUMNS, DEPTH,
                           GATED, EVEN)  # fmt: skip
    # of a product in parts, each part adds what some of the rows get if they are few, else some of the slots
    first = 0 if FEW else part * (RANKS // RANK)
    step = part_count * (RANKS // RANK)
    mine = its_slots
    if FEW:
        mine = tl.where(tl.arange(0, ROWS_PAD) % part_count == part, its_slots, -1)
    if first < expanded:
        _wait(arrived, shrinking, PDL)
        if GATED:
            total = _expand(total, shrunk, up, used, mine, 0, first, expanded, step, n, exists, rows,
                            up_stride, RANK, RANKS, GROUPS, SHRUNK_PARTS, PARTS_PAD, EXPAND_STAGES,
                            FEW)  # fmt: skip
            other = _expand(other, shrunk, up + columns * RANK, used, mine, 1, first, expanded, step, n,
                            exists, rows, up_stride, RANK, RANKS, GROUPS, SHRUNK_PARTS, PARTS_PAD,
                            EXPAND_STAGES, FEW)  # fmt: skip
        else:
            its_group = (n >= first_end).to(tl.int32) + (n >= second_end).to(tl.int32)
            for group in range(tl.min(its_group, 0), tl.max(tl.where(exists, its_group, 0), 0) + 1):
                total = _expand(total, shrunk, up, used, mine, group, first, expanded, step, n,
                                exists & (its_group == group), rows, up_stride, RANK, RANKS, GROUPS,
                                SHRUNK_PARTS, PARTS_PAD, EXPAND_STAGES, FEW)  # fmt: skip
    if BIASED:
        its = biases + its_slots[:, None].to(tl.int64) * bias_stride + n[None, :]
        has = (its_slots >= 0)[:, None] & exists[None, :]
        total += tl.load(its, mask=has, other=0.0).to(tl.float32)
    store_product(out, bias, total, other, n, exists, real, part, rows, columns, GATED, BIAS,
                  SPLIT)  # fmt: skip


@triton.jit
def _fetch_down(
    down, group, begin, depth, part_depth,
    RANK: tl.constexpr, TOGETHER: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Fetch what a part of the depth is shrunk by."""
    ranks = group * RANK + tl.minimum(tl.arange(0, WIDTH), TOGETHER * RANK - 1)
    for block in range(begin, tl.minimum(begin + part_depth, depth), DEPTH):
        line = tl.minimum(block + tl.arange(0, DEPTH // LINE) * LINE, depth - 1)
        fetch_lines(down + ranks[:, None] * depth + line[None, :])


@triton.jit
def _fetch_up(
    up, used, first, step, expanded, column, columns, up_stride,
    RANK: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Fetch what slots from `first` on expand to the columns from `column` on."""
    for begin in range(first, expanded, step):
        number = tl.minimum(begin + tl.arange(0, RANKS // RANK), expanded - 1)
        slot = tl.load(used + number).to(tl.int64)
        at = tl.minimum(column * RANK + tl.arange(0, COLUMNS * RANK // LINE) * LINE, columns * RANK - 1)
        fetch_lines(up + slot[:, None] * up_stride + at[None, :])


@triton.jit
def _expand(
    total, shrunk, up, used, slots, group, first, expanded, step, n, exists, rows, up_stride,
    RANK: tl.constexpr, RANKS: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
    PARTS_PAD: tl.constexpr, STAGES: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Return `total` [rows, columns] with what the slots of rows expand their shrunk rows of a group to."""
    if FEW:
        total = _expand_each(total, shrunk, up, slots, group, n, exists, rows, up_stride, RANK, GROUPS,
                             PARTS)  # fmt: skip
    else:
        total = _expand_together(total, shrunk, up, used, slots, group, first, expanded, step, n, exists,
                                 rows, up_stride, RANK, RANKS, GROUPS, PARTS, PARTS_PAD, STAGES)  # fmt: skip
    return total


@triton.jit
def _expand_each(
    total, shrunk, up, slots, group, n, exists, rows, up_stride,
    RANK: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Expand each row by the factors of its own slot, multiplied where they are loaded.

    A dot for all rows takes longer: loads that wait for the list of slots, and factors through shared memory.
    """
    row = tl.arange(0, slots.shape[0])[:, None]
    has = (slots >= 0)[:, None]
    factors = up + slots.to(tl.int64)[:, None, None] * up_stride + n[None, :, None] * RANK
    for begin in tl.range(0, RANK, FEW_RANKS, num_stages=1):  # unrolled, its loads would spill registers
        rank = begin + tl.arange(0, FEW_RANKS)
        mask = has[:, :, None] & exists[None, :, None]
        factor = tl.load(factors + rank[None, None, :], mask=mask, other=0.0)
        at = shrunk + (row * GROUPS + group) * RANK + rank[None, :]
        given = tl.zeros([slots.shape[0], FEW_RANKS], tl.float32)
        for part in tl.static_range(PARTS):  # `.cg`: other programs have written them since this one began
            some = at + part * rows * GROUPS * RANK
            given += tl.load(some, mask=has, other=0.0, cache_modifier=".cg")
        given = given.to(factor.dtype).to(tl.float32)
        total += tl.sum(factor.to(tl.float32) * given[:, None, :], 2)
    return total


@triton.jit
def _expand_together(
    total, shrunk, up, used, slots, group, first, expanded, step, n, exists, rows, up_stride,
    RANK: tl.constexpr, RANKS: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
    PARTS_PAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Expand all rows by the slots from `first` on, the ranks of several side by side in one dot.

    A row has zeros at the ranks of other slots.
    """
    part = tl.arange(0, PARTS_PAD)[:, None, None]
    at = shrunk + ((part * rows + tl.arange(0, slots.shape[0])[None, :, None]) * GROUPS + group) * RANK
    given = tl.load(  # all parts at once; `.cg`: other programs have written them since this one began
        at + tl.arange(0, RANK)[None, None, :], mask=(part < PARTS) & (slots >= 0)[None, :, None], other=0.0,
        cache_modifier=".cg",
    )  # fmt: skip
    given = tl.sum(given, 0).to(up.dtype.element_ty)[:, None, :]
    given = tl.reshape(tl.broadcast_to(given, [slots.shape[0], RANKS // RANK, RANK]), [slots.shape[0], RANKS])
    rank = tl.arange(0, RANKS) % RANK
    for begin in tl.range(first, expanded, step, num_stages=STAGES):
        number = begin + tl.arange(0, RANKS) // RANK
        slot = tl.load(used + number, mask=number < expanded, other=NOWHERE)
        factor = tl.load(
            up + slot.to(tl.int64)[:, None] * up_stride + (n[None, :] * RANK + rank[:, None]),
            mask=(slot >= 0)[:, None] & exists[None, :],
            other=0.0,
        )
        its = tl.where(slots[:, None] == slot[None, :], given, 0.0)
        total = tl.dot(its, factor, total, input_precision="ieee")
    return total


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
