"""Extract the features of a text. Training and serving use the same code.

Features are hashed words and word pairs with TF weights, and DENSE_FEATURES counts. Extraction takes bounded
time and raises no exception for any text. Independent of lengths, models and onnx.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, cast
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

HEAD_CHARS = 3_000
TAIL_CHARS = 1_000
"""Of longer texts, only the beginning and the end are read, since instructions usually are there."""

WORD_SLOTS = 1 << 15
PAIR_SLOTS = 1 << 16
PADDING_SLOT = WORD_SLOTS + PAIR_SLOTS
SLOTS = PADDING_SLOT + 1
DENSE_FEATURES = 12

# Scripts without spaces are split into characters, and numbers into groups of at most four digits.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\u0e00-\u0e7f]|\d{1,4}|[^\W\d_]+|[^\w\s]|\n")
_PLAIN_WORD = re.compile(r"[a-z]+|[0-9]{1,4}|[^\w\s]|\n")  # the same for lower-case ASCII, faster


MAX_CACHED_WORDS = 50_000
SHORT_TEXT_WORDS = 48
"""For texts up to this length, Python is faster than numpy because of numpy's overhead per call."""
_CAPITAL_LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"


_LEFT_FACTOR, _RIGHT_FACTOR = 0x9E3779B1, 0x85EBCA77
_TF_WEIGHTS = (0.0, *(1.0 + np.log(np.arange(1, 2 * SHORT_TEXT_WORDS))).tolist())
"""The weight of a slot by its count, before normalization."""
_NUMBER_FLAG, _SIGN_FLAG = 1 << 32, 1 << 33
_word_cache: dict[str, int] = {}
"""Maps a word to its code: a 32-bit hash, with the flags for numbers and for signs above it."""


class Bag(NamedTuple):
    """The features of a text: distinct slots of the table, the weight of each slot, and dense counts."""

    slots: NDArray[np.int64]
    weights: NDArray[np.float32]
    dense: NDArray[np.float32]


class Batch(NamedTuple):
    """Bags padded to one width: slots and weights `[queries, width]`, dense `[queries, DENSE_FEATURES]`."""

    slots: NDArray[np.int64]
    weights: NDArray[np.float32]
    dense: NDArray[np.float32]


def truncate(text: str) -> str:
    """Return the part of a text that features are extracted from."""
    if len(text) <= HEAD_CHARS + TAIL_CHARS:
        return text
    return f"{text[:HEAD_CHARS]}\n{text[-TAIL_CHARS:]}"


def words(text: str) -> list[str]:
    """Return the lower-case words, numbers, signs and line breaks of a text, in order."""
    lowered = truncate(text).lower()
    return (_PLAIN_WORD if lowered.isascii() else _WORD).findall(lowered)


def bag(text: str) -> Bag:
    """Return the features of one text."""
    return bags([text])[0]


def bags(texts: Sequence[str]) -> list[Bag]:
    """Return the features of several texts. One call is cheaper than one call per text."""
    codes_of_texts = [_word_codes(words(text)) for text in texts]
    if len(codes_of_texts) == 1 and len(codes_of_texts[0]) <= SHORT_TEXT_WORDS:
        return [_bag_of_short_text(texts[0], codes_of_texts[0])]
    codes = np.array([code for each in codes_of_texts for code in each], dtype=np.uint64)
    owner = np.arange(len(texts)).repeat([len(each) for each in codes_of_texts])
    numbers, signs = (
        np.bincount(owner[(codes & np.uint64(flag)) > 0], minlength=len(texts))
        for flag in (_NUMBER_FLAG, _SIGN_FLAG)
    )
    counted = zip(texts, map(len, codes_of_texts), numbers.tolist(), signs.tolist(), strict=True)
    dense = np.array([_dense_features(*each) for each in counted], dtype=np.float32)
    slot_owner, slots, counts = _count_slots(codes & np.uint64(_NUMBER_FLAG - 1), owner)
    raw = 1.0 + np.log(counts)
    norms = np.sqrt(np.bincount(slot_owner, raw * raw, len(texts)))
    weights: NDArray[np.float32] = (raw / norms[slot_owner]).astype(np.float32)
    ends = np.bincount(slot_owner, minlength=len(texts)).cumsum().tolist()
    spans = zip([0, *ends], ends, dense, strict=False)
    return [Bag(slots[start:end], weights[start:end], dense_row) for start, end, dense_row in spans]


def _bag_of_short_text(text: str, codes: list[int]) -> Bag:
    """Return the features of one short text, bit-identical to those of the numpy path."""
    hashes = [code & (_NUMBER_FLAG - 1) for code in codes]
    slots = [each % WORD_SLOTS for each in hashes]
    slots += [
        WORD_SLOTS + (left * _LEFT_FACTOR + right * _RIGHT_FACTOR >> 7) % PAIR_SLOTS
        for left, right in pairwise(hashes)
    ]
    counts: dict[int, int] = {}
    for slot in slots:
        counts[slot] = counts.get(slot, 0) + 1
    distinct = sorted(counts)
    raw = [_TF_WEIGHTS[counts[slot]] for slot in distinct]
    squares = 0.0
    for each in raw:  # rounded at each step as in numpy: `sum` compensates rounding from Python 3.12 on
        squares += each * each
    norm = math.sqrt(squares)
    numbers = sum([code & _NUMBER_FLAG > 0 for code in codes])
    signs = sum([code & _SIGN_FLAG > 0 for code in codes])
    return Bag(
        np.array(distinct, dtype=np.int64),
        np.array([each / norm for each in raw], dtype=np.float32),
        np.array(_dense_features(text, len(codes), numbers, signs), dtype=np.float32),
    )


def _count_slots(
    hashes: NDArray[np.uint64], owner: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Count the slots of words and of adjacent word pairs in each text.

    Returns parallel arrays: text index, slot, and count.
    """
    pairs = (hashes[:-1] * np.uint64(_LEFT_FACTOR) + hashes[1:] * np.uint64(_RIGHT_FACTOR)) >> np.uint64(7)
    same_text = owner[:-1] == owner[1:]
    word_slots = hashes % np.uint64(WORD_SLOTS)
    pair_slots = (pairs % np.uint64(PAIR_SLOTS) + np.uint64(WORD_SLOTS))[same_text]
    slots = np.concatenate([word_slots, pair_slots]).astype(np.int64)
    keys, counts = np.unique(
        np.concatenate([owner, owner[:-1][same_text]]) * SLOTS + slots, return_counts=True
    )
    slot_owner, slot = np.divmod(keys, SLOTS)
    return slot_owner, slot, counts


def batch(bags: Sequence[Bag]) -> Batch:
    """Pad bags to a common width. Padding uses PADDING_SLOT with weight 0."""
    if len(bags) == 1 and len(bags[0].slots):
        (one,) = bags
        return Batch(one.slots[None], one.weights[None], one.dense[None])
    widths = np.array([len(each.slots) for each in bags])
    width = max(1, int(widths.max()))
    occupied = np.arange(width) < widths[:, None]
    slots = np.full((len(bags), width), PADDING_SLOT, dtype=np.int64)
    weights = np.zeros((len(bags), width), dtype=np.float32)
    slots[occupied] = np.concatenate([each.slots for each in bags])
    weights[occupied] = np.concatenate([each.weights for each in bags])
    return Batch(slots, weights, np.stack([each.dense for each in bags]))


def _word_codes(found: list[str]) -> list[int]:
    """Return the codes of words. Codes are cached; a full cache is cleared."""
    codes = list(map(_word_cache.get, found))
    if None not in codes:
        return cast(list[int], codes)
    if len(_word_cache) >= MAX_CACHED_WORDS:
        _word_cache.clear()
    return [code or _encode_word(word) for code, word in zip(codes, found, strict=True)]


def _encode_word(word: str) -> int:
    """Compute, cache and return the code of a word."""
    number, sign = word[0].isdigit() * _NUMBER_FLAG, (not word[0].isalnum()) * _SIGN_FLAG
    code = _word_cache[word] = crc32(word.encode("utf-8", "surrogatepass")) | number | sign
    return code


def _count_capitals(text: str) -> int:
    if text.isascii():
        return len(text) - len(text.encode().translate(None, _CAPITAL_LETTERS))
    return sum(map(str.isupper, text))


def _dense_features(text: str, word_count: int, numbers: int, signs: int) -> list[float]:
    """Return features that words do not capture, each about 0 to 1."""
    read = truncate(text)
    length = max(1, len(read))
    lines = read.count("\n")
    return [
        math.log1p(len(text)) / 10.0,
        math.log1p(word_count) / 6.0,
        math.log1p(lines) / 4.0,
        math.log1p(numbers) / 4.0,
        numbers / max(1, word_count),
        signs / max(1, word_count),
        _count_capitals(read) / length,
        0.0 if read.isascii() else sum(letter > "\x7f" for letter in read) / length,
        float(read.rstrip().endswith("?")),
        math.log1p(read.count("?")) / 3.0,
        float("```" in read or "def " in read),
        float(not word_count),
    ]
