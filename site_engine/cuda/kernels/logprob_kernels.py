"""Triton kernels that rank the logits of some rows of a step: the best tokens and their log probabilities.

Each row is read once, in spans that fill the GPU; the best of all spans are ranked then. Where a step's
tensors lie is told by numbers in memory, as in `rule_kernels.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

LEAST, LITTLE = tl.constexpr(-1e38), tl.constexpr(1e-38)
"""Instead of -inf and of 0, in rows without a finite logit, of which nothing is read."""


@triton.jit
def best_of_spans(
    addresses,  # [6], int64: as of `rule_kernels.rule_rows`; the last is how many of the best are wanted
    of_rows,  # [6, ROWS]: first the sampled rows, or -1
    like,  # [1], of the type of the logits
    values,  # [ROWS, best, spans], float32: receives the largest logits of each span
    tokens,  # as values, int32: receives their tokens
    sums,  # [ROWS, 2, spans], float32: receives the largest logit, and the sum of exp(logit - largest)
    best,
    vocabulary,
    spans,
    SPAN: tl.constexpr,
):
    row, span = tl.program_id(0), tl.program_id(1)
    sampled = tl.load(of_rows + row).to(tl.int64)
    if sampled >= 0:
        place = span * SPAN + tl.arange(0, SPAN)
        logits = tl.load(addresses).to(like.dtype) + sampled * vocabulary
        left = tl.load(logits + place, mask=place < vocabulary, other=float("-inf")).to(tl.float32)
        left = tl.where(tl.abs(left) < float("inf"), left, float("-inf"))  # of a row that fails, if others
        top = tl.maximum(tl.max(left, 0), LEAST)
        tl.store(sums + 2 * row * spans + span, top)
        tl.store(sums + (2 * row + 1) * spans + span, tl.sum(tl.exp(left - top), 0))
        to = row * best * spans + span
        for rank in range(tl.load(addresses + 5).to(tl.int32)):
            largest, at = tl.max(left, 0, return_indices=True)
            tl.store(values + to + rank * spans, largest)
            tl.store(tokens + to + rank * spans, span * SPAN + at)
            left = tl.where(tl.arange(0, SPAN) == at, float("-inf"), left)


@triton.jit
def best_of_rows(
    addresses,  # these are as of `best_of_spans`
    of_rows,
    like,
    values,
    tokens,
    sums,
    ranking,  # [ROWS, 2, 1 + best], float64: receives tokens, chosen and best, and their log probabilities
    newest,  # [1], of the type of chosen tokens
    best,
    vocabulary,
    spans,
    SPANS: tl.constexpr,  # at least all
    CANDIDATES: tl.constexpr,  # at least the best of all spans
):
    row = tl.program_id(0)
    sampled = tl.load(of_rows + row).to(tl.int64)
    if sampled >= 0:
        span, count = tl.arange(0, SPANS), tl.load(addresses + 5).to(tl.int32)
        its = sums + 2 * row * spans + span
        tops = tl.load(its, mask=span < spans, other=LEAST)
        top = tl.max(tops, 0)
        parts = tl.load(its + spans, mask=span < spans, other=0.0) * tl.exp(tops - top)
        total = top + tl.log(tl.maximum(tl.sum(parts, 0), LITTLE))
        # those that are not finite are marked as less than 0
        chosen = tl.maximum(tl.load(tl.load(addresses + 1).to(newest.dtype) + sampled), 0).to(tl.int64)
        logit = tl.load(tl.load(addresses).to(like.dtype) + sampled * vocabulary + chosen).to(tl.float32)
        to = ranking + 2 * row * (1 + best)
        tl.store(to, chosen.to(tl.float64))
        tl.store(to + 1 + best, (logit - total).to(tl.float64))
        place = tl.arange(0, CANDIDATES)
        left = tl.load(values + row * best * spans + place, mask=place < count * spans, other=float("-inf"))
        for rank in range(count):
            largest, at = tl.max(left, 0, return_indices=True)
            token = tl.load(tokens + row * best * spans + at)
            tl.store(to + 1 + rank, token.to(tl.float64))
            tl.store(to + 2 + best + rank, (largest - total).to(tl.float64))
            left = tl.where(place == at, float("-inf"), left)
