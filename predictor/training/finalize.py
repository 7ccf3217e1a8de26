"""The last steps of every training: calibrate what serves, write it with its card, and measure it as served.

Needs the `train` extra.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import softmax

from predictor import artifact
from predictor.data import dataset
from predictor.data.licences import LICENCES, UNSTATED
from predictor.evaluation import metrics
from predictor.onnx_forecaster import Features, OnnxForecaster
from predictor.training import calibrate, length_head, onnx_head

Progress = Callable[[str], None]
ALIASES = {"mico-demo": "text-davinci-003"}
"""The demo model learned from Alpaca-like answers, so it is forecast as the model that wrote most of them."""
NOTES = (
    "Holds weights, no texts. Several sources allow research only, so check them before commercial use.",
    "Lengths are in the answering model's own tokens. The figures are this graph's, on held-out prompts.",
)
LEAST_FIGURE_ROWS = 100
KIND_PROMPTS = 2_000
"""At most so many prompts of a source teach what its kind looks like."""
LEAST_COVERAGE_PROMPTS = 100
FOLDS = 5
CROSSED = "p90_coverage_by_source"
"""On calibration and held-out prompts, each bent by what was fitted without its fold; all fit what serves."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A graph whose probabilities are not calibrated yet, and what its card is to say of it."""

    graph: bytes
    name: str
    kind: str
    models: tuple[str, ...]
    edges: tuple[int, ...]
    config: dict[str, Any]
    vocabulary: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    licences: tuple[tuple[str, str], ...] = ()


def finish(
    trained: Trained, data: Path, parts: dataset.Split, out: Path, progress: Progress = lambda _: None
) -> artifact.Card:
    """Writes the calibrated artifact into the folder `out`, with its held-out figures on the card."""
    progress("calibrating")
    graph = _calibrated(trained, parts.calibration[parts.calibration.model.isin(trained.models)])
    graph, crossed = _bent(trained, graph, parts)
    aliases = {alias: model for alias, model in ALIASES.items() if model in trained.models}
    sources = {source: LICENCES.get(source, UNSTATED) for source in sorted(parts.train.source.unique())}
    card = artifact.Card(
        name=trained.name,
        kind=trained.kind,
        edges=trained.edges,
        models=trained.models,
        digest=artifact.digest_of(graph),
        vocabulary_digest=artifact.digest_of(artifact.encode_vocabulary(trained.vocabulary))
        if trained.vocabulary
        else "",
        aliases=aliases,
        trained_on=describe(data, parts),
        licences={**sources, **dict(trained.licences)},
        notes=(*NOTES, *trained.notes),
        config={**trained.config, CROSSED: crossed},
    )
    artifact.write(out, graph, card, trained.vocabulary)
    progress("measuring on held-out prompts")
    card = artifact.with_figures(card, held_out_figures(OnnxForecaster(out), parts.held_out))
    artifact.write(out, graph, card, trained.vocabulary)
    return card


def _calibrated(trained: Trained, rows: pd.DataFrame) -> bytes:
    """The graph with a sharpness for each model, fitted on rows that nothing was trained on."""
    prompts = rows.drop_duplicates("prompt_id")
    inputs = onnx_head.inputs_of(trained.graph, trained.vocabulary, list(prompts.prompt))
    served = places(rows.model, trained.models)
    head = onnx_head.head_of(trained.graph)
    net = length_head.head_from(head)
    logits = length_head.logits_of(net, inputs, places(rows.prompt_id, prompts.prompt_id), served)
    factors = calibrate.sharpness_by_model(
        logits.astype(np.float64),
        rows.response_tokens.to_numpy(dtype=np.int64),
        served,
        trained.edges,
        len(trained.models),
    )
    return onnx_head.with_head(trained.graph, head, factors)


def _bent(trained: Trained, graph: bytes, parts: dataset.Split) -> tuple[bytes, dict[str, float]]:
    """The graph bent for the kinds of prompts that it tells apart, and the p90's coverage by source."""
    head = onnx_head.head_of(graph)
    by_source = parts.train.drop_duplicates(["source", "prompt_id"]).groupby("source")
    shown = by_source.head(KIND_PROMPTS).reset_index(drop=True)
    seen = onnx_head.standardised(head, onnx_head.inputs_of(graph, trained.vocabulary, list(shown.prompt)))
    kinds = calibrate.kinds_of(seen, shown.source.to_numpy(dtype=str))

    both = pd.concat([parts.calibration, parts.held_out], ignore_index=True)
    rows = both[both.model.isin(trained.models)].reset_index(drop=True)
    prompts = rows.drop_duplicates("prompt_id")
    owner, served = places(rows.prompt_id, prompts.prompt_id), places(rows.model, trained.models)
    inputs = onnx_head.inputs_of(graph, trained.vocabulary, list(prompts.prompt))
    logits = length_head.logits_of(length_head.head_from(head), inputs, owner, served).astype(np.float64)
    probabilities = softmax(logits * onnx_head.sharpness_of(graph)[served][:, None], axis=1)
    known, source = onnx_head.standardised(head, inputs)[owner], rows.source.to_numpy(dtype=str)
    lengths = rows.response_tokens.to_numpy(dtype=np.int64)
    within = lengths <= metrics.quantile(probabilities, trained.edges, calibrate.STATED)
    crossed = np.zeros(len(rows), dtype=bool)
    for fold in range(FOLDS):
        own = owner % FOLDS == fold
        fitted = calibrate.fit_reached(kinds, known[~own], within[~own], source[~own])
        moved = calibrate.bent(probabilities[own], fitted.reached_by(known[own]))
        crossed[own] = lengths[own] <= metrics.quantile(moved, trained.edges, calibrate.STATED)
    many = (each for each in np.unique(source) if len(set(owner[source == each])) >= LEAST_COVERAGE_PROMPTS)
    told = {str(each): round(float(crossed[source == each].mean()), 4) for each in many}
    return onnx_head.with_kinds(graph, calibrate.fit_reached(kinds, known, within, source)), told


def places(values: pd.Series[str], among: pd.Series[str] | tuple[str, ...]) -> NDArray[np.int64]:
    """Where each value stands among some others."""
    index = pd.Series(np.arange(len(among)), index=list(among))
    found: NDArray[np.int64] = values.map(index).to_numpy(dtype=np.int64)
    return found


def describe(data: Path, parts: dataset.Split) -> dict[str, Any]:
    """What a card says of the data: which, how much, and how it was split."""
    return {
        "file": data.name,
        "sha256": dataset.file_digest(data),
        "sources": {str(source): int(count) for source, count in parts.train.source.value_counts().items()},
        "prompts": {
            "train": int(parts.train.prompt_id.nunique()),
            "calibration": int(parts.calibration.prompt_id.nunique()),
            "held_out": int(parts.held_out.prompt_id.nunique()),
        },
        "split": "SHA-256 of the prompt id; a prompt is in one part with all its rows",
    }


def held_out_figures(forecaster: OnnxForecaster, held_out: pd.DataFrame) -> dict[str, Any]:
    """By source and model with enough held-out rows: what the served artifact scores there."""
    return {
        f"{source}/{model}": _figures(forecaster, rows)
        for (source, model), rows in held_out.groupby(["source", "model"])
        if len(rows) >= LEAST_FIGURE_ROWS
    }


def _figures(forecaster: OnnxForecaster, rows: pd.DataFrame) -> dict[str, Any]:
    queries = [Features(row.prompt, row.model, row.turn) for row in rows.itertuples()]
    found = np.array([each.probabilities for each in forecaster.forecast(queries)])
    edges, lengths = forecaster.card.edges, rows.response_tokens.to_numpy(dtype=np.int64)
    mean, p50 = metrics.expected(found, edges), metrics.quantile(found, edges, 0.5)
    buckets = (
        metrics.accuracy(lengths, metrics.likeliest_bucket(found, edges, longest), longest)
        for longest in (512, 1024)
    )
    figures = {
        "rows": len(rows),
        "spearman": metrics.rank(lengths, mean)["spearman"],
        "mae_of_mean": metrics.mean_absolute_error(lengths, mean),
        "mae_of_p50": metrics.mean_absolute_error(lengths, p50),
        "p90_coverage": metrics.coverage(lengths, metrics.quantile(found, edges, 0.9)),
        **{key: value for each in buckets for key, value in each.items()},
    }
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}
