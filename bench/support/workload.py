"""Seeded request lengths in the shape of ShareGPT and Alpaca; token ids are random.

Log-normal lengths, clipped; the mean is set so that the clipped sample of the seed has the stated mean.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple


class Shape(NamedTuple):
    """Mean and spread (of the logarithm) of prompt and response lengths, and their limits."""

    prompt_mean: float
    prompt_sigma: float
    response_mean: float
    response_sigma: float
    least: int
    most: int


SHAPES = {
    "sharegpt": Shape(161, 1.1, 338, 0.8, 4, 1024),
    "alpaca": Shape(19, 0.5, 58, 0.9, 2, 512),
}
FIRST_ORDINARY_ID = 10
SPECIAL_IDS = 300  # at the end of a vocabulary


class Query(NamedTuple):
    prompt: list[int]
    response_tokens: int


def lengths(name: str, count: int, seed: int = 0) -> list[tuple[int, int]]:
    """Return (prompt, response) tokens of each query."""
    shape, rnd = SHAPES[name], random.Random(seed)
    prompts = _draw(rnd, count, shape.prompt_mean, shape.prompt_sigma, shape)
    responses = _draw(rnd, count, shape.response_mean, shape.response_sigma, shape)
    return list(zip(prompts, responses, strict=True))


def queries(
    name: str, count: int, *, vocab_size: int, context_tokens: int, repetition: int = 0
) -> list[Query]:
    """Return the same lengths with new token ids in each repetition, cut to the context of the model."""
    rnd = random.Random(1000 + repetition)
    last = max(FIRST_ORDINARY_ID + 1, vocab_size - SPECIAL_IDS)
    made = []
    for prompt_tokens, response_tokens in lengths(name, count):
        prompt = [
            rnd.randrange(FIRST_ORDINARY_ID, last) for _ in range(min(prompt_tokens, context_tokens // 2))
        ]
        made.append(Query(prompt, min(response_tokens, context_tokens - len(prompt))))
    return made


def _draw(rnd: random.Random, count: int, mean: float, sigma: float, shape: Shape) -> list[int]:
    draws = [rnd.gauss(0, 1) for _ in range(count)]

    def clipped(mu: float) -> list[int]:
        return [min(shape.most, max(shape.least, round(math.exp(mu + sigma * draw)))) for draw in draws]

    low, high = 0.0, 9.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(clipped(middle)) / count < mean:
            low = middle
        else:
            high = middle
    return clipped(low)
