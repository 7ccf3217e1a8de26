"""Triton kernels around the model: step inputs, the best token of every row, fused norms and gates."""

from __future__ import annotations

import triton
import triton.language as tl

from site_engine.cuda.kernels.version_kernels import version_of_row


@triton.jit(do_not_specialize=["tokens", "samples", "patches"])  # eager steps have any: compile once
def prepare_inputs(
    source,  # [tokens]: a token id; or -1 - slot, whose newest token it is
    position,  # [tokens]
    wanted,  # [samples]: tokens whose logits are needed
    patch_at,  # [patches]: index of a new page in the flat table; -1: none
    patch_page,
    newest,  # [slots]: the last token of each
    table,
    ids,  # [tokens], int64, as `positions` and `wanted_out`: what the model takes
    positions,
    wanted_out,
    tokens,
    samples,
    patches,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < tokens
    given = tl.load(source + at, mask=here, other=0)
    pending = here & (given < 0)
    made = tl.load(newest + (-1 - given), mask=pending, other=0)
    tl.store(ids + at, tl.where(pending, made, given).to(tl.int64), mask=here)
    tl.store(positions + at, tl.load(position + at, mask=here, other=0).to(tl.int64), mask=here)
    here = at < samples
    tl.store(wanted_out + at, tl.load(wanted + at, mask=here, other=0).to(tl.int64), mask=here)
    where = tl.load(patch_at + at, mask=at < patches, other=-1)
    page = tl.load(patch_page + at, mask=at < patches, other=0)
    tl.store(table + where, page, mask=where >= 0)


@triton.jit
def best_of_span(
    logits,  # [rows, vocabulary]
    tops,  # [rows, spans]
    places,
    vocabulary,
    row_stride,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the first of the largest logits of a span; NaN counts as infinite."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    at = span * SPAN + tl.arange(0, SPAN)
    here = at < vocabulary
    values = tl.load(logits + row * row_stride + at, mask=here, other=float("-inf")).to(tl.float32)
    values = tl.where(values != values, float("inf"), values)
    top = tl.max(values, 0)
    place = tl.min(tl.where((values == top) & here, at, vocabulary), 0)
    out = row * tl.num_programs(1) + span
    tl.store(tops + out, top)
    tl.store(places + out, place)


@triton.jit
def best_of_row(
    tops,  # [rows, spans]
    places,
    owner,  # [rows]: the slot that a row's token belongs to
    newest,  # [slots]
    chosen,  # [rows]: the token; -1 - token where the logits were not finite
    spans,
    SPANS_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    at = tl.arange(0, SPANS_PAD)
    here = at < spans
    top = tl.load(tops + row * spans + at, mask=here, other=float("-inf"))
    place = tl.load(places + row * spans + at, mask=here, other=2147483647)
    best = tl.max(top, 0)
    token = tl.min(tl.where((top == best) & here, place, 2147483647), 0)
    tl.store(newest + tl.load(owner + row), token)
    finite = (best < float("inf")) & (best > float("-inf"))
    tl.store(chosen + row, tl.where(finite, token, -1 - token))


@triton.jit(do_not_specialize_on_alignment=["own"])
def embed_norm(
    ids,  # [rows], int64
    embedding,  # [vocabulary, SIZE]
    residual,  # [rows, SIZE]: receives the embeddings
    weight,  # [SIZE]
    out,  # [rows, SIZE]: their norm
    epsilon,
    own,  # as of `version_of_row`, as what follows
    slots,
    own_stride,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    OWN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * SIZE
    source = tl.load(ids + tl.program_id(0)) * SIZE
    at = tl.arange(0, SIZE_PAD)
    here = at < SIZE
    found = tl.load(embedding + source + at, mask=here, other=0.0)
    weight = version_of_row(weight, own, slots, own_stride, OWN)
    scale = tl.load(weight + at, mask=here, other=0.0)
    tl.store(residual + row + at, found, mask=here)
    wide = found.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + epsilon)).to(found.dtype)
    tl.store(out + row + at, (scale.to(tl.float32) * normed.to(tl.float32)).to(found.dtype), mask=here)


@triton.jit(do_not_specialize_on_alignment=["own"])
def add_norm(
    added,  # [rows, SIZE]
    residual,  # [rows, SIZE]: becomes residual + added
    weight,  # [SIZE]
    out,  # [rows, SIZE]: the sum, normed by its root mean square
    epsilon,
    own,  # as of `version_of_row`, as what follows
    slots,
    own_stride,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    OWN: tl.constexpr,
):
    """Add, normalize and scale; round where the model's modules round: after the sum, before the weight."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.arange(0, SIZE_PAD)
    here = at < SIZE
    total = tl.load(residual + row + at, mask=here, other=0.0)
    weight = version_of_row(weight, own, slots, own_stride, OWN)
    scale = tl.load(weight + at, mask=here, other=0.0)
    more = tl.load(added + row + at, mask=here, other=0.0)
    total = (total.to(tl.float32) + more.to(tl.float32)).to(total.dtype)
    tl.store(residual + row + at, total, mask=here)
    wide = total.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + epsilon)).to(total.dtype)
    tl.store(out + row + at, (scale.to(tl.float32) * normed.to(tl.float32)).to(total.dtype), mask=here)


@triton.jit
def silu_times(gate, up, out, width, gate_row, up_row, BLOCK: tl.constexpr):
    """Compute out [rows, width] = silu(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < width
    opened = tl.load(gate + row * gate_row + at, mask=here, other=0.0)
    value = tl.load(up + row * up_row + at, mask=here, other=0.0)
    wide = opened.to(tl.float32)
    silu = (wide * tl.sigmoid(wide)).to(opened.dtype)
    tl.store(out + row * width + at, (silu.to(tl.float32) * value.to(tl.float32)).to(value.dtype), mask=here)
