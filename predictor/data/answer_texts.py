"""How answers begin and what shape they have, where a corpus has their texts in its column `answer`.

Does not learn from them: `predictor/training/auxiliary_tasks.py` does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from predictor.wordpiece import Pieces

COLUMN = "answer"
FIRST_PIECES = 20
FIRST_CHARS = 200
OCTAVES = 6
"""A shape is how many times something doubled: 0 for none, then 1, 2–3, 4–7, 8–15, 16 and more."""
SHAPES = (
    re.compile(r"\n"),
    re.compile(r"^\s*(?:[-*•]|\d+[.)])\s", re.MULTILINE),
    re.compile(r"[.!?](?:\s|$)"),
    re.compile(r"```|^\s*def |^\s*SELECT ", re.MULTILINE),
)
"""Lines, items of lists, sentences, code."""


class Answers(NamedTuple):
    """Which answer each row has, -1 where its text is unknown, and of each answer its first pieces
    `[answers, FIRST_PIECES]` (zeros at the end), its shape `[answers, SHAPES]` and its text."""

    of_row: NDArray[np.int64]
    first: NDArray[np.int64]
    shape: NDArray[np.int64]
    texts: tuple[str, ...] = ()


def answers_of(texts: pd.Series[str], pieces: Pieces) -> Answers | None:
    """The answers among a column's values; None where it has no text at all."""
    known = (texts.notna() & (texts != "")).to_numpy()
    if not known.any():
        return None
    told = list(texts[known])
    of_row = np.where(known, np.cumsum(known) - 1, -1)
    return Answers(of_row, _first(told, pieces), _shapes(told), tuple(told))


def _first(texts: Sequence[str], pieces: Pieces) -> NDArray[np.int64]:
    found = np.zeros((len(texts), FIRST_PIECES), dtype=np.int64)
    for row, text in enumerate(texts):
        begun = pieces.encode(text.lstrip()[:FIRST_CHARS])[1:-1][:FIRST_PIECES]
        found[row, : len(begun)] = begun
    return found


def _shapes(texts: Sequence[str]) -> NDArray[np.int64]:
    counts = np.array([[len(sign.findall(text)) for sign in SHAPES] for text in texts])
    octaves: NDArray[np.int64] = np.minimum(np.ceil(np.log2(counts + 1)), OCTAVES - 1).astype(np.int64)
    return octaves
