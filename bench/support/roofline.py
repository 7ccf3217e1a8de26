"""Estimate the least time of a device for a workload: weights and keys read once, products at full rate.

All queries come at once and start in order; no time is counted for anything but memory and products. Sizes
are those of a dense decoder; a model with experts has no such floor here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from site_engine.model.loader import LoadedModel

PREFILL_TOKENS = 16384  # of one iteration
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
MIN_COPY_BYTES, MAX_COPY_BYTES = 1 << 24, 1 << 30


class Rates(NamedTuple):
    """Measured rates of a device: copying memory (bytes read and written), and one large product."""

    bytes_per_s: float
    flop_per_s: float


class Sizes(NamedTuple):
    """The cost of a pass: numbers in the layers' weights and the last product, cost of attention."""

    body: int
    head: int
    number_bytes: int
    kv_token_bytes: int
    attention_flop: int  # of a prompt, per squared token


def sizes(model: LoadedModel) -> Sizes | None:
    """Return the sizes of a model, or None for one with experts."""
    config = model.model.config.get_text_config()
    if any(getattr(config, name, None) for name in EXPERTS):
        return None
    head = model.model.get_output_embeddings().weight.numel()
    embedding = model.model.get_input_embeddings().weight
    tied = model.model.get_output_embeddings().weight.data_ptr() == embedding.data_ptr()
    whole = sum(parameter.numel() for parameter in model.model.parameters())
    width = sum(shape.key_dim + shape.value_dim for shape in model.layers)
    return Sizes(
        body=whole - head - (0 if tied else embedding.numel()),
        head=head,
        number_bytes=model.dtype.itemsize,
        kv_token_bytes=model.dtype.itemsize
        * sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in model.layers),
        attention_flop=config.num_attention_heads * width,
    )


def measure(device: torch.device, dtype: torch.dtype, weight_bytes: int, clock: Callable[[], float]) -> Rates:
    """Time a copy of the model's size in bytes and a large product; the fastest of some."""
    count = min(max(weight_bytes, MIN_COPY_BYTES), MAX_COPY_BYTES) // dtype.itemsize
    source = torch.ones(count, dtype=dtype, device=device)
    target = torch.empty_like(source)
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    copy_s = _seconds(lambda: target.copy_(source), device, clock)
    product_s = _seconds(lambda: torch.mm(left, right), device, clock)
    return Rates(2 * count * dtype.itemsize / copy_s, 2 * size**3 / product_s)


def _seconds(call: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    took = []
    for _ in range(12):
        began = clock()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took.append(clock() - began)
    return min(took)


def step_seconds(
    model: Sizes, rates: Rates, *, tokens: int, sampled: int, kv_tokens: int, prompts: Sequence[int]
) -> float:
    """Return the seconds of one iteration: `tokens` through the layers, `sampled` through the last product,
    `kv_tokens` read.
    """
    seconds = 0.0
    for numbers, rows in ((model.body, tokens), (model.head, sampled)):
        read_s = numbers * model.number_bytes / rates.bytes_per_s
        seconds += max(read_s, 2 * rows * numbers / rates.flop_per_s)
    attention = model.attention_flop * sum(prompt * prompt for prompt in prompts)
    return seconds + kv_tokens * model.kv_token_bytes / rates.bytes_per_s + attention / rates.flop_per_s


def ideal_seconds(lengths: Sequence[tuple[int, int]], slots: int, model: Sizes, rates: Rates) -> float:
    """Return the seconds for all queries, given as (prompt, response) tokens, at most `slots` at once."""
    waiting = list(reversed(lengths))
    running: list[tuple[int, int]] = []  # tokens held, tokens still to come
    seconds = 0.0
    while waiting or running:
        budget = PREFILL_TOKENS - len(running)
        new: list[tuple[int, int]] = []
        while waiting and len(running) + len(new) < slots and waiting[-1][0] <= budget:
            new.append(waiting.pop())
            budget -= new[-1][0]
        seconds += step_seconds(
            model,
            rates,
            tokens=len(running) + sum(prompt for prompt, _ in new),
            sampled=len(running) + len(new),
            kv_tokens=sum(held for held, _ in running),
            prompts=[prompt for prompt, _ in new],
        )
        running = [(held + 1, left - 1) for held, left in running + new if left > 1]
    return seconds
