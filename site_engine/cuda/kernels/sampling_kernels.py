"""Triton kernels that sample, as `sampler.py` does."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["rows"])  # eager steps have any number: compile once
def sample_rows(
    logits,  # [rows, vocabulary]
    rules,  # [5, rows], 32 bits each: temperature (0: leave the row), top_k, top_p, min_p, the random number
    owner,  # [rows]: the slot that a row's token belongs to
    newest,  # [slots]
    chosen,  # [rows]: the best token; replaced by the sampled one; negative: the logits were not finite
    vocabulary,
    row_stride,
    rows,
    SPAN: tl.constexpr,
    SPANS_PAD: tl.constexpr,
    BITS: tl.constexpr,  # of a logit
    PDL: tl.constexpr,
):
    """Sample one row per program; top-k and top-p find the lowest kept logit, two bits at a time."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    temperature = tl.load(rules + row).to(tl.float32, bitcast=True)
    best = tl.load(chosen + row)
    if (temperature == 0.0) | (best < 0):
        return
    top_k = tl.load(rules + rows + row)
    top_p = tl.load(rules + 2 * rows + row).to(tl.float32, bitcast=True)
    min_p = tl.load(rules + 3 * rows + row).to(tl.float32, bitcast=True)
    number = (
        tl.load(rules + 4 * rows + row).to(tl.uint32, bitcast=True).to(tl.float64) * 2.3283064365386963e-10
    )
    its = logits + row.to(tl.int64) * row_stride
    top = tl.load(its + best).to(tl.float32)
    scale = LOG2_E / temperature
    least = tl.full([], -(1 << (BITS - 1)), tl.int32)
    if top_k > 0:
        least = _least(its, vocabulary, top, 0.0, least, top_k.to(tl.float32), SPAN, BITS)
    if top_p < 1.0:
        mass, _, _ = _masses(its, vocabulary, top, scale, least, least, 0, SPAN, BITS)
        least = _least(its, vocabulary, top, scale, least, top_p * mass, SPAN, BITS)
    spans = tl.arange(0, SPANS_PAD)
    sums = tl.zeros([SPANS_PAD], tl.float32)
    for span in range((vocabulary + SPAN - 1) // SPAN):
        _, weights = _span(its, span * SPAN, vocabulary, top, scale, least, min_p, SPAN, BITS)
        sums = tl.where(spans == span, tl.sum(weights, 0), sums)
    ends = tl.cumsum(sums.to(tl.float64), 0)
    target = number * tl.max(ends, 0)
    before = tl.max(
        tl.where(ends <= target, ends, 0.0), 0
    )  # weight of the spans before the one that holds the target
    span = tl.sum((ends <= target).to(tl.int32), 0)
    place, weights = _span(its, span * SPAN, vocabulary, top, scale, least, min_p, SPAN, BITS)
    beyond = (before + tl.cumsum(weights, 0).to(tl.float64) > target) & (weights > 0)
    token = tl.min(tl.where(beyond, place, vocabulary), 0)
    last = tl.max(tl.where(weights > 0, place, 0), 0)  # if rounding leaves the target past the end
    token = tl.where(token < vocabulary, token, last)
    tl.store(newest + tl.load(owner + row), token)
    tl.store(chosen + row, token)


@triton.jit
def _least(its, vocabulary, top, scale, floor, goal, SPAN: tl.constexpr, BITS: tl.constexpr):
    """Return the highest rank at or above which the weights from `floor` on reach `goal`."""
    low = tl.full([], -(1 << (BITS - 1)), tl.int32)
    step = tl.full([], 1 << (BITS - 2), tl.int32)
    for _ in range(BITS // 2):
        one, two, three = _masses(its, vocabulary, top, scale, floor, low, step, SPAN, BITS)
        reached = (one >= goal).to(tl.int32) + (two >= goal).to(tl.int32) + (three >= goal).to(tl.int32)
        low += reached * step
        step = step >> 2
    return tl.maximum(low, floor)


@triton.jit
def _masses(its, vocabulary, top, scale, floor, low, step, SPAN: tl.constexpr, BITS: tl.constexpr):
    """Return the weights at or above the ranks one, two and three steps over `low`; without scale, counts."""
    one = tl.zeros([SPAN], tl.float32)
    two = tl.zeros([SPAN], tl.float32)
    three = tl.zeros([SPAN], tl.float32)
    for at in range(0, vocabulary, SPAN):
        place = at + tl.arange(0, SPAN)
        here = place < vocabulary
        values = tl.load(its + place, mask=here, other=0.0).to(tl.float32)
        rank = _rank(values, BITS)
        weights = tl.where(here & (rank >= floor), tl.exp2((values - top) * scale), 0.0)
        one += tl.where(rank >= low + step, weights, 0.0)
        two += tl.where(rank >= low + 2 * step, weights, 0.0)
        three += tl.where(rank >= low + 3 * step, weights, 0.0)
    return tl.sum(one, 0), tl.sum(two, 0), tl.sum(three, 0)


@triton.jit
def _span(its, at, vocabulary, top, scale, least, min_p, SPAN: tl.constexpr, BITS: tl.constexpr):
    """Return the tokens of a span and their weights relative to the best one; 0 where a rule forbids."""
    place = at + tl.arange(0, SPAN)
    here = place < vocabulary
    values = tl.load(its + place, mask=here, other=0.0).to(tl.float32)
    weights = tl.exp2((values - top) * scale)
    keep = here & (_rank(values, BITS) >= least) & (weights >= min_p)
    return place, tl.where(keep, weights, 0.0)


@triton.jit
def _rank(values, BITS: tl.constexpr):
    """Map floats to integers of the same order."""
    bits = values.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return ordered >> (32 - BITS)
