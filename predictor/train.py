"""Training a model from a corpus of prompts and lengths, and writing it as an artifact that serving can load.

Needs the `train` and `engine` extras.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from predictor import artifact, calibrate, dataset, export, features, labels, lexical, metrics, views
from predictor.runtime import Features, OnnxForecaster
from predictor.sources import LICENCES, UNSTATED

Progress = Callable[[str], None]
ALIASES = {"mico-demo": "text-davinci-003"}
"""The demo model learned from Alpaca-like answers, so it is forecast as the model that wrote most of them."""
NOTES = (
    "Holds weights, no texts. Several sources allow research only, so check them before commercial use.",
    "Lengths are in the answering model's own tokens. The figures are this graph's, on held-out prompts.",
)


def train_lexical(
    data: Path,
    out: Path,
    *,
    name: str = artifact.DEFAULT_NAME,
    seed: int = 7,
    progress: Progress = lambda _: None,
) -> artifact.Card:
    """Trains the lexical model on a corpus and writes the artifact into the folder `out`."""
    torch.set_num_threads(1)
    frame = dataset.read(data)
    parts = dataset.split(frame)
    prompts = frame.drop_duplicates("prompt_id")
    place = pd.Series(np.arange(len(prompts)), index=prompts.prompt_id)
    names = ("(unknown)", *sorted(parts.train.model.unique()))
    model_row = pd.Series(np.arange(len(names)), index=names)
    edges = labels.log_spaced_edges()
    config = lexical.HeadConfig(seed=seed)

    progress(f"reading {len(prompts)} prompts")
    bags = [features.bag(text) for text in prompts.prompt]
    learned = views.fit(parts.train, _places(parts.train, place), bags, seed, progress)
    scores = learned.scores(bags, learned.folds)
    inputs = np.concatenate([scores, np.stack([bag.dense for bag in bags])], axis=1).astype(np.float32)
    rows = lexical.Rows(
        _places(parts.train, place),
        _places(parts.train, model_row, "model"),
        labels.soft_targets(parts.train.response_tokens.to_numpy(), edges, config.spread_octaves),
        dataset.row_weights(parts.train),
    )
    head = lexical.fit(inputs, rows, len(names), config, progress)

    known = parts.calibration[parts.calibration.model.isin(model_row.index)]
    served = _places(known, model_row, "model")
    logits = lexical.logits_of(head, inputs, _places(known, place), served).astype(np.float64)
    label = labels.range_of(known.response_tokens.to_numpy(), edges)
    sharpness = calibrate.sharpness_by_model(logits, label, served, len(names))

    weights = {key: value.numpy() for key, value in head.state_dict().items()}
    graph = export.lexical_graph(learned.table, weights, sharpness)
    card = artifact.Card(
        name=name,
        kind="lexical",
        edges=edges,
        models=names,
        digest=artifact.digest_of(graph),
        aliases={alias: model for alias, model in ALIASES.items() if model in names},
        trained_on=describe(data, parts),
        licences={source: LICENCES.get(source, UNSTATED) for source in sorted(parts.train.source.unique())},
        notes=NOTES,
        config={**asdict(config), "views": list(learned.names)},
    )
    artifact.write(out, graph, card)
    card = artifact.with_figures(card, held_out_figures(OnnxForecaster(out), parts.held_out))
    artifact.write(out, graph, card)
    return card


def describe(data: Path, parts: dataset.Split) -> dict[str, object]:
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


def held_out_figures(
    forecaster: OnnxForecaster, held_out: pd.DataFrame, least_rows: int = 100
) -> dict[str, object]:
    """By source and model with enough held-out rows: what the served artifact scores there."""
    return {
        f"{source}/{model}": _figures(forecaster, rows)
        for (source, model), rows in held_out.groupby(["source", "model"])
        if len(rows) >= least_rows
    }


def _figures(forecaster: OnnxForecaster, rows: pd.DataFrame) -> dict[str, object]:
    queries = [Features(row.prompt, row.model, row.turn) for row in rows.itertuples()]
    found = np.array([each.probabilities for each in forecaster.forecast(queries)])
    edges, lengths = forecaster.card.edges, rows.response_tokens.to_numpy(dtype=np.int64)
    mean, p50 = metrics.expected(found, edges), metrics.quantile(found, edges, 0.5)
    by_length = (
        metrics.accuracy(lengths, metrics.likeliest_bucket(found, edges, longest), longest)
        for longest in (512, 1024)
    )
    figures = {
        "rows": len(rows),
        "spearman": metrics.rank(lengths, mean)["spearman"],
        "mae_of_mean": metrics.mean_absolute_error(lengths, mean),
        "mae_of_p50": metrics.mean_absolute_error(lengths, p50),
        "p90_coverage": metrics.coverage(lengths, metrics.quantile(found, edges, 0.9)),
        **{key: value for each in by_length for key, value in each.items()},
    }
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}


def _places(rows: pd.DataFrame, index: pd.Series[int], column: str = "prompt_id") -> NDArray[np.int64]:
    places: NDArray[np.int64] = rows[column].map(index).to_numpy(dtype=np.int64)
    return places
