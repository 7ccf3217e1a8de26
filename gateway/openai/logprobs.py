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
    """`offset_chars`: the characters of the choice's text before these tokens. The offset of a token is that
    of the character that it begins in.
    """
    offsets = []
    for token in tokens:
        is_inside = offset_chars > 0 and bool(token.raw) and _continues(token.raw[0])
        offsets.append(offset_chars - is_inside)
        offset_chars += text_chars(token)
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [_alternatives(token) for token in tokens],
        "text_offset": offsets,
    }


def text_chars(token: TokenLogprob) -> int:
    """Return how many characters begin in a token; none if it adds no text or ends a character."""
    return sum(not _continues(byte) for byte in token.raw)


def _continues(byte: int) -> bool:
    """Return whether a byte of UTF-8 is not the first of its character."""
    return byte & 0xC0 == 0x80


def _entry(token: TokenLogprob) -> dict[str, object]:
    return {"token": token.token, "logprob": _finite(token.logprob), "bytes": list(token.raw)}


def _alternatives(token: TokenLogprob) -> dict[str, float | None] | None:
    """Return the top tokens and the sampled one, None for the first token of an echoed prompt."""
    if token.logprob is None:
        return None
    return {token.token: _finite(token.logprob)} | {top.token: _finite(top.logprob) for top in token.top}


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, MIN_LOGPROB)
