"""Measure what 200 answers of an unseen source teach: python -m bench.studies.adaptation --data FILE

Trains a lexical model without the source, updates it with 200 of its answers and a rehearsal of the rest, and
scores both on prompts that neither saw: there, and elsewhere. With `--artifact` nothing is trained: that one
learns 200 answers of a model that it does not know, to prompts that it was not trained on; with `--halves`
half of them, scored on the other half, and the other way round. Prints its conditions and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd

from predictor.artifact import resolve_folder
from predictor.data import dataset
from predictor.errors import RefusedUpdate
from predictor.evaluation.evaluate import scores
from predictor.onnx_forecaster import Features, OnnxForecaster
from predictor.training.train import train
from predictor.update.update import update

ITEMS = 200
FIGURES = ("rows", "accuracy_1024", "majority_1024", "mae", "spearman", "log_loss", "p90_coverage")
MAX_SCORED = 6_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--unseen", default="gsm8k", help="the source that is left out")
    parser.add_argument("--model", default="human", help="whose answers of that source")
    parser.add_argument("--prompts", type=int, default=8_000, help="number of prompts of the other sources")
    parser.add_argument("--artifact", type=Path, help="lexical, small or a folder; instead of training")
    parser.add_argument(
        "--halves",
        action="store_true",
        help="learn half of the unseen prompts, score the other, both ways",
    )
    options = parser.parse_args()
    if options.halves and options.artifact is None:
        parser.error("--halves needs --artifact")
    frame = dataset.read(options.data)
    unseen = frame[(frame.source == options.unseen) & (frame.model == options.model)]
    others = frame[frame.source != options.unseen]
    kept = others.drop_duplicates("prompt_id").sample(options.prompts, random_state=7).prompt_id
    others = others[others.prompt_id.isin(kept)].reset_index(drop=True)
    if options.artifact is not None:
        fresh = dataset.split(unseen)
        unseen = pd.concat([fresh.calibration, fresh.held_out], ignore_index=True)
        unseen["prompt_id"] = "fresh " + unseen.prompt_id  # else an update would keep them all aside
    unseen = unseen.assign(model=f"{options.model}-of-the-new-source")
    items = unseen.sample(
        frac=0.5 if options.halves else None, n=None if options.halves else ITEMS, random_state=7
    )
    rest = unseen[~unseen.prompt_id.isin(items.prompt_id)]
    found = []
    for learned, scored in [(items, rest), (rest, items)][: 2 if options.halves else 1]:
        with TemporaryDirectory() as folder:
            found.append(measure(Path(folder), learned, scored, others, options.artifact))
    conditions = {**vars(options), "data": options.data.name, "items": len(items), "load": os.getloadavg()[0]}
    figures = {"halves": found} if options.halves else found[0]
    print(json.dumps({"conditions": conditions, **figures}, default=str))


def measure(
    folder: Path, items: pd.DataFrame, rest: pd.DataFrame, others: pd.DataFrame, artifact: Path | None
) -> dict[str, Any]:
    """Return figures there (`rest`) and elsewhere, before and after learning `items`, or the reason of a
    refusal.
    """
    elsewhere, outcomes = folder / "elsewhere.parquet", folder / "outcomes.parquet"
    others.to_parquet(elsewhere)
    items.to_parquet(outcomes)
    if artifact is None:
        train(elsewhere, folder / "before", progress=lambda text: print(text, flush=True))
    else:
        copytree(resolve_folder(artifact), folder / "before")
    try:
        update(folder / "before", outcomes, out=folder / "after", elsewhere=elsewhere)
    except RefusedUpdate as refusal:
        return {"refused": str(refusal)}
    places = {"there": rest, "elsewhere": dataset.split(others).held_out}
    served = {when: OnnxForecaster(folder / when) for when in ("before", "after")}
    return {
        place: {when: figures_of(forecaster, rows.head(MAX_SCORED)) for when, forecaster in served.items()}
        for place, rows in places.items()
    }


def figures_of(forecaster: OnnxForecaster, rows: pd.DataFrame) -> dict[str, Any]:
    queries = [Features(row.prompt, row.model) for row in rows.itertuples()]
    found = np.array([each.probabilities for each in forecaster.forecast(queries)])
    scored = {**scores(rows, found, forecaster.card.edges), "rows": len(rows)}
    return {name: scored[name] for name in FIGURES}


if __name__ == "__main__":
    main()
