"""Finalize a trained model: calibrate it, write it with its card, and evaluate it as served.

Used by all kinds of training. Requires the `train` extra.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import softmax

from predictor import artifact
from predictor.data import dataset
from predictor.data.licences import BOUND_NOTE, FREE, FREE_NOTE, LICENCES, UNSTATED
from predictor.evaluation import metrics
from predictor.onnx_forecaster import Features, OnnxForecaster
from predictor.training import calibrate, length_head, onnx_head

Progress = Callable[[str], None]
ALIASES = {"mico-demo": "SmolLM2-135M-Instruct_concise", "smollm2": "SmolLM2-135M-Instruct"}
"""Served names of models with other names in a corpus. The demo model learned SmolLM2's short answers."""
NOTES = (
    "Holds weights, no texts.",
    "Lengths are in the answering model's own tokens. The figures are this graph's, on held-out prompts.",
)
MIN_FIGURE_ROWS = 100
MAX_KIND_PROMPTS = 2_000
"""The maximum number of prompts per source for training the classifier of kinds."""
MIN_COVERAGE_PROMPTS = 100
FOLDS = 5
COVERAGE_KEY = "p90_coverage_by_source"
"""Cross-validated coverage on calibration and held-out prompts. The graph is fitted on all of them."""


@dataclass(frozen=True, slots=True)
class UncalibratedModel:
    """A trained graph before calibration, and the metadata for its card."""

    graph: bytes
    name: str
    kind: str
    models: tuple[str, ...]
    edges: tuple[int, ...]
    config: dict[str, Any]
    vocabulary: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    licences: tuple[tuple[str, str], ...] = ()


def finalize(
    trained: UncalibratedModel,
    data: Path,
    parts: dataset.Split,
    out: Path,
    progress: Progress = lambda _: None,
) -> artifact.Card:
    """Write the calibrated artifact to the folder `out`, with its held-out figures in the card."""
    progress("calibrating")
    graph = _with_sharpness(trained, parts.calibration[parts.calibration.model.isin(trained.models)])
    graph, coverage = _with_kinds(trained, graph, parts)
    vocabulary = trained.vocabulary
    sources = {source: LICENCES.get(source, UNSTATED) for source in sorted(parts.train.source.unique())}
    licences = {**sources, **dict(trained.licences)}
    is_free = FREE.issuperset(sources) and UNSTATED not in licences.values()
    card = artifact.Card(
        name=trained.name,
        kind=trained.kind,
        edges=trained.edges,
        models=trained.models,
        digest=artifact.digest_of(graph),
        vocabulary_digest=artifact.digest_of(artifact.encode_vocabulary(vocabulary)) if vocabulary else "",
        aliases={alias: model for alias, model in ALIASES.items() if model in trained.models},
        trained_on=describe_data(data, parts),
        licences=licences,
        notes=(*NOTES, FREE_NOTE if is_free else BOUND_NOTE, *trained.notes),
        config={**trained.config, COVERAGE_KEY: coverage},
    )
    artifact.write(out, graph, card, vocabulary)
    progress("measuring on held-out prompts")
    card = replace(card, figures=held_out_figures(OnnxForecaster(out), parts.held_out))
    artifact.write(out, graph, card, vocabulary)
    return card


def _with_sharpness(trained: UncalibratedModel, rows: pd.DataFrame) -> bytes:
    """Return the graph with the sharpness of each model, fitted on calibration rows."""
    prompts = rows.drop_duplicates("prompt_id")
    inputs = onnx_head.head_inputs(trained.graph, trained.vocabulary, list(prompts.prompt))
    head = onnx_head.read_head(trained.graph)
    model = index_in(trained.models, rows.model)
    logits = length_head.predict_logits(
        length_head.load_head(head), inputs, index_in(prompts.prompt_id, rows.prompt_id), model
    )
    sharpness = calibrate.fit_sharpness_by_model(
        logits.astype(np.float64),
        rows.response_tokens.to_numpy(dtype=np.int64),
        model,
        trained.edges,
        len(trained.models),
    )
    return onnx_head.with_head(trained.graph, head, sharpness)


def _with_kinds(
    trained: UncalibratedModel, graph: bytes, parts: dataset.Split
) -> tuple[bytes, dict[str, float]]:
    """Return the graph with fitted prompt kinds, and the cross-validated p90 coverage by source."""
    head = onnx_head.read_head(graph)
    kinds = _fit_kinds(trained, graph, parts.train)

    both = pd.concat([parts.calibration, parts.held_out], ignore_index=True)
    rows = both[both.model.isin(trained.models)].reset_index(drop=True)
    prompts = rows.drop_duplicates("prompt_id")
    owner, model = index_in(prompts.prompt_id, rows.prompt_id), index_in(trained.models, rows.model)
    inputs = onnx_head.head_inputs(graph, trained.vocabulary, list(prompts.prompt))
    logits = length_head.predict_logits(length_head.load_head(head), inputs, owner, model).astype(np.float64)
    probabilities = softmax(logits * onnx_head.read_sharpness(graph)[model][:, None], axis=1)
    standardised, source = onnx_head.standardise(head, inputs)[owner], rows.source.to_numpy(dtype=str)
    lengths = rows.response_tokens.to_numpy(dtype=np.int64)
    within = lengths <= metrics.quantile(probabilities, trained.edges, calibrate.P90)
    within_recalibrated = np.zeros(len(rows), dtype=bool)
    for fold in range(FOLDS):
        test = owner % FOLDS == fold
        fitted = calibrate.fit_p90_coverage(kinds, standardised[~test], within[~test], source[~test])
        moved = calibrate.recalibrate(probabilities[test], fitted.expected_coverage(standardised[test]))
        within_recalibrated[test] = lengths[test] <= metrics.quantile(moved, trained.edges, calibrate.P90)
    coverage = {
        str(each): round(float(within_recalibrated[source == each].mean()), 4)
        for each in np.unique(source)
        if len(set(owner[source == each])) >= MIN_COVERAGE_PROMPTS
    }
    fitted = calibrate.fit_p90_coverage(kinds, standardised, within, source)
    return onnx_head.with_kinds(graph, fitted), coverage


def _fit_kinds(trained: UncalibratedModel, graph: bytes, train: pd.DataFrame) -> calibrate.PromptKinds:
    by_source = train.drop_duplicates(["source", "prompt_id"]).groupby("source")
    prompts = by_source.head(MAX_KIND_PROMPTS).reset_index(drop=True)
    inputs = onnx_head.head_inputs(graph, trained.vocabulary, list(prompts.prompt))
    standardised = onnx_head.standardise(onnx_head.read_head(graph), inputs)
    return calibrate.fit_kinds(standardised, prompts.source.to_numpy(dtype=str))


def index_in(among: pd.Series[str] | tuple[str, ...], values: pd.Series[str]) -> NDArray[np.int64]:
    """Return the index of each value in `among`."""
    index = pd.Series(np.arange(len(among)), index=list(among))
    positions: NDArray[np.int64] = values.map(index).to_numpy(dtype=np.int64)
    return positions


def describe_data(data: Path, parts: dataset.Split) -> dict[str, Any]:
    """Return the card's description of the data: file, digest, sizes and split."""
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
    """Return the scores by source and model, for those with at least MIN_FIGURE_ROWS held-out rows."""
    return {
        f"{source}/{model}": _figures(forecaster, rows)
        for (source, model), rows in held_out.groupby(["source", "model"])
        if len(rows) >= MIN_FIGURE_ROWS
    }


def _figures(forecaster: OnnxForecaster, rows: pd.DataFrame) -> dict[str, Any]:
    queries = [Features(row.prompt, row.model, row.turn) for row in rows.itertuples()]
    probabilities = np.array([each.probabilities for each in forecaster.forecast(queries)])
    edges, lengths = forecaster.card.edges, rows.response_tokens.to_numpy(dtype=np.int64)
    mean, p50 = metrics.expected(probabilities, edges), metrics.quantile(probabilities, edges, 0.5)
    accuracies = (
        metrics.accuracy(lengths, metrics.likeliest_bucket(probabilities, edges, max_length), max_length)
        for max_length in (512, 1024)
    )
    figures = {
        "rows": len(rows),
        "spearman": metrics.rank(lengths, mean)["spearman"],
        "mae_of_mean": metrics.mean_absolute_error(lengths, mean),
        "mae_of_p50": metrics.mean_absolute_error(lengths, p50),
        "p90_coverage": metrics.coverage(lengths, metrics.quantile(probabilities, edges, 0.9)),
        **{key: value for each in accuracies for key, value in each.items()},
    }
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}
