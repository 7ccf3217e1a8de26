"""Estimate lengths with the heuristics of other schedulers, for comparison.

Each estimator is fitted on the answers that it is evaluated on, so its scores are optimistic.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from predictor.evaluation import metrics

Floats = NDArray[np.float64]
SHORT_PROMPT_TOKENS, LONG_PROMPT_TOKENS = 64, 512


def scores(rows: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Return the Spearman correlation and mean absolute error of each estimator for one source and model."""
    lengths = rows.response_tokens.to_numpy(dtype=np.int64)
    prompt = rows.prompt.str.len().to_numpy(dtype=np.float64) / 4.0
    if "prompt_tokens" in rows.columns:
        counted = rows.prompt_tokens.to_numpy(dtype=np.float64, na_value=np.nan)
        prompt = np.where(np.isfinite(counted), counted, prompt)
    estimates = {
        "constant": np.full(len(lengths), float(np.median(lengths))),
        "input_times_1.5": 1.5 * prompt,
        "histogram_by_log2_input": _group_mean(np.floor(np.log2(np.maximum(prompt, 1.0))), lengths),
        "three_bins_by_input": _group_mean(
            np.digitize(prompt, [SHORT_PROMPT_TOKENS, LONG_PROMPT_TOKENS]).astype(np.float64), lengths
        ),
    }
    figures: dict[str, dict[str, Any]] = {}
    for name, estimate in estimates.items():
        spearman = metrics.rank(lengths, estimate)["spearman"]
        figures[name] = {
            "spearman": None if spearman is None else round(spearman, 4),
            "mae": round(metrics.mean_absolute_error(lengths, estimate), 4),
        }
    return figures


def _group_mean(key: Floats, lengths: NDArray[np.int64]) -> Floats:
    """Return the mean length of the rows with the same key."""
    means: Floats = pd.Series(lengths).groupby(key).transform("mean").to_numpy(dtype=np.float64)
    return means
