"""Certify that the engine computes what the model computes, through pages, chunks and single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isnan, sqrt
from typing import Any

import torch

from site_engine.core.loader_turns import released
from site_engine.core.page_pool import PagePool
from site_engine.core.request import Request, Sampling
from site_engine.core.schedule_plan import ScheduledChunk, SchedulePlan
from site_engine.model.kv_cache import KVCache, LayerShape
from site_engine.model.runner import Forward, PackedRunner, Runner, UseVariants

PROMPT_TOKENS = (37, 12, 1)
DECODED_TOKENS = 3  # at the end of each prompt, one by one, as if they had been generated
CHUNK_TOKENS = 16
PAGE_TOKENS = 4
TOLERANCE = {torch.float32: 2e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""The largest difference of two logits that counts as equal, relative to the largest logit."""
TOLERANT_LAYERS = 32
"""The tolerances hold up to this number of layers; in a deeper model more roundings add up."""


def limit(dtype: torch.dtype, layers: int) -> float:
    """Return the allowed difference between two computations of the logits, relative to the largest logit.

    Each layer adds a rounding error, and independent errors grow with the square root of their number.
    """
    return TOLERANCE.get(dtype, 0.0) * max(1.0, sqrt(layers / TOLERANT_LAYERS))


def sample_prompts(vocab_size: int) -> list[list[int]]:
    """Return random prompts, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    lengths = [length + DECODED_TOKENS for length in PROMPT_TOKENS]
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def largest_difference(
    forward: Forward,
    layers: Sequence[LayerShape],
    prompts: Sequence[list[int]],
    expected: Sequence[torch.Tensor],
    *,
    variants: Sequence[Any] = (),
    use_variants: UseVariants | None = None,
) -> float:
    """Return the largest difference of the engine's logits from `expected`, relative to the largest logit.

    `expected` holds logits [tokens, vocabulary] for each prompt, `variants` the variant that answers it, None
    for the base.
    """
    requests = [Request(str(row), ids) for row, ids in enumerate(prompts)]
    for request, variant in zip(requests, variants, strict=False):
        request.answered_by(variant)
    pool = PagePool(sum(-(-len(each.tokens) // PAGE_TOKENS) for each in requests), PAGE_TOKENS)
    with released():
        kv_cache = KVCache(layers, pool.capacity, PAGE_TOKENS, expected[0].dtype, expected[0].device)
    runner = PackedRunner(
        forward, kv_cache, slots=len(prompts), pages_per_row=pool.capacity, use_variants=use_variants
    )
    for row, request in enumerate(requests):
        request.row, request.pages = row, pool.take(pool.pages_for(len(request.tokens))) or []
        if request.virtual_tokens:
            kv_cache.write_virtual(request, 0)
            request.computed = request.virtual_tokens
    worst = 0.0
    while plan := _next_plan(requests):
        rows = runner.run(plan).rows.float()
        places = [
            (request.row, start + length - 1 - request.virtual_tokens)
            for request, start, length, _ in plan.chunks
        ]
        wanted = torch.stack([expected[row][place] for row, place in places]).float()
        worst = max(worst, _relative_difference(rows, wanted))
    return worst


def _relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of logits, relative to the largest expected one; inf for a NaN."""
    with released():
        difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    return inf if isnan(difference) else difference


def _next_plan(requests: Sequence[Request]) -> SchedulePlan:
    """Plan the next chunk or token of every prompt: some are still in chunks while others decode."""
    plan = SchedulePlan()
    for request in requests:
        start, left = request.computed, len(request.tokens) - request.computed
        if left > DECODED_TOKENS:
            length = min(CHUNK_TOKENS, left - DECODED_TOKENS)
            plan.prefills.append(ScheduledChunk(request, start, length, samples=True))
        elif left:
            length = 1
            plan.decoding.append(request)
            plan.starts.append(start)
        else:
            continue
        request.computed += length
    return plan


def runner_difference(
    runner: Runner, reference: Runner, vocab_size: int, limit_tokens: int, variant: Any
) -> float:
    """Return the largest difference between two runners' logits, relative to the largest logit.

    Both share one KV cache, whose first pages are overwritten. The prompt is computed as two chunks and one
    decoded token, so that prefill, continued prefill and decode are all compared. `variant`: answers the
    prompt instead of the base.
    """
    tokens = sample_prompts(vocab_size)[0][: limit_tokens - 1]
    request = Request("certify", tokens, Sampling(temperature=0.0))
    request.variant = variant
    request.row, request.pages = 0, list(range(1, -(-len(tokens) // runner.kv_cache.page_size) + 1))
    middle, last = len(tokens) // 2, len(tokens) - 1
    plans = [
        SchedulePlan([], [ScheduledChunk(request, 0, middle, True)]),
        SchedulePlan([], [ScheduledChunk(request, middle, last - middle, True)]),
        SchedulePlan([ScheduledChunk(request, last, 1, True)]),
    ]
    worst = 0.0
    for plan in plans:
        expected = reference.run(plan).rows.float()
        worst = max(worst, _relative_difference(runner.run(plan).rows.float(), expected))
    return worst
