"""Read, clean and split prompts with the lengths of their answers.

The columns are those of `length_corpus.parquet`. Requires pandas. Not imported in serving.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from predictor.errors import DataError
from predictor.outcome_log import LEAST, LENGTH, parse_rows, read_files

REQUIRED_COLUMNS = ("source", "prompt_id", "prompt", "model", "response_tokens")
TEXT_COLUMNS = ("source", "prompt", "model")
MAX_INTEGER = 2**31 - 1
HELD_OUT_PERCENT = 10
CALIBRATION_PERCENT = 6


@dataclass(frozen=True, slots=True)
class Split:
    """Three parts of a data set without common prompts."""

    train: pd.DataFrame
    calibration: pd.DataFrame
    held_out: pd.DataFrame


def read(path: Path, *, with_cut: bool = False) -> pd.DataFrame:
    """Read the rows with an answer and, if `with_cut`, the rows whose answer was cut short by a limit. For
    these, the column `cut` is true and `response_tokens` is the length at the cut.

    `path` is a parquet file, or the folder in which a gateway logs recent outcomes. Raises DataError.
    """
    frame = read_all(path)
    if frame.prompt_id.isna().any():
        raise DataError(f"{path} has rows without a prompt_id: {int(frame.prompt_id.isna().sum())}")
    frame["cut"] = with_cut & ~has_answer(frame) & (frame[LEAST] > 0)
    frame[LENGTH] = frame[LENGTH].where(~frame.cut, frame[LEAST])
    return frame[has_answer(frame)].reset_index(drop=True)


def read_all(path: Path) -> pd.DataFrame:
    """Read all rows in order, with and without an answer.

    A missing source, model or prompt becomes an empty string, a missing turn 1. Raises DataError.
    """
    try:
        frame = _read_outcomes(path) if path.is_dir() else pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    missing = [column for column in REQUIRED_COLUMNS if column not in frame.columns]
    if missing:
        raise DataError(f"{path} lacks the columns {', '.join(missing)}")
    if "turn" not in frame.columns:
        frame["turn"] = 1
    frame = frame.reset_index(drop=True)
    for column in TEXT_COLUMNS:
        frame[column] = _text_column(frame[column], path)
    frame["turn"] = _number_column(frame.turn, path).fillna(1)
    for column in (LENGTH, LEAST):
        values = frame[column] if column in frame.columns else pd.Series(np.nan, index=frame.index)
        frame[column] = _number_column(values, path).fillna(0)
    return frame


def has_answer(frame: pd.DataFrame) -> pd.Series[bool]:
    """Return the mask of rows with an answer."""
    return frame.response_tokens > 0


def _text_column(values: pd.Series[Any], path: Path) -> pd.Series[Any]:
    texts: pd.Series[Any] = values.astype(object).where(values.notna(), "")
    unexpected = {type(each).__name__ for each in texts if not isinstance(each, str | int | float)}
    if unexpected:
        raise DataError(
            f"{path} has no texts in its column {values.name}, but {', '.join(sorted(unexpected))}"
        )
    return texts.map(str)


def _number_column(values: pd.Series[Any], path: Path) -> pd.Series[Any]:
    """Return a numeric column; NaN everywhere if all its values are missing. Raises DataError."""
    if values.isna().all():
        return pd.Series(np.nan, index=values.index)
    if not pd.api.types.is_numeric_dtype(values):
        raise DataError(f"{path} has no numbers in its column {values.name}, but {values.dtype}")
    if values.max() > MAX_INTEGER:
        raise DataError(f"{path} has a {values.name} of {values.max()}; at most {MAX_INTEGER} can be")
    return values


def _read_outcomes(folder: Path) -> pd.DataFrame:
    rows = [row for content in read_files(folder) for row in parse_rows(content)]
    if not rows:
        raise DataError(f"{folder} holds no outcomes: start the gateway with `outcomes = {folder}`")
    return pd.DataFrame(
        rows, columns=list({LENGTH: None} | dict.fromkeys(name for row in rows for name in row))
    )


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file or of the outcomes in a folder, which identifies the training data."""
    digest = sha256()
    if path.is_dir():
        for content in read_files(path):
            digest.update(content)
        return digest.hexdigest()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def prompt_percent(prompt_id: str) -> int:
    """Return 0–99 derived from the id only, so that a prompt is in the same part in every data set."""
    return int.from_bytes(sha256(f"mico-split:{prompt_id}".encode()).digest()[:8]) % 100


def split(frame: pd.DataFrame) -> Split:
    """Split rows into training, calibration and held-out parts. All rows of a prompt are in one part."""
    ids = frame.prompt_id.unique()
    percent = frame.prompt_id.map({each: prompt_percent(each) for each in ids})
    held_out = percent < HELD_OUT_PERCENT
    calibration = ~held_out & (percent < HELD_OUT_PERCENT + CALIBRATION_PERCENT)
    parts = (frame[part].reset_index(drop=True) for part in (~held_out & ~calibration, calibration, held_out))
    return Split(*parts)


def row_weights(frame: pd.DataFrame) -> NDArray[np.float32]:
    """Return 1/sqrt(rows of the prompt): a prompt with 225 models weighs 15 times one with a single model."""
    counts = frame.prompt_id.map(frame.prompt_id.value_counts())
    weights: NDArray[np.float32] = (1.0 / np.sqrt(counts.to_numpy(dtype=np.float64))).astype(np.float32)
    return weights
