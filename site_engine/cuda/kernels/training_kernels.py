"""Triton kernels of training: norms, rotations, gates and the loss, with their gradients."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_norm(
    residual,  # [rows, SIZE]
    added,  # [rows, SIZE]
    total,  # [rows, SIZE]: receives the sum
    weight,  # [SIZE]
    out,  # [rows, SIZE]: the sum, or `residual` without ADDED, normed by its root mean square
    epsilon,
    ADDED: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
):
    """Round where the model's modules round: after the sum, before the weight."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.arange(0, SIZE_PAD)
    here = at < SIZE
    found = tl.load(residual + row + at, mask=here, other=0.0)
    scale = tl.load(weight + at, mask=here, other=0.0)
    if ADDED:
        more = tl.load(added + row + at, mask=here, other=0.0)
        found = (found.to(tl.float32) + more.to(tl.float32)).to(found.dtype)
        tl.store(total + row + at, found, mask=here)
    wide = found.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + epsilon)).to(found.dtype)
    tl.store(out + row + at, (scale.to(tl.float32) * normed.to(tl.float32)).to(found.dtype), mask=here)


@triton.jit
def norm_backward(
    residual,  # [rows, SIZE]: what was normed
    weight,  # [SIZE]
    gradient,  # [rows, SIZE]: of the norm
    beside,  # [rows, SIZE]: the gradient that reaches `residual` past the norm, with BESIDE
    out,  # [rows, SIZE]: the gradient of `residual`; may be `gradient`
    epsilon,
    BESIDE: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.arange(0, SIZE_PAD)
    here = at < SIZE
    found = tl.load(residual + row + at, mask=here, other=0.0)
    scale = tl.load(weight + at, mask=here, other=0.0).to(tl.float32)
    wanted = tl.load(gradient + row + at, mask=here, other=0.0).to(tl.float32) * scale
    wide = found.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + epsilon)
    normed = wide * inverse
    result = inverse * (wanted - normed * (tl.sum(wanted * normed, 0) / SIZE))
    if BESIDE:
        result += tl.load(beside + row + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row + at, result.to(found.dtype), mask=here)


@triton.jit
def rotate(
    heads,  # [rows, heads, 2 * HALF]: rotated in place
    cosines,  # [rows, 2 * HALF], of which both halves are alike
    sines,
    count,
    SIGN: tl.constexpr,  # -1: backward
    HEADS_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_PAD)[:, None]
    at = tl.arange(0, HALF_PAD)[None, :]
    inside = at < HALF
    here = (head < count) & inside
    cosine = tl.load(cosines + row * 2 * HALF + at, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sines + row * 2 * HALF + at, mask=inside, other=0.0).to(tl.float32) * SIGN
    first = heads + (row * count + head) * 2 * HALF + at
    left = tl.load(first, mask=here, other=0.0)
    right = tl.load(first + HALF, mask=here, other=0.0)
    wide_left, wide_right = left.to(tl.float32), right.to(tl.float32)
    tl.store(first, (wide_left * cosine - wide_right * sine).to(left.dtype), mask=here)
    tl.store(first + HALF, (wide_right * cosine + wide_left * sine).to(left.dtype), mask=here)


@triton.jit
def _adapted(
    tile, inner, factor, row, column, rows, width, inner_row,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr,
):  # fmt: skip
    """Return a tile with the adapter's product, rounded."""
    rank = tl.arange(0, RANK_PAD)
    there = rank < RANK
    left = tl.load(
        inner + row[:, None].to(tl.int64) * inner_row + rank[None, :],
        mask=(row < rows)[:, None] & there[None, :], other=0.0,
    )  # fmt: skip
    right = tl.load(
        factor + column[None, :] * RANK + rank[:, None],
        mask=(column < width)[None, :] & there[:, None], other=0.0,
    )  # fmt: skip
    return (tile.to(tl.float32) + tl.dot(left, right, input_precision="ieee")).to(tile.dtype)


@triton.jit(do_not_specialize=["rows"])
def gate_forward(
    gate,  # [rows, width]
    up,
    gate_inner,  # [rows, RANK of inner_row]: what an adapter adds is this times its factor, with RANK
    up_inner,
    gate_factor,  # [width, RANK]
    up_factor,
    out,  # [rows, width]: silu(gate) * up
    rows,
    width,
    inner_row,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None].to(tl.int64) * width + column[None, :]
    opened = tl.load(gate + at, mask=here, other=0.0)
    value = tl.load(up + at, mask=here, other=0.0)
    if RANK > 0:
        opened = _adapted(
            opened, gate_inner, gate_factor, row, column, rows, width, inner_row, RANK, RANK_PAD
        )
        value = _adapted(value, up_inner, up_factor, row, column, rows, width, inner_row, RANK, RANK_PAD)
    wide = opened.to(tl.float32)
    silu = (wide * tl.sigmoid(wide)).to(opened.dtype)
    tl.store(out + at, (silu.to(tl.float32) * value.to(tl.float32)).to(value.dtype), mask=here)


@triton.jit(do_not_specialize=["rows"])
def gate_backward(
    gate,  # [rows, width], as in gate_forward: become the gradients
    up,
    gate_inner,
    up_inner,
    gate_factor,
    up_factor,
    gradient,  # [rows, width]: of silu(gate) * up
    rows,
    width,
    inner_row,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None].to(tl.int64) * width + column[None, :]
    opened = tl.load(gate + at, mask=here, other=0.0)
    value = tl.load(up + at, mask=here, other=0.0)
    if RANK > 0:
        opened = _adapted(
            opened, gate_inner, gate_factor, row, column, rows, width, inner_row, RANK, RANK_PAD
        )
        value = _adapted(value, up_inner, up_factor, row, column, rows, width, inner_row, RANK, RANK_PAD)
    wanted = tl.load(gradient + at, mask=here, other=0.0).to(tl.float32)
    wide = opened.to(tl.float32)
    sigmoid = tl.sigmoid(wide)
    silu = wide * sigmoid
    slope = sigmoid + silu * (1.0 - sigmoid)
    tl.store(gate + at, (wanted * value.to(tl.float32) * slope).to(opened.dtype), mask=here)
    tl.store(up + at, (wanted * silu).to(opened.dtype), mask=here)


@triton.jit
def cross_entropy(
    logits,  # [rows, vocabulary]: become the gradients of the losses times `factor`, with BACKWARD
    targets,  # [rows], int64
    losses,  # [rows], float32
    hits,  # [rows], float32: 1 where the target is the first of the largest logits
    vocabulary,
    factor,
    BACKWARD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    line = logits + row * vocabulary
    at = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -1e30, tl.float32)  # finite: a difference of infinite ones is none
    place = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, vocabulary, BLOCK):
        here = begin + at < vocabulary
        found = tl.load(line + begin + at, mask=here, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(best, found)
        total = total * tl.exp(best - higher) + tl.exp(found - higher)
        place = tl.where(found > best, begin + at, place)
        best = higher
    top = tl.max(best, 0)
    whole = tl.sum(total * tl.exp(best - top), 0)
    first = tl.min(tl.where(best == top, place, 2147483647), 0)
    chosen = tl.load(line + target).to(tl.float32)
    tl.store(losses + row, top + tl.log(whole) - chosen)
    tl.store(hits + row, (first == target).to(tl.float32))
    if BACKWARD:
        tl.debug_barrier()  # the target's logit is read before it is overwritten
        for begin in range(0, vocabulary, BLOCK):
            here = begin + at < vocabulary
            found = tl.load(line + begin + at, mask=here, other=0.0)
            share = tl.exp(found.to(tl.float32) - top) / whole
            share -= (begin + at == target).to(tl.float32)
            tl.store(line + begin + at, (share * factor).to(found.dtype), mask=here)
