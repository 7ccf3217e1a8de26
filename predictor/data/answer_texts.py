"""Encode the beginnings and the shapes of answers, for a corpus with a column `answer`.

The auxiliary tasks in `predictor/training/auxiliary_tasks.py` learn from them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from predictor.wordpiece import WordPieceTokenizer

ANSWER_COLUMN = "answer"
PREFIX_PIECES = 20
PREFIX_CHARS = 200
OCTAVES = 6
"""The number of classes of a count, in powers of two: 0, 1, 2–3, 4–7, 8–15, 16 and more."""
SHAPES = (
    re.compile(r"\n"),
    re.compile(r"^\s*(?:[-*•]|\d+[.)])\s", re.MULTILINE),
    re.compile(r"[.!?](?:\s|$)"),
    re.compile(r"```|^\s*def |^\s*SELECT ", re.MULTILINE),
)
"""Patterns whose match counts form a shape: lines, list items, sentences, code."""


class Answers(NamedTuple):
    """The known answers of a corpus."""

    of_row: NDArray[np.int64]
    """Index of each row's answer, -1 if its text is unknown `[rows]`."""
    prefix: NDArray[np.int64]
    """First pieces of each answer, padded with zeros `[answers, PREFIX_PIECES]`."""
    shape: NDArray[np.int64]
    """Class of the match count of each pattern `[answers, SHAPES]`."""
    texts: tuple[str, ...] = ()


def extract_answers(texts: pd.Series[str], pieces: WordPieceTokenizer) -> Answers | None:
    """Return the answers in a column, or None if the column has no texts."""
    known = (texts.notna() & (texts != "")).to_numpy()
    if not known.any():
        return None
    answers = list(texts[known])
    of_row = np.where(known, np.cumsum(known) - 1, -1)
    return Answers(of_row, _prefixes(answers, pieces), _shapes(answers), tuple(answers))


def _prefixes(texts: Sequence[str], pieces: WordPieceTokenizer) -> NDArray[np.int64]:
    prefixes = np.zeros((len(texts), PREFIX_PIECES), dtype=np.int64)
    for row, text in enumerate(texts):
        prefix = pieces.encode(text.lstrip()[:PREFIX_CHARS])[1:-1][:PREFIX_PIECES]
        prefixes[row, : len(prefix)] = prefix
    return prefixes


def _shapes(texts: Sequence[str]) -> NDArray[np.int64]:
    counts = np.array([[len(sign.findall(text)) for sign in SHAPES] for text in texts])
    octaves: NDArray[np.int64] = np.minimum(np.ceil(np.log2(counts + 1)), OCTAVES - 1).astype(np.int64)
    return octaves
