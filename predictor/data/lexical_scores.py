"""Fit lexical scores: for each view of the data, a ridge regression of log length on TF-IDF words and pairs.

A view is a (source, model) pair or a source with enough prompts, or all of the data. Training prompts are
scored by regressions fitted without their fold, so that the scores are distributed as in serving. Requires
scikit-learn. Used in training only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import sparse
from sklearn.linear_model import Ridge
from sklearn.model_selection import KFold

from predictor.features import PADDING_SLOT, SLOTS, Bag

Progress = Callable[[str], None]
MIN_PAIR_PROMPTS = 4_000
MIN_SOURCE_PROMPTS = 350
PENALTIES = (1.0, 5.0, 15.0)
FOLDS = 5


@dataclass(frozen=True, slots=True)
class LexicalScorer:
    """The coefficients of the regressions of all views."""

    names: tuple[str, ...]
    table: NDArray[np.float32]
    """Contribution of each slot to the score of each view `[SLOTS, views]`."""
    fold_tables: NDArray[np.float32]
    """The same, each fitted without one fold of the prompts `[FOLDS, SLOTS, views]`."""
    folds: NDArray[np.int64]
    """Fold of each training prompt, -1 for other prompts `[prompts]`."""

    def scores(self, bags: Sequence[Bag], folds: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return scores `[bags, views]`, from regressions fitted without the fold of the bag."""
        terms = tf_matrix(bags)
        scores: NDArray[np.float32] = (terms @ self.table).astype(np.float32)
        for fold in range(FOLDS):
            members = folds == fold
            scores[members] = terms[members] @ self.fold_tables[fold]
        return scores


def tf_matrix(bags: Sequence[Bag]) -> sparse.csr_matrix:
    """Return TF weights `[bags, SLOTS]`."""
    starts = np.concatenate([[0], np.cumsum([len(each.slots) for each in bags])])
    slots = np.concatenate([each.slots for each in bags])
    weights = np.concatenate([each.weights for each in bags])
    return sparse.csr_matrix((weights, slots, starts), shape=(len(bags), SLOTS))


def fit(
    frame: pd.DataFrame, prompt: NDArray[np.int64], bags: Sequence[Bag], seed: int, progress: Progress
) -> LexicalScorer:
    """Fit the regressions of every view of the training rows. `prompt` is the index of each row in `bags`."""
    terms = tf_matrix(bags)
    seen = np.unique(prompt)
    document_share = np.bincount(terms[seen].indices, minlength=SLOTS) / len(seen)
    terms = sparse.csr_matrix(terms @ sparse.diags(inverse := _inverse_frequency(document_share, len(seen))))
    views = list(_view_targets(frame, prompt, len(bags)))
    folds = np.full(len(bags), -1)
    for fold, (_, part) in enumerate(KFold(FOLDS, shuffle=True, random_state=seed).split(seen)):
        folds[seen[part]] = fold
    columns = [_fit_view(terms, target, folds, name, progress) for name, target in views]
    tables = (np.stack(columns, axis=2) * inverse[None, :, None]).astype(np.float32)
    tables[:, PADDING_SLOT] = 0.0
    return LexicalScorer(tuple(name for name, _ in views), tables[FOLDS], tables[:FOLDS], folds)


def _inverse_frequency(share: NDArray[np.float64], documents: int) -> NDArray[np.float64]:
    """Return the smoothed inverse document frequency, 0 for slots without a training prompt."""
    weights: NDArray[np.float64] = np.log((1 + documents) / (1 + share * documents)) + 1.0
    return np.where(share > 0, weights, 0.0)


def _view_targets(
    frame: pd.DataFrame, prompt: NDArray[np.int64], prompts: int
) -> list[tuple[str, NDArray[np.float64]]]:
    """Return the name of each view, and the mean log length of each prompt, NaN if unknown.

    Log lengths are centred by (source, model) pair, so that differences between models cancel.
    """
    rows = pd.DataFrame({"prompt": prompt, "source": frame.source, "model": frame.model})
    rows["log"] = np.log(frame.response_tokens)
    rows["log"] -= rows.groupby(["source", "model"]).log.transform("mean")
    parts = {"everything": rows}
    for source, part in rows.groupby("source"):
        if part.prompt.nunique() >= MIN_SOURCE_PROMPTS:
            parts[str(source)] = part
        for model, own in part.groupby("model"):
            if len(own) >= MIN_PAIR_PROMPTS and part.model.nunique() > 1:
                parts[f"{source}/{model}"] = own
    means = ((name, part.groupby("prompt").log.mean()) for name, part in parts.items())
    return [(name, mean.reindex(range(prompts)).to_numpy()) for name, mean in means]


def _fit_view(
    terms: sparse.csr_matrix,
    target: NDArray[np.float64],
    folds: NDArray[np.int64],
    name: str,
    progress: Progress,
) -> NDArray[np.float32]:
    """Return the coefficients fitted without each fold and, last, on all rows `[FOLDS + 1, SLOTS]`.

    Selects the penalty with the least out-of-fold error.
    """
    known = np.isfinite(target)
    best_penalty, best_error = PENALTIES[0], np.inf
    best: list[NDArray[np.float64]] = []
    for penalty in PENALTIES:
        fitted = [_fit_ridge(terms, target, known & (folds != fold), penalty) for fold in range(FOLDS)]
        squares = 0.0
        for fold, coefficients in enumerate(fitted):
            test = known & (folds == fold)
            squares += float(((terms[test] @ coefficients - target[test]) ** 2).sum())
        if squares < best_error:
            best_penalty, best_error, best = penalty, squares, fitted
    spread = float(known.sum() * np.var(target[known]))
    explained = 1.0 - best_error / spread if spread else 0.0
    progress(
        f"view {name}: {int(known.sum())} prompts, penalty {best_penalty}, R² {explained:.3f} out of fold"
    )
    return np.stack([*best, _fit_ridge(terms, target, known, best_penalty)]).astype(np.float32)


def _fit_ridge(
    terms: sparse.csr_matrix, target: NDArray[np.float64], rows: NDArray[np.bool_], penalty: float
) -> NDArray[np.float64]:
    model = Ridge(alpha=penalty, fit_intercept=False, solver="sparse_cg", tol=1e-3)
    coefficients: NDArray[np.float64] = model.fit(terms[rows], target[rows]).coef_
    return coefficients
