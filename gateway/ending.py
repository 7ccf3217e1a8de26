"""Facts of a query's end that OpenTelemetry's conventions for generative AI require beyond the outcome."""

from __future__ import annotations

from typing import NamedTuple


class Ending(NamedTuple):
    """`operation` is "chat", "text_completion", "embeddings" or "rerank". `finish_reasons`: one per
    finished choice. `error_type`: the name of a class in `errors.py`. `cached_tokens` and `reasoning_tokens`
    are parts of the outcome's prompt and completion tokens.
    """

    operation: str = "chat"
    finish_reasons: tuple[str, ...] = ()
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    error_type: str = ""
