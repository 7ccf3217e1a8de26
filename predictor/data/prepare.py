"""From a corpus to arrays: everything that learning needs, computed once.

Needs pandas and scikit-learn; training only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from predictor import features
from predictor.data import augment, dataset, lexical_scores
from predictor.data.answer_texts import COLUMN, Answers, answers_of
from predictor.data.augment import Asked
from predictor.wordpiece import LONGEST_PIECES, MARKS, Pieces

Progress = Callable[[str], None]
TRAIN, CALIBRATION, HELD_OUT, MADE = range(4)
UNKNOWN_NAME = "(unknown)"
SEEN_BY_NONE = -1
"""Fold of a prompt that no regression has seen."""


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

    def without(self, prompts: NDArray[np.bool_]) -> Prepared:
        """The same, where some training prompts are held out, too."""
        left_out = (self.part == TRAIN) & prompts[self.prompt]
        return replace(self, part=np.where(left_out, HELD_OUT, self.part))

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
    mixed: int,
    seed: int,
    asked: Sequence[Asked] = (),
    progress: Progress = lambda _: None,
) -> Prepared:
    """Arrays of a corpus, of prompts that were asked like it, and of `mixed` further ones."""
    parts = dataset.split(frame)
    prompts = frame.drop_duplicates("prompt_id")
    place = pd.Series(np.arange(len(prompts)), index=prompts.prompt_id)
    bags = [features.bag(text) for text in prompts.prompt]
    train_prompt = parts.train.prompt_id.map(place).to_numpy(dtype=np.int64)
    learned = lexical_scores.fit(parts.train, train_prompt, bags, seed, progress)

    texts = prompts.prompt.to_numpy()
    parents = np.unique(train_prompt)
    extra = [augment.Made(each.text, SEEN_BY_NONE, each.source) for each in asked]
    extra += augment.make(list(texts[parents]), list(learned.folds[parents]), mixed, seed)
    progress(f"{len(texts)} prompts, {len(asked)} asked like them, {mixed} made of them")
    extra_bags = [features.bag(each.text) for each in extra]
    folds = np.concatenate([learned.folds, np.array([each.fold for each in extra], dtype=np.int64)])
    bags = [*bags, *extra_bags]
    side = np.concatenate([learned.scores(bags, folds), np.stack([bag.dense for bag in bags])], axis=1)

    names = (UNKNOWN_NAME, *sorted(parts.train.model.unique()))
    rows = _rows(parts, place, names)
    rows = pd.concat([rows, _made_rows(rows, len(texts), [each.source for each in extra], seed)])
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
            "source": known.source,
            COLUMN: known.get(COLUMN, "") if part == TRAIN else "",
        }
        frames.append(pd.DataFrame(columns).assign(part=part))
    return pd.concat(frames)


def _made_rows(rows: pd.DataFrame, first: int, sources: Sequence[str], seed: int) -> pd.DataFrame:
    """Two rows for each made prompt: a model as often as it answered prompts, and any model.

    For one that was asked like a source's, the first is of that source's, and a third is the commonest there.
    """
    random = np.random.default_rng(seed)
    answered, like = rows[rows.part == TRAIN], np.array(sources, dtype=str)
    prompt, model = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for source in np.unique(like):
        own = np.flatnonzero(like == source)
        among = answered.model[answered.source == source] if source else answered.model
        drawn = [random.choice(among, len(own)), random.choice(answered.model.unique(), len(own))]
        if source:
            drawn.append(np.full(len(own), among.mode().iloc[0]))
        prompt += [own + first] * len(drawn)
        model += drawn
    columns = {"prompt": np.concatenate(prompt), "model": np.concatenate(model)}
    return pd.DataFrame(columns).assign(length=0, part=MADE, source="", **{COLUMN: ""})


def _needed(piece: str) -> bool:
    """Marks, and single characters, of which any known script can be put together."""
    return piece in MARKS or len(piece.removeprefix("##")) == 1


def _padded(pieces: Pieces, texts: Sequence[str]) -> NDArray[np.int64]:
    padded = np.zeros((len(texts), LONGEST_PIECES), dtype=np.int64)
    for row, text in enumerate(texts):
        found = pieces.encode(text)
        padded[row, : len(found)] = found
    return padded
