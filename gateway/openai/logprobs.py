"""Encodes log probabilities in OpenAI's two formats: of chat and of text completions."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.domain import TokenLogprob

MIN_LOGPROB = -9999.0
"""JSON has no infinity; OpenAI writes this number instead."""


def chat_logprobs(tokens: Sequence[TokenLogprob], _offset_chars: int = 0) -> dict[str, object]:
    content = [_entry(token) | {"top_logprobs": [_entry(top) for top in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def text_logprobs(tokens: Sequence[TokenLogprob], offset_chars: int = 0) -> dict[str, object]:
    """`offset_chars`: the position of the first of these tokens in the whole text of the choice."""
    offsets = []
    for token in tokens:
        offsets.append(offset_chars)
        offset_chars += len(token.token)
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [_alternatives(token) for token in tokens],
        "text_offset": offsets,
    }


def _entry(token: TokenLogprob) -> dict[str, object]:
    return {"token": token.token, "logprob": _finite(token.logprob), "bytes": list(token.raw)}


def _alternatives(token: TokenLogprob) -> dict[str, float | None] | None:
    """Return the top tokens and the sampled one, None for the first token of an echoed prompt."""
    if token.logprob is None:
        return None
    return {token.token: _finite(token.logprob)} | {top.token: _finite(top.logprob) for top in token.top}


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, MIN_LOGPROB)
