"""Prepare a corpus for training: compute the arrays that training uses.

Requires pandas and scikit-learn. Used in training only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from predictor import features
from predictor.data import augment, dataset, lexical_scores
from predictor.data.answer_texts import ANSWER_COLUMN, Answers, extract_answers
from predictor.data.augment import GeneratedPrompt
from predictor.wordpiece import MAX_PIECES, SPECIAL_PIECES, WordPieceTokenizer

Progress = Callable[[str], None]
TRAIN, CALIBRATION, HELD_OUT, SYNTHETIC = range(4)
UNKNOWN_MODEL_NAME = "(unknown)"
NO_FOLD = -1
"""Fold of a prompt that no regression was fitted on."""


@dataclass(frozen=True, slots=True)
class TrainingArrays:
    """The arrays of prompts, and of rows of (prompt, model)."""

    pieces: NDArray[np.int64]
    """Word pieces of each prompt, padded with zeros `[prompts, width]`."""
    side: NDArray[np.float32]
    """Lexical scores and dense features of each prompt `[prompts, features]`."""
    table: NDArray[np.float32]
    """Coefficients of the lexical scores `[SLOTS, views]`."""
    prompt: NDArray[np.int64]
    model: NDArray[np.int64]
    length: NDArray[np.int64]
    """Tokens of the answer, 0 for rows without an answer, which only teachers label `[rows]`."""
    part: NDArray[np.int64]
    """TRAIN, CALIBRATION, HELD_OUT or SYNTHETIC `[rows]`."""
    models: tuple[str, ...]
    views: tuple[str, ...]
    vocabulary: tuple[str, ...]
    texts: tuple[str, ...]
    answers: Answers | None = None
    """None if the corpus has no texts of answers."""

    def rows(self, *parts: int) -> NDArray[np.int64]:
        """Return the indices of the rows in the given parts."""
        return np.flatnonzero(np.isin(self.part, parts))

    def hold_out(self, prompts: NDArray[np.bool_]) -> TrainingArrays:
        """Return the data with the given training prompts held out as well."""
        left_out = (self.part == TRAIN) & prompts[self.prompt]
        return replace(self, part=np.where(left_out, HELD_OUT, self.part))

    def most_common_pieces(self, count: int) -> NDArray[np.int64]:
        """Return the ids of the `count` most frequent pieces of training prompts, and of essential pieces."""
        seen = np.unique(self.prompt[self.rows(TRAIN)])
        counts = np.bincount(self.pieces[seen].ravel(), minlength=len(self.vocabulary))
        essential = np.array([_is_essential(piece) for piece in self.vocabulary])
        common = np.zeros(len(counts), dtype=bool)
        common[np.argsort(-counts, kind="stable")[:count]] = True
        return np.flatnonzero(essential | common)

    def with_vocabulary(self, kept: NDArray[np.int64]) -> TrainingArrays:
        """Return the data encoded with the `kept` pieces. Other words are split into smaller pieces."""
        vocabulary = tuple(self.vocabulary[piece] for piece in kept)
        return replace(
            self, pieces=_encode_all(WordPieceTokenizer(vocabulary), self.texts), vocabulary=vocabulary
        )


def prepare(
    frame: pd.DataFrame,
    vocabulary: Sequence[str],
    *,
    mixed: int,
    seed: int,
    generated: Sequence[GeneratedPrompt] = (),
    progress: Progress = lambda _: None,
) -> TrainingArrays:
    """Return the arrays of a corpus, of generated prompts, and of `mixed` prompts mixed from the corpus."""
    parts = dataset.split(frame)
    prompts = frame.drop_duplicates("prompt_id")
    prompt_index = pd.Series(np.arange(len(prompts)), index=prompts.prompt_id)
    bags = [features.bag(text) for text in prompts.prompt]
    train_prompt = parts.train.prompt_id.map(prompt_index).to_numpy(dtype=np.int64)
    scorer = lexical_scores.fit(parts.train, train_prompt, bags, seed, progress)

    texts = prompts.prompt.to_numpy()
    parents = np.unique(train_prompt)
    extra = [augment.SyntheticPrompt(each.text, NO_FOLD, each.source) for each in generated]
    extra += augment.mix_prompts(list(texts[parents]), list(scorer.folds[parents]), mixed, seed)
    progress(f"{len(texts)} prompts, {len(generated)} asked like them, {mixed} made of them")
    extra_bags = [features.bag(each.text) for each in extra]
    folds = np.concatenate([scorer.folds, np.array([each.fold for each in extra], dtype=np.int64)])
    bags = [*bags, *extra_bags]
    side = np.concatenate([scorer.scores(bags, folds), np.stack([bag.dense for bag in bags])], axis=1)

    names = (UNKNOWN_MODEL_NAME, *sorted(parts.train.model.unique()))
    rows = _answered_rows(parts, prompt_index, names)
    rows = pd.concat([rows, _synthetic_rows(rows, len(texts), [each.source for each in extra], seed)])
    all_texts = (*texts, *(each.text for each in extra))
    tokenizer = WordPieceTokenizer(vocabulary)
    return TrainingArrays(
        pieces=_encode_all(tokenizer, all_texts),
        side=side.astype(np.float32),
        table=scorer.table,
        **{column: rows[column].to_numpy(dtype=np.int64) for column in ("prompt", "model", "length", "part")},
        models=names,
        views=scorer.names,
        vocabulary=tuple(vocabulary),
        texts=all_texts,
        answers=extract_answers(rows[ANSWER_COLUMN], tokenizer),
    )


def _answered_rows(
    parts: dataset.Split, prompt_index: pd.Series[int], names: tuple[str, ...]
) -> pd.DataFrame:
    """Return the rows of the corpus whose models were trained on."""
    model = pd.Series(np.arange(len(names)), index=names)
    frames = []
    for part, frame in enumerate((parts.train, parts.calibration, parts.held_out)):
        known = frame[frame.model.isin(names)]
        columns = {
            "prompt": known.prompt_id.map(prompt_index),
            "model": known.model.map(model),
            "length": known.response_tokens,
            "source": known.source,
            ANSWER_COLUMN: known.get(ANSWER_COLUMN, "") if part == TRAIN else "",
        }
        frames.append(pd.DataFrame(columns).assign(part=part))
    return pd.concat(frames)


def _synthetic_rows(rows: pd.DataFrame, first_prompt: int, sources: Sequence[str], seed: int) -> pd.DataFrame:
    """Return two rows per synthetic prompt: a model drawn by its share of answers, and one drawn uniformly.

    If the prompt imitates a source, the first is of that source, and a third has its most common model.
    """
    random = np.random.default_rng(seed)
    answered, source_of_prompt = rows[rows.part == TRAIN], np.array(sources, dtype=str)
    prompt, model = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for source in np.unique(source_of_prompt):
        members = np.flatnonzero(source_of_prompt == source)
        candidates = answered.model[answered.source == source] if source else answered.model
        chosen = [
            random.choice(candidates, len(members)),
            random.choice(answered.model.unique(), len(members)),
        ]
        if source:
            chosen.append(np.full(len(members), candidates.mode().iloc[0]))
        prompt += [members + first_prompt] * len(chosen)
        model += chosen
    columns = {"prompt": np.concatenate(prompt), "model": np.concatenate(model)}
    return pd.DataFrame(columns).assign(length=0, part=SYNTHETIC, source="", **{ANSWER_COLUMN: ""})


def _is_essential(piece: str) -> bool:
    """Return whether a piece is special or a single character, of which all words can be composed."""
    return piece in SPECIAL_PIECES or len(piece.removeprefix("##")) == 1


def _encode_all(tokenizer: WordPieceTokenizer, texts: Sequence[str]) -> NDArray[np.int64]:
    padded = np.zeros((len(texts), MAX_PIECES), dtype=np.int64)
    for row, text in enumerate(texts):
        ids = tokenizer.encode(text)
        padded[row, : len(ids)] = ids
    return padded
