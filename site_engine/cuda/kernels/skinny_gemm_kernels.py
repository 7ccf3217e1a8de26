"""Triton GEMM kernels for decode steps of few rows, whose time is nearly all spent reading weights."""

from __future__ import annotations

import triton
import triton.language as tl

from site_engine.cuda.kernels.version_kernels import version_of_row

LINE = tl.constexpr(64)  # numbers of two bytes in a line of the cache


@triton.jit
def skinny_gemm_rows(
    x,  # [rows, depth]
    weight,  # [columns, depth]; GATED: the gate's rows, then the up projection's
    bias,  # [columns], only if BIAS
    out,  # [rows, columns]; SPLIT: [parts, rows, columns] in float32
    rows,
    columns,
    depth,
    part_depth,  # of the depth, what one part adds up: whole blocks
    ROWS: tl.constexpr,  # of the first block of rows
    MORE: tl.constexpr,  # of the second, or 0: blocks are powers of two
    COLUMNS: tl.constexpr,  # of one program
    DEPTH: tl.constexpr,  # of one block
    GATED: tl.constexpr,  # out = silu(x gate) * (x up)
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,  # every part is whole blocks
    WEIGHT_FIRST: tl.constexpr,  # which factor comes first; a second block of rows needs it
    PDL: tl.constexpr,  # programmatic dependent launch: wait for the kernel before here
    PREFETCH: tl.constexpr,  # 128-byte lines of each weight row fetched before `x` is ready
):
    """Compute out = x weight^T per block of columns and part, rounding where the model's modules round."""
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    exists = n < columns
    part = tl.program_id(1)
    begin = part * part_depth
    end = tl.minimum(begin + part_depth, depth)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        fetch_weight(weight, n, exists, begin, columns, depth, GATED, PREFETCH)
        tl.extra.cuda.gdc_wait()
    real = tl.arange(0, ROWS) < rows
    if WEIGHT_FIRST:
        total, up, more, more_up = _transposed(x, weight, n, exists, begin, end, rows, columns, depth, ROWS,
                                               MORE, COLUMNS, DEPTH, GATED, EVEN)  # fmt: skip
        store_product(out, bias, tl.trans(total), tl.trans(up), n, exists, real, part, rows, columns, GATED,
                      BIAS, SPLIT)  # fmt: skip
        if MORE > 0:
            real = ROWS + tl.arange(0, MORE) < rows
            store_product(out + ROWS * columns, bias, tl.trans(more), tl.trans(more_up), n, exists, real,
                          part, rows, columns, GATED, BIAS, SPLIT)  # fmt: skip
    else:
        total, up = product(x, weight, n, exists, begin, end, rows, columns, depth, ROWS, COLUMNS, DEPTH,
                            GATED, EVEN)  # fmt: skip
        store_product(out, bias, total, up, n, exists, real, part, rows, columns, GATED, BIAS,
                      SPLIT)  # fmt: skip


@triton.jit
def _transposed(
    x, weight, n, exists, begin, end, rows, columns, depth,
    ROWS: tl.constexpr, MORE: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GATED: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Return what `product` does as weight x^T [COLUMNS, ROWS], then the same [COLUMNS, MORE] of the rows
    after `ROWS`.

    The first factor of Hopper's matrix instructions has 64 rows, as many as a block of columns and more than
    `x` often has. Both blocks of rows share each block of the weight.
    """
    k = tl.arange(0, DEPTH)
    m = tl.arange(0, ROWS)
    x_at = x + m[:, None] * depth + k[None, :]
    weight_at = weight + tl.where(exists, n, 0)[:, None] * depth + k[None, :]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    up, more_total, more_up = total, total, total
    if MORE > 0:
        more_m = ROWS + tl.arange(0, MORE)
        more_at = x + more_m[:, None] * depth + k[None, :]
        more_total = tl.zeros([COLUMNS, MORE], tl.float32)
        more_up = more_total
    for at in range(begin, end, DEPTH):
        inside = (at + k < end)[None, :]
        some = _load_rows(x_at + at, (m < rows)[:, None], inside, EVEN)
        its = _load_weight(weight_at + at, inside, EVEN)
        total = tl.dot(its, some.T, total, input_precision="ieee")
        if MORE > 0:
            more = _load_rows(more_at + at, (more_m < rows)[:, None], inside, EVEN)
            more_total = tl.dot(its, more.T, more_total, input_precision="ieee")
        if GATED:
            its = _load_weight(weight_at + at + columns * depth, inside, EVEN)
            up = tl.dot(its, some.T, up, input_precision="ieee")
            if MORE > 0:
                more_up = tl.dot(its, more.T, more_up, input_precision="ieee")
    return total, up, more_total, more_up


@triton.jit
def _load_rows(at, real, inside, EVEN: tl.constexpr):
    return tl.load(at, mask=real if EVEN else real & inside, other=0.0)


@triton.jit
def _load_weight(at, inside, EVEN: tl.constexpr):
    return tl.load(at) if EVEN else tl.load(at, mask=inside, other=0.0)


@triton.jit
def product(
    x, weight, n, exists, begin, end, rows, columns, depth,
    ROWS_PAD: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GATED: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Return x weight^T [ROWS_PAD, COLUMNS] from `begin` to `end` of the depth; GATED: the gate's and the up
    projection's, else zeros.
    """
    m = tl.arange(0, ROWS_PAD)
    k = tl.arange(0, DEPTH)
    real = m < rows
    x_at = x + m[:, None] * depth + k[None, :]
    weight_at = weight + tl.where(exists, n, 0)[None, :] * depth + k[:, None]
    total = tl.zeros([ROWS_PAD, COLUMNS], tl.float32)
    up = tl.zeros([ROWS_PAD, COLUMNS], tl.float32)
    for at in range(begin, end, DEPTH):
        if EVEN:
            some = tl.load(x_at + at, mask=real[:, None], other=0.0)
            total = tl.dot(some, tl.load(weight_at + at), total, input_precision="ieee")
            if GATED:
                up = tl.dot(some, tl.load(weight_at + at + columns * depth), up, input_precision="ieee")
        else:
            inside = at + k < end
            some = tl.load(x_at + at, mask=real[:, None] & inside[None, :], other=0.0)
            its = tl.load(weight_at + at, mask=inside[:, None], other=0.0)
            total = tl.dot(some, its, total, input_precision="ieee")
            if GATED:
                its = tl.load(weight_at + at + columns * depth, mask=inside[:, None], other=0.0)
                up = tl.dot(some, its, up, input_precision="ieee")
    return total, up


@triton.jit
def store_product(
    out, bias, total, up, n, exists, real, part, rows, columns,
    GATED: tl.constexpr, BIAS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Write the `real` rows of a product: SPLIT: in float32 as a part, else with the bias or gated, in the
    type of `out`.
    """
    m = tl.arange(0, real.shape[0])
    out_at = out + m[:, None].to(tl.int64) * columns + n[None, :]
    keep = real[:, None] & exists[None, :]
    if SPLIT:
        tl.store(out_at + part * rows * columns, total, mask=keep)
    else:
        dtype = out.dtype.element_ty
        if BIAS:
            total += tl.load(bias + n, mask=exists, other=0.0).to(tl.float32)[None, :]
        if GATED:
            gate = total.to(dtype).to(tl.float32)
            total = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
        tl.store(out_at, total.to(dtype), mask=keep)


@triton.jit
def fetch_weight(weight, n, exists, begin, columns, depth, GATED: tl.constexpr, LINES: tl.constexpr):
    """Prefetch the first lines, from `begin` of the depth on, of the weight rows of columns `n`."""
    if LINES > 0:
        line = tl.minimum(begin + tl.arange(0, LINES) * LINE, depth - 1)
        lines = weight + tl.where(exists, n, 0)[:, None] * depth + line[None, :]
        fetch_lines(lines)
        if GATED:
            fetch_lines(lines + columns * depth)


@triton.jit
def fetch_lines(lines):
    """Prefetch lines of memory into the L2 cache without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [lines.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize_on_alignment=["own"])
def add_parts_norm(
    parts,  # [PARTS, rows, SIZE], float32: their sum is added
    residual,  # [rows, SIZE]: becomes residual + added
    weight,  # [SIZE]
    out,  # [rows, SIZE]: the sum, normed by its root mean square
    epsilon,
    own,  # as of `version_of_row`, as what follows
    slots,
    own_stride,
    part_stride,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    OWN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add and normalize as `add_norm` does, for a product that comes in parts."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.arange(0, SIZE_PAD)
    here = at < SIZE
    weight = version_of_row(weight, own, slots, own_stride, OWN)
    scale = tl.load(weight + at, mask=here, other=0.0)
    if PDL:  # the next kernel must not crowd the product that is waited for here
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    added = tl.load(parts + row + at, mask=here, other=0.0)
    for part in tl.static_range(1, PARTS):
        added += tl.load(parts + part * part_stride + row + at, mask=here, other=0.0)
    norm_sum(added, residual + row, scale, out + row, at, here, epsilon, SIZE)


@triton.jit
def norm_sum(added, residual, scale, out, at, here, epsilon, SIZE: tl.constexpr):
    """Add `added` to a row of `residual` and write the norm of the sum, times `scale`, to that of `out`."""
    before = tl.load(residual + at, mask=here, other=0.0)
    total = (before.to(tl.float32) + added.to(before.dtype).to(tl.float32)).to(before.dtype)
    tl.store(residual + at, total, mask=here)
    wide = total.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + epsilon)).to(total.dtype)
    tl.store(out + at, (scale.to(tl.float32) * normed.to(tl.float32)).to(total.dtype), mask=here)
