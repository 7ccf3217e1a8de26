"""Evaluate an artifact on a file of prompts and lengths, and compare it with baselines and a ceiling.

Requires pandas and scipy. Not imported in serving.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from predictor.artifact import LEXICAL_NAME, SHIPPED, resolve_folder
from predictor.data import dataset
from predictor.data.labels import range_index
from predictor.errors import DataError
from predictor.evaluation import baselines, metrics
from predictor.evaluation.report import require_matplotlib
from predictor.evaluation.report import write as write_report
from predictor.onnx_forecaster import Features, OnnxForecaster

Progress = Callable[[str], None]
MAX_LENGTHS = (512, 1024, 2048)
BATCH_QUERIES = 256


class Forecasts(NamedTuple):
    """Probabilities `[rows, ranges]`, the edges of the ranges, and the time per query in milliseconds."""

    probabilities: NDArray[np.float64]
    edges: tuple[int, ...]
    ms_per_query: float


def evaluate(
    data: Path,
    *,
    artifact: Path | None = None,
    out: Path | None = None,
    report: Path | None = None,
    held_out_only: bool = False,
    min_rows: int = 1,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Return a report: `groups`, with scores by source and model, and `ms_per_query`.

    `out` is a parquet file to write, with one row for each row of the data; unanswered rows are included but
    not scored. `report` is a folder to write a table and plots to. `held_out_only` restricts the data to
    prompts that `predictor.data.dataset.split` keeps out of training. Raises DataError, ArtifactError.
    """
    if report is not None:
        require_matplotlib()
    all_rows = dataset.read_all(data)
    if held_out_only:
        all_rows = dataset.split(all_rows).held_out
    answered = dataset.has_answer(all_rows)
    frame = all_rows[answered].reset_index(drop=True)
    if not len(frame):
        raise DataError(f"{data} has no rows to score")
    forecaster = OnnxForecaster(resolve_folder(artifact))
    everything = forecast_rows(forecaster, all_rows, progress)
    forecasts = everything._replace(probabilities=everything.probabilities[answered.to_numpy()])
    lexical, shipped = forecasts, OnnxForecaster(SHIPPED / LEXICAL_NAME)
    if forecaster.card != shipped.card:
        lexical = forecast_rows(shipped, frame, progress)
    if out is not None:
        forecast_table(all_rows, everything.probabilities, everything.edges).to_parquet(out, index=False)
    groups = [rows for _, rows in frame.groupby(["source", "model"], sort=True) if len(rows) >= min_rows]
    document = {
        "artifact": forecaster.name,
        "digest": forecaster.card.digest,
        "data": data.name,
        "rows": len(frame),
        "held_out_only": held_out_only,
        "ms_per_query": round(forecasts.ms_per_query, 4),
        "ms_per_query_lexical": round(lexical.ms_per_query, 4),
        "groups": [_score_group(frame, rows, forecaster, forecasts, lexical) for rows in groups],
    }
    if report is not None:
        lengths = frame.response_tokens.to_numpy(dtype=np.int64)
        positions = {", ".join(_source_and_model(rows)): rows.index.to_numpy() for rows in groups}
        write_report(report, document, lengths, forecasts.probabilities, forecasts.edges, positions)
    return document


def _source_and_model(rows: pd.DataFrame) -> tuple[str, str]:
    return str(rows.source.iloc[0]), str(rows.model.iloc[0])


def _score_group(
    frame: pd.DataFrame,
    rows: pd.DataFrame,
    forecaster: OnnxForecaster,
    forecasts: Forecasts,
    lexical: Forecasts,
) -> dict[str, Any]:
    index = rows.index.to_numpy(dtype=np.int64)
    source, model = _source_and_model(rows)
    return {
        "source": source,
        "model": model,
        "rows": len(rows),
        "known_model": forecaster.knows(model),
        **scores(rows, forecasts.probabilities[index], forecasts.edges),
        "lexical": summary_scores(rows, lexical.probabilities[index], lexical.edges),
        "peers": baselines.scores(rows),
        "ceiling": ceiling(frame, rows),
    }


def forecast_rows(forecaster: OnnxForecaster, frame: pd.DataFrame, progress: Progress) -> Forecasts:
    """Forecast every row in batches of BATCH_QUERIES, and measure the time per query."""
    columns = zip(frame.prompt, frame.model, frame.turn, strict=True)
    queries = [Features(prompt, model, int(turn)) for prompt, model, turn in columns]
    probabilities, took = [], 0.0
    for number, start in enumerate(range(0, len(queries), BATCH_QUERIES)):
        began = time.perf_counter()
        forecasts = forecaster.forecast(queries[start : start + BATCH_QUERIES])
        took += time.perf_counter() - began
        probabilities += [each.probabilities for each in forecasts]
        if number % 100 == 99:
            progress(f"{forecaster.name}: {(number + 1) * BATCH_QUERIES} of {len(frame)} rows")
    return Forecasts(np.array(probabilities), forecaster.card.edges, 1e3 * took / max(1, len(frame)))


def forecast_table(
    frame: pd.DataFrame, probabilities: NDArray[np.float64], edges: tuple[int, ...]
) -> pd.DataFrame:
    """Return the point forecasts of each input row: expected length, quantiles and most probable buckets."""
    columns = frame[["source", "prompt_id", "model", "turn"]].copy()
    columns["expected_tokens"] = metrics.expected(probabilities, edges)
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        columns[name] = metrics.quantile(probabilities, edges, share)
    for max_length in MAX_LENGTHS:
        columns[f"bucket_{max_length}"] = metrics.likeliest_bucket(probabilities, edges, max_length)
    return columns


def scores(rows: pd.DataFrame, probabilities: NDArray[np.float64], edges: tuple[int, ...]) -> dict[str, Any]:
    """Return all scores of one group."""
    lengths = rows.response_tokens.to_numpy(dtype=np.int64)
    label = range_index(lengths, edges)
    chosen = probabilities[np.arange(len(label)), label]
    bounds = {q: metrics.quantile(probabilities, edges, q) for q in (0.5, 0.9, 0.99)}
    buckets = (
        metrics.accuracy(lengths, metrics.likeliest_bucket(probabilities, edges, max_length), max_length)
        for max_length in MAX_LENGTHS
    )
    figures = {
        **summary_scores(rows, probabilities, edges),
        **{key: value for each in buckets for key, value in each.items()},
        **{f"p{q * 100:.0f}_coverage": metrics.coverage(lengths, bound) for q, bound in bounds.items()},
        "log_loss": float(-np.log(np.maximum(chosen, 1e-12)).mean()),
    }
    return _rounded(figures)


def summary_scores(
    rows: pd.DataFrame, probabilities: NDArray[np.float64], edges: tuple[int, ...]
) -> dict[str, Any]:
    """Return the rank correlations of the expected length, and the MAE of mean and median in tokens."""
    lengths = rows.response_tokens.to_numpy(dtype=np.int64)
    mean, median = metrics.expected(probabilities, edges), metrics.quantile(probabilities, edges, 0.5)
    return _rounded(
        {
            **metrics.rank(lengths, mean),
            "mae": metrics.mean_absolute_error(lengths, mean),
            "mae_p50": metrics.mean_absolute_error(lengths, median),
        }
    )


def ceiling(frame: pd.DataFrame, rows: pd.DataFrame) -> dict[str, Any] | None:
    """Score the median length of the same model's other samples of each prompt; None without other samples.

    The names of samples of one model are equal up to the `@`, as in `vicuna-7b@T0.5`.
    """
    model = str(rows.model.iloc[0])
    if "@" not in model:
        return None
    family = model.split("@", maxsplit=1)[0] + "@"
    family_rows = frame[(frame.source == rows.source.iloc[0]) & frame.model.str.startswith(family)]
    others = family_rows[family_rows.model != model].groupby("prompt_id").response_tokens.median()
    guess = rows.prompt_id.map(others)
    known = guess.notna()
    if not known.any():
        return None
    lengths = rows.response_tokens[known].to_numpy(dtype=np.int64)
    estimate = guess[known].to_numpy(dtype=np.float64)
    accuracies = {
        f"accuracy_{max_length}": float(
            (
                metrics.true_bucket(lengths, max_length)
                == metrics.true_bucket(estimate.astype(np.int64), max_length)
            ).mean()
        )
        for max_length in MAX_LENGTHS
    }
    errors = {"mae": metrics.mean_absolute_error(lengths, estimate)}
    return _rounded({"rows": int(known.sum()), **metrics.rank(lengths, estimate), **errors, **accuracies})


def _rounded(figures: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}
