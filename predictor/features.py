"""What a model sees of a query: the one definition, for training and for serving.

Hashed words and word pairs with TF weights, and a few counts. Any text gives features: no exception, in
bounded time. Does not know lengths, models or onnx.
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

READ_HEAD_CHARS = 3_000
READ_TAIL_CHARS = 1_000
"""Of a longer text only the beginning and the end are read, where instructions stand."""

WORD_SLOTS = 1 << 15
PAIR_SLOTS = 1 << 16
PADDING_SLOT = WORD_SLOTS + PAIR_SLOTS
SLOTS = PADDING_SLOT + 1
DENSE = 12

# Scripts written without spaces count by the character; of a number the first four digits count.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\u0e00-\u0e7f]|\d{1,4}|[^\W\d_]+|[^\w\s]|\n")
_PLAIN_WORD = re.compile(r"[a-z]+|[0-9]{1,4}|[^\w\s]|\n")  # the same of lower-case ASCII, sooner


KNOWN_WORDS = 50_000
FEW_WORDS = 48
"""So many are counted sooner one by one than by numpy, which is dear to begin with."""
_CAPITALS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"


_LEFT, _RIGHT = 0x9E3779B1, 0x85EBCA77
_RAW = (0.0, *(1.0 + np.log(np.arange(1, 2 * FEW_WORDS))).tolist())
"""The weight of a slot, before the norm, by how often it is met."""
_NUMBER, _SIGN = 1 << 32, 1 << 33
_known: dict[str, int] = {}
"""Of a word its hash, 32 bits, and above it whether it is a number or a sign."""


class Bag(NamedTuple):
    """A text as slots of the table, each with its weight, and its counts."""

    slots: NDArray[np.int64]
    weights: NDArray[np.float32]
    dense: NDArray[np.float32]


class Batch(NamedTuple):
    """Bags padded to one width: slots and weights `[queries, width]`, dense `[queries, DENSE]`."""

    slots: NDArray[np.int64]
    weights: NDArray[np.float32]
    dense: NDArray[np.float32]


def visible(text: str) -> str:
    """The part of a text that is read."""
    if len(text) <= READ_HEAD_CHARS + READ_TAIL_CHARS:
        return text
    return f"{text[:READ_HEAD_CHARS]}\n{text[-READ_TAIL_CHARS:]}"


def words(text: str) -> list[str]:
    """Lower-case words, numbers, signs and line ends, in order."""
    lowered = visible(text).lower()
    return (_PLAIN_WORD if lowered.isascii() else _WORD).findall(lowered)


def bag(text: str) -> Bag:
    """Features of one text."""
    return bags([text])[0]


def bags(texts: Sequence[str]) -> list[Bag]:
    """Features of some texts, together, which costs less than one after another."""
    found = [_told_of(words(text)) for text in texts]
    if len(found) == 1 and len(found[0]) <= FEW_WORDS:
        return [_short(texts[0], found[0])]
    told = np.array([word for each in found for word in each], dtype=np.uint64)
    owner = np.arange(len(texts)).repeat([len(each) for each in found])
    numbers, signs = (
        np.bincount(owner[(told & np.uint64(flag)) > 0], minlength=len(texts)) for flag in (_NUMBER, _SIGN)
    )
    counted = zip(texts, map(len, found), numbers.tolist(), signs.tolist(), strict=True)
    dense = np.array([_dense(*each) for each in counted], dtype=np.float32)
    whose, slots, counts = _counted(told & np.uint64(_NUMBER - 1), owner)
    raw = 1.0 + np.log(counts)
    norms = np.sqrt(np.bincount(whose, raw * raw, len(texts)))
    weights: NDArray[np.float32] = (raw / norms[whose]).astype(np.float32)
    ends = np.bincount(whose, minlength=len(texts)).cumsum().tolist()
    spans = zip([0, *ends], ends, dense, strict=False)
    return [Bag(slots[start:end], weights[start:end], own) for start, end, own in spans]


def _short(text: str, told: list[int]) -> Bag:
    """What `bags` finds of one short text, to the last bit."""
    hashes = [word & (_NUMBER - 1) for word in told]
    slots = [each % WORD_SLOTS for each in hashes]
    slots += [
        WORD_SLOTS + (left * _LEFT + right * _RIGHT >> 7) % PAIR_SLOTS for left, right in pairwise(hashes)
    ]
    counts: dict[int, int] = {}
    for slot in slots:
        counts[slot] = counts.get(slot, 0) + 1
    which = sorted(counts)
    raw = [_RAW[counts[slot]] for slot in which]
    squares = 0.0
    for each in raw:  # in order, and rounded each time: `sum` rounds less from Python 3.12 on
        squares += each * each
    norm = math.sqrt(squares)
    numbers, signs = sum([word & _NUMBER > 0 for word in told]), sum([word & _SIGN > 0 for word in told])
    return Bag(
        np.array(which, dtype=np.int64),
        np.array([each / norm for each in raw], dtype=np.float32),
        np.array(_dense(text, len(told), numbers, signs), dtype=np.float32),
    )


def _counted(
    hashes: NDArray[np.uint64], owner: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Of each text the slots of its words and pairs of neighbours, each once: whose, which, how often."""
    pairs = (hashes[:-1] * np.uint64(_LEFT) + hashes[1:] * np.uint64(_RIGHT)) >> np.uint64(7)
    within = owner[:-1] == owner[1:]
    of_words = hashes % np.uint64(WORD_SLOTS)
    of_pairs = (pairs % np.uint64(PAIR_SLOTS) + np.uint64(WORD_SLOTS))[within]
    slots = np.concatenate([of_words, of_pairs]).astype(np.int64)
    keys, counts = np.unique(np.concatenate([owner, owner[:-1][within]]) * SLOTS + slots, return_counts=True)
    whose, which = np.divmod(keys, SLOTS)
    return whose, which, counts


def batch(bags: Sequence[Bag]) -> Batch:
    """Several bags in one rectangle; empty places point at the padding slot with weight 0."""
    if len(bags) == 1 and len(bags[0].slots):
        (one,) = bags
        return Batch(one.slots[None], one.weights[None], one.dense[None])
    widths = np.array([len(each.slots) for each in bags])
    width = max(1, int(widths.max()))
    full = np.arange(width) < widths[:, None]
    slots = np.full((len(bags), width), PADDING_SLOT, dtype=np.int64)
    weights = np.zeros((len(bags), width), dtype=np.float32)
    slots[full] = np.concatenate([each.slots for each in bags])
    weights[full] = np.concatenate([each.weights for each in bags])
    return Batch(slots, weights, np.stack([each.dense for each in bags]))


def _told_of(found: list[str]) -> list[int]:
    """What is known of some words; when too many are known, all are forgotten."""
    told = list(map(_known.get, found))
    if None not in told:
        return cast(list[int], told)
    if len(_known) >= KNOWN_WORDS:
        _known.clear()
    return [_known.get(word) or _learned(word) for word in found]


def _learned(word: str) -> int:
    number, sign = word[0].isdigit() * _NUMBER, (not word[0].isalnum()) * _SIGN
    told = _known[word] = crc32(word.encode("utf-8", "surrogatepass")) | number | sign
    return told


def _capitals(text: str) -> int:
    if text.isascii():
        return len(text) - len(text.encode().translate(None, _CAPITALS))
    return sum(map(str.isupper, text))


def _dense(text: str, found: int, numbers: int, signs: int) -> list[float]:
    """Counts that words do not carry, each about 0 to 1; `found` words."""
    read = visible(text)
    length = max(1, len(read))
    lines = read.count("\n")
    return [
        math.log1p(len(text)) / 10.0,
        math.log1p(found) / 6.0,
        math.log1p(lines) / 4.0,
        math.log1p(numbers) / 4.0,
        numbers / max(1, found),
        signs / max(1, found),
        _capitals(read) / length,
        0.0 if read.isascii() else sum(letter > "\x7f" for letter in read) / length,
        float(read.rstrip().endswith("?")),
        math.log1p(read.count("?")) / 3.0,
        float("```" in read or "def " in read),
        float(not found),
    ]
