"""Choose how many prompt tokens of batches an iteration computes beside the rows that decode. Pure.

An iteration reads all weights once. Up to about a hundred tokens the device waits for that, so that prompts
beside a few long answers are nearly free, where all prompts at once take the time of computing them.
"""

from __future__ import annotations

FREE_TOKENS = 128
"""Tokens that an iteration computes in the time of reading the weights.

An 8B model on an H200 takes 4.7 ms for 32 rows, 6.0 for 128, 9.2 for 256 (bench/results/gpu.md): from 32 to
128 a token costs 14 us, beyond 128 as much as in a long prompt, 23 to 25.
"""
LEAST_TOKENS = 32
"""Prompt tokens of an iteration with many rows, so that no line waits for ever."""


def prompt_tokens(rows: int) -> int:
    """Return the prompt tokens for an iteration in which `rows` decode."""
    return max(LEAST_TOKENS, FREE_TOKENS - rows)
