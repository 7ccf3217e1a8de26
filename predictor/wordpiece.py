"""WordPiece tokenizer for the small encoder: encode a text as vocabulary ids, longest match first.

Pure Python, so serving requires no tokenizer library. Unlike BERT, line breaks are encoded.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from predictor.features import truncate

HEAD_PIECES = 80
TAIL_PIECES = 46
"""Of longer texts, only the first HEAD_PIECES and the last TAIL_PIECES are encoded."""
MAX_PIECES = HEAD_PIECES + TAIL_PIECES + 2
PAD_MULTIPLE = 4
"""Encoded texts are padded to a multiple of this, so that an encoder can merge neighbouring pieces."""
MAX_WORD_CHARS = 40
MAX_CACHED_WORDS = 50_000
PAD, LINE, PARAGRAPH, UNKNOWN, START, END = "[PAD]", "[unused1]", "[unused2]", "[UNK]", "[CLS]", "[SEP]"
SPECIAL_PIECES = frozenset((PAD, LINE, PARAGRAPH, UNKNOWN, START, END))

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\n[\n\r\t ]*|[^\W_]+|[^\w\s]|_")
_PLAIN_WORD = re.compile(r"[a-z0-9]+|\n[\n\r\t ]*|[^\w\s]|_")  # the same for lower-case ASCII, faster


class WordPieceTokenizer:
    """Encode texts. An id is a position in the vocabulary; pieces that continue a word start with `##`."""

    def __init__(self, vocabulary: Sequence[str]) -> None:
        self._ids = {piece: index for index, piece in enumerate(vocabulary)}
        self._unknown = (self._ids[UNKNOWN],)
        self._line, self._paragraph = (self._ids[LINE],), (self._ids[PARAGRAPH],)
        self._start, self._end = self._ids[START], self._ids[END]
        self._cache: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text with the start and end tokens, at most MAX_PIECES in all."""
        normalized = _normalize(truncate(text))
        words = (_PLAIN_WORD if normalized.isascii() else _WORD).findall(normalized)
        known = zip(map(self._cache.get, words), words, strict=True)
        ids = [piece for pieces, word in known for piece in pieces or self._encode_word(word)]
        if len(ids) > HEAD_PIECES + TAIL_PIECES:
            ids = ids[:HEAD_PIECES] + ids[-TAIL_PIECES:]
        return [self._start, *ids, self._end]

    def _encode_word(self, word: str) -> tuple[int, ...]:
        if word[0] == "\n":
            return self._paragraph if word.count("\n") > 1 else self._line
        pieces = self._longest_matches(word) if len(word) <= MAX_WORD_CHARS else self._unknown
        if len(self._cache) >= MAX_CACHED_WORDS:
            self._cache.clear()
        self._cache[word] = pieces
        return pieces

    def _longest_matches(self, word: str) -> tuple[int, ...]:
        """Split a word greedily, longest piece first. A word with an uncovered part becomes one [UNK]."""
        pieces: list[int] = []
        start = 0
        while start < len(word):
            mark = "##" if start else ""
            for end in range(len(word), start, -1):
                piece = self._ids.get(mark + word[start:end])
                if piece is not None:
                    break
            else:
                return self._unknown
            pieces.append(piece)
            start = end
        return tuple(pieces)


def pad(encoded: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Return encoded texts as one array `[texts, width]`, padded with zeros at the end."""
    width = -(-max(map(len, encoded)) // PAD_MULTIPLE) * PAD_MULTIPLE
    rectangle = np.zeros((len(encoded), width), dtype=np.int64)
    for row, pieces in enumerate(encoded):
        rectangle[row, : len(pieces)] = pieces
    return rectangle


def _normalize(text: str) -> str:
    """Return the text in lower case without combining marks."""
    lowered = text.lower()
    if lowered.isascii():
        return lowered
    return "".join(
        sign for sign in unicodedata.normalize("NFD", lowered) if unicodedata.category(sign) != "Mn"
    )
