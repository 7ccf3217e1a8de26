"""Encodes log probabilities in OpenAI's two formats: of chat and of text completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from gateway.domain import Delta, TokenLogprob

_json = msgspec.json.Encoder().encode
MIN_LOGPROB = -9999.0
"""JSON has no infinity; OpenAI writes this number instead."""


def chat_logprobs(tokens: Sequence[TokenLogprob], _offset_chars: int = 0) -> dict[str, object]:
    content = [_entry(token) | {"top_logprobs": [_entry(top) for top in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def text_logprobs(tokens: Sequence[TokenLogprob], offset_chars: int = 0) -> dict[str, object]:
    """Render log probabilities for a text completion. `offset_chars` is the number of characters of the
    choice's text before these tokens. A token's offset is that of the character in which it begins.
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


class LogprobLists:
    """The log probabilities of one choice in one of the formats, each encoded on arrival.

    As objects until the end, the log probabilities of a long answer would take ten times the memory, and
    encoding them would then block the event loop for seconds.
    """

    def __init__(
        self, render: Callable[[Sequence[TokenLogprob], int], dict[str, object]] = chat_logprobs
    ) -> None:
        self._render = render
        self._lists: dict[str, bytearray] = {}
        self._chars = 0

    def add(self, delta: Delta) -> None:
        if delta.prompt_logprobs or delta.logprobs:
            self.add_tokens(delta.prompt_logprobs + delta.logprobs)

    def add_tokens(self, tokens: Sequence[TokenLogprob]) -> None:
        for name, values in self._render(tokens, self._chars).items():
            if isinstance(values, list) and values:
                encoded = self._lists.setdefault(name, bytearray())
                encoded += b"," if encoded else b""
                encoded += _json(values)[1:-1]
        self._chars += sum(map(text_chars, tokens))

    def fields(self) -> dict[str, object]:
        """Return the object that holds the lists."""
        lists = {name: msgspec.Raw(b"[" + encoded + b"]") for name, encoded in self._lists.items()}
        return self._render((), 0) | lists


class TextLogprobs(LogprobLists):
    """Log probabilities of the text alone, in chat's format. Those of calls and reasoning are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._textless: list[TokenLogprob] = []  # of tokens not yet followed by text
        self._in_text = False

    def add(self, delta: Delta) -> None:
        if found := self.of_text(delta):
            self.add_tokens(found)

    def of_text(self, delta: Delta) -> Sequence[TokenLogprob]:
        """Return the log probabilities that `delta` adds to the text, including those held back so far."""
        found: Sequence[TokenLogprob] = ()
        in_text = bool(delta.text) or (self._in_text and not delta.reasoning)
        self._textless += delta.logprobs
        if in_text:
            found, self._textless = self._textless, []
        elif delta.logprobs and (delta.tool_calls or delta.reasoning):
            self._textless = []
        begins_call = any(part.id for part in delta.tool_calls)
        self._in_text = in_text and not (delta.refusal or begins_call)
        return found


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
