"""Detokenize incrementally, without partial characters, stop strings or repeated characters.

The concatenated parts equal the tokenizer's text of all tokens, except for an incomplete last character.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

UNFINISHED = "\ufffd"
CHARACTER_BYTES = 4
"""The maximum number of bytes in a UTF-8 character."""
BEFORE_TOKENS = CHARACTER_BYTES
"""The maximum number of trailing prompt tokens used as decoding context."""
SILENT_TOKENS = 8
"""The number of pending tokens, such as end tokens without text, above which the tail is shortened."""
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # SentencePiece's name for a single-byte token


class TokenText(NamedTuple):
    """The text and bytes of a single token, for log probabilities. The token may be part of a character."""

    text: str
    raw: bytes


class Decoder(Protocol):
    """Decode the tokens of one response to text. Keeps the state of incomplete characters."""

    def push(self, token_id: int) -> str: ...


class Vocabulary(Protocol):
    """Convert a model's tokens to text. Shared by all requests."""

    def decoder(self, before: Sequence[int] = ()) -> Decoder:
        """Return a decoder for text that continues the tokens `before`, or that starts a text if empty."""
        ...

    def token(self, token_id: int) -> TokenText: ...


class ByteVocabulary:
    """Decode byte-level tokens, with one table lookup per token. Special tokens have no bytes."""

    def __init__(self, raws: Sequence[bytes | None], names: Sequence[str]) -> None:
        """`raws[id]`: the token's bytes, None for a special token. `names[id]`: the token's name."""
        self._raws = raws
        self._names = names
        self._texts = [None if raw is None else _whole(raw) for raw in raws]

    def decoder(self, before: Sequence[int] = ()) -> Decoder:
        return _ByteDecoder(self._raws, self._texts)

    def token(self, token_id: int) -> TokenText:
        if token_id >= len(self._raws):
            return TokenText("", b"")
        raw = self._raws[token_id]
        if raw is None:
            return TokenText(self._names[token_id], self._names[token_id].encode())
        return TokenText(raw.decode("utf-8", "replace"), raw)


def _whole(raw: bytes) -> str | None:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return None


class _ByteDecoder:
    def __init__(self, raws: Sequence[bytes | None], texts: Sequence[str | None]) -> None:
        self._raws = raws
        self._texts = texts
        self._utf8: codecs.IncrementalDecoder | None = None  # set only while a character may be incomplete

    def push(self, token_id: int) -> str:
        if token_id >= len(self._raws):  # padding of the vocabulary: ids without text
            return ""
        if self._utf8 is None:
            text = self._texts[token_id]
            if text is not None:
                return text
        return self._push_partial(self._raws[token_id])

    def _push_partial(self, raw: bytes | None) -> str:
        if raw is None:
            return ""
        if self._utf8 is None:
            self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        text = self._utf8.decode(raw)
        if not self._utf8.getstate()[0]:
            self._utf8 = None
        return text


class DecodingVocabulary:
    """The vocabulary of any other tokenizer: decode a short tail of tokens and return the new characters.

    Some tokenizers omit the space before the first word of a text. Text that continues a prompt includes it.
    """

    def __init__(self, decode: Callable[[list[int]], str], name: Callable[[int], str]) -> None:
        self._decode = decode
        self._name = name

    def decoder(self, before: Sequence[int] = ()) -> Decoder:
        tails = [list(before[-count:]) for count in range(1, min(BEFORE_TOKENS, len(before)) + 1)]
        whole = [tail for tail in tails if UNFINISHED not in self._decode(tail)] or [[]]
        return _TailDecoder(self._decode, next(filter(self._decode, whole), whole[-1]))

    def token(self, token_id: int) -> TokenText:
        name = self._name(token_id)
        text = self._decode([token_id, token_id])[len(self._decode([token_id])) :] or name
        byte = _BYTE.fullmatch(name)
        return TokenText(text, text.encode() if byte is None else bytes.fromhex(byte[1]))


class _TailDecoder:
    """Decode a tail of tokens: those whose text was emitted last, and those after them."""

    def __init__(self, decode: Callable[[list[int]], str], before: list[int]) -> None:
        self._decode = decode
        self._keep(before, len(before))

    def _keep(self, ids: list[int], known: int) -> None:
        """Set the tail to `ids`. The text of its first `known` ids has been emitted."""
        self._ids, self._known = ids, known
        self._given = len(self._decode(ids[:known])) if known else 0  # emitted characters of the tail

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        certain = text.rstrip(UNFINISHED)
        pending, unfinished = len(self._ids) - self._known, len(text) - len(certain)
        if pending >= CHARACTER_BYTES <= unfinished:  # only the last ones can start a character
            certain = text[: -(CHARACTER_BYTES - 1)]
        fresh = certain[self._given :]
        self._given += len(fresh)
        if fresh and len(certain) == len(text):
            self._keep(self._ids[self._known :], pending)
        elif pending > SILENT_TOKENS:
            self._shorten(text, certain)
        return fresh

    def _shorten(self, text: str, certain: str) -> None:
        """Drop tokens from a growing tail if they do not affect its text: a token without text, or bytes that
        do not start a character.
        """
        begin = len(self._ids) - 2 * CHARACTER_BYTES
        if text == self._decode(self._ids[:-1]):
            self._ids.pop()
        elif certain == self._decode(self._ids[: begin + CHARACTER_BYTES + 1]):
            self._keep(self._ids[begin:], CHARACTER_BYTES + 1)


class ShowingDecoder:
    """Decode some special tokens to their names, such as the markers of tool calls and reasoning."""

    def __init__(self, decoder: Decoder, names: Mapping[int, str]) -> None:
        self._decoder = decoder
        self._names = names

    def push(self, token_id: int) -> str:
        name = self._names.get(token_id)
        return self._decoder.push(token_id) if name is None else name


class NoText:
    """The vocabulary of a model without a tokenizer: no token has text."""

    def decoder(self, before: Sequence[int] = ()) -> Decoder:
        return self

    def push(self, token_id: int) -> str:
        return ""

    def token(self, token_id: int) -> TokenText:
        return TokenText("", b"")


class TokenNames(NoText):
    """Name tokens by their ids, for processes without the tokenizer's text."""

    def token(self, token_id: int) -> TokenText:
        return TokenText(str(token_id), b"")


class TextStream:
    """The text of one response. Buffers a possible stop string and skips text the client has received."""

    def __init__(self, decoder: Decoder, stops: tuple[str, ...] = (), skip_chars: int = 0) -> None:
        self.stopped = ""  # the stop string found, if any
        self._decode = decoder.push
        self._stops = stops
        self._skip = skip_chars
        self._buffer = ""

    @property
    def unsaid_chars(self) -> int:
        """The number of characters delivered before that have not been decoded again yet."""
        return self._skip

    def push(self, token_id: int, watch: bool = True) -> str:
        """Decode a token and return new final text. `watch`: match stop strings (off before `min_tokens`)."""
        fresh = self._decode(token_id)
        if not fresh:
            return ""
        if self._stops:
            fresh = self._scan(fresh) if watch else self._take_buffer() + fresh
        return self._skipped(fresh) if self._skip else fresh

    def flush(self, rest: str = "") -> str:
        """Return the buffered text at the end of the response. `rest` is the text a decoder had buffered."""
        if rest and self._stops:
            rest = self._scan(rest)
        buffer = rest if self.stopped else rest + self._take_buffer()
        return self._skipped(buffer) if self._skip else buffer

    def _scan(self, fresh: str) -> str:
        text = self._take_buffer() + fresh
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped = min(found)
            return text[:at]
        keep = max(overlap(text, stop) for stop in self._stops)
        self._buffer = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _take_buffer(self) -> str:
        buffer, self._buffer = self._buffer, ""
        return buffer

    def _skipped(self, text: str) -> str:
        skip = min(self._skip, len(text))
        self._skip -= skip
        return text[skip:]


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
