"""The facts of a query's end that OpenTelemetry's conventions for generative AI ask beyond its outcome."""

from __future__ import annotations

from typing import NamedTuple


class Ending(NamedTuple):
    """`operation` is "chat", "text_completion", "embeddings" or "rerank"; `finish_reasons` are those of the
    choices that ended, `error_type` the class in `errors.py`. The tokens are parts of the outcome's.
    """

    operation: str = "chat"
    finish_reasons: tuple[str, ...] = ()
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    error_type: str = ""
