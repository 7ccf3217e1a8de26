"""Triton kernels in which the ranks of a tensor group exchange what each has computed a part of."""

from __future__ import annotations

import triton
import triton.language as tl

from site_engine.cuda.kernels.skinny_gemm_kernels import norm_sum


@triton.jit
def exchange_parts_norm(
    parts,  # [PARTS, rows, SIZE]: their sum is this rank's part of what is added
    residual,  # [rows, SIZE]: becomes residual + added
    weight,  # [SIZE]
    out,  # [rows, SIZE]: the sum, normed by its root mean square
    epsilon,
    part_stride,
    inbox,  # [2, RANKS, capacity, SIZE]: this rank's
    arrivals,  # [RANKS, capacity], int32: this rank's
    distances,  # [RANKS], int64: bytes from this rank's memory to that of each, whole lines of the cache
    turns,  # [capacity], int32: the exchanges of each row so far, the same on all ranks
    capacity,  # rows of an inbox
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum rows over the ranks, add and normalize as `add_parts_norm` does. One program a row.

    Each rank stores its part, rounded as a module rounds its product, into the inbox of every other and then
    the number of the exchange into its arrivals; with all parts here it adds them in the order of the ranks,
    so that all have the same sum bit by bit. An inbox has two turns: nobody is two exchanges ahead, since for
    each it needs this rank's part.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE_PAD)
    here = at < SIZE
    scale = tl.load(weight + at, mask=here, other=0.0)
    dtype = residual.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    own = tl.load(parts + row * SIZE + at, mask=here, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        own += tl.load(parts + part * part_stride + row * SIZE + at, mask=here, other=0.0).to(tl.float32)
    own = own.to(dtype)
    turn = tl.load(turns + row) + 1
    first = (turn % 2) * RANKS  # of this turn in every inbox
    own_at = ((first + RANK) * capacity + row) * SIZE + at
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            there = tl.multiple_of(tl.load(distances + peer) // (dtype.primitive_bitwidth // 8), 16)
            tl.store(inbox + there + own_at, own, mask=here)
    tl.debug_barrier()  # the release below is one thread's, for the stores of all
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            there = tl.load(distances + peer) // 4
            tl.atomic_xchg(arrivals + there + RANK * capacity + row, turn, sem="release", scope="sys")
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            arrived = arrivals + peer * capacity + row
            while tl.atomic_add(arrived, 0, sem="acquire", scope="sys") - turn < 0:  # numbers may wrap
                pass
    tl.debug_barrier()
    added = tl.zeros([SIZE_PAD], tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            added += own.to(tl.float32)
        else:
            part_at = ((first + rank) * capacity + row) * SIZE + at
            added += tl.load(inbox + part_at, mask=here, other=0.0, volatile=True).to(tl.float32)
    tl.store(turns + row, turn)
    norm_sum(added, residual + row * SIZE, scale, out + row * SIZE, at, here, epsilon, SIZE)
