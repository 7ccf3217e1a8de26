"""From a corpus to arrays: everything that learning needs, computed once.

Needs pandas and scikit-learn; training only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from predictor import augment, dataset, features, views
from predictor.answers import COLUMN, Answers, answers_of
from predictor.pieces import LONGEST_PIECES, MARKS, Pieces

Progress = Callable[[str], None]
TRAIN, CALIBRATION, HELD_OUT, MADE = range(4)
UNKNOWN_NAME = "(unknown)"


@dataclass(frozen=True, slots=True)
class Prepared:
    """Prompts (`pieces` ends with zeros; `side` is lexical scores and counts) and rows of (prompt, model)."""

    pieces: NDArray[np.int64]
    side: NDArray[np.float32]
    table: NDArray[np.float32]
    prompt: NDArray[np.int64]
    model: NDArray[np.int64]
    length: NDArray[np.int64]
    """Tokens of the answer; 0 where nobody answered, which only a teacher can label."""
    part: NDArray[np.int64]
    """TRAIN, CALIBRATION, HELD_OUT or MADE."""
    models: tuple[str, ...]
    views: tuple[str, ...]
    vocabulary: tuple[str, ...]
    texts: tuple[str, ...]
    answers: Answers | None = None
    """Where the corpus has answers' texts."""

    def rows(self, *parts: int) -> NDArray[np.int64]:
        """Places of the rows of some parts."""
        return np.flatnonzero(np.isin(self.part, parts))

    def commonest_pieces(self, most: int) -> NDArray[np.int64]:
        """Ids of the `most` pieces that training prompts have most of, and of what every text needs."""
        seen = np.unique(self.prompt[self.rows(TRAIN)])
        counts = np.bincount(self.pieces[seen].ravel(), minlength=len(self.vocabulary))
        needed = np.array([_needed(piece) for piece in self.vocabulary])
        common = np.zeros(len(counts), dtype=bool)
        common[np.argsort(-counts, kind="stable")[:most]] = True
        return np.flatnonzero(needed | common)

    def with_pieces(self, kept: NDArray[np.int64]) -> Prepared:
        """The same, read with a part of the vocabulary: words that are not in it fall into smaller pieces."""
        vocabulary = tuple(self.vocabulary[piece] for piece in kept)
        return replace(self, pieces=_padded(Pieces(vocabulary), self.texts), vocabulary=vocabulary)


def prepare(
    frame: pd.DataFrame,
    vocabulary: Sequence[str],
    *,
    made: int,
    seed: int,
    progress: Progress = lambda _: None,
) -> Prepared:
    """Arrays of a corpus and of `made` further prompts."""
    parts = dataset.split(frame)
    prompts = frame.drop_duplicates("prompt_id")
    place = pd.Series(np.arange(len(prompts)), index=prompts.prompt_id)
    bags = [features.bag(text) for text in prompts.prompt]
    train_prompt = parts.train.prompt_id.map(place).to_numpy(dtype=np.int64)
    learned = views.fit(parts.train, train_prompt, bags, seed, progress)

    texts = prompts.prompt.to_numpy()
    parents = np.unique(train_prompt)
    extra = augment.make(list(texts[parents]), list(learned.folds[parents]), made, seed)
    progress(f"{len(texts)} prompts, {len(extra)} made of them")
    extra_bags = [features.bag(each.text) for each in extra]
    folds = np.concatenate([learned.folds, np.array([each.fold for each in extra], dtype=np.int64)])
    bags = [*bags, *extra_bags]
    side = np.concatenate([learned.scores(bags, folds), np.stack([bag.dense for bag in bags])], axis=1)

    names = (UNKNOWN_NAME, *sorted(parts.train.model.unique()))
    rows = _rows(parts, place, names)
    rows = pd.concat([rows, _made_rows(rows, len(texts), len(extra), seed)])
    every = (*texts, *(each.text for each in extra))
    reader = Pieces(vocabulary)
    return Prepared(
        pieces=_padded(reader, every),
        side=side.astype(np.float32),
        table=learned.table,
        **{column: rows[column].to_numpy(dtype=np.int64) for column in ("prompt", "model", "length", "part")},
        models=names,
        views=learned.names,
        vocabulary=tuple(vocabulary),
        texts=every,
        answers=answers_of(rows[COLUMN], reader),
    )


def _rows(parts: dataset.Split, place: pd.Series[int], names: tuple[str, ...]) -> pd.DataFrame:
    """Real rows of models that were trained on."""
    model = pd.Series(np.arange(len(names)), index=names)
    frames = []
    for part, frame in enumerate((parts.train, parts.calibration, parts.held_out)):
        known = frame[frame.model.isin(names)]
        columns = {
            "prompt": known.prompt_id.map(place),
            "model": known.model.map(model),
            "length": known.response_tokens,
            COLUMN: known.get(COLUMN, "") if part == TRAIN else "",
        }
        frames.append(pd.DataFrame(columns).assign(part=part))
    return pd.concat(frames)


def _made_rows(rows: pd.DataFrame, first: int, count: int, seed: int) -> pd.DataFrame:
    """Two rows for each made prompt: a model as often as it answered prompts, and any model."""
    random = np.random.default_rng(seed)
    answered = rows.model[rows.part == TRAIN].to_numpy()
    model = np.concatenate([random.choice(answered, count), random.choice(np.unique(answered), count)])
    prompt = np.tile(np.arange(first, first + count), 2)
    return pd.DataFrame({"prompt": prompt, "model": model, "length": 0, "part": MADE, COLUMN: ""})


def _needed(piece: str) -> bool:
    """Marks, and single characters, of which any known script can be put together."""
    return piece in MARKS or len(piece.removeprefix("##")) == 1


def _padded(pieces: Pieces, texts: Sequence[str]) -> NDArray[np.int64]:
    padded = np.zeros((len(texts), LONGEST_PIECES), dtype=np.int64)
    for row, text in enumerate(texts):
        found = pieces.encode(text)
        padded[row, : len(found)] = found
    return padded
