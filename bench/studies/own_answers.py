"""Measure what a served model's own answers teach: python -m bench.studies.own_answers --answers FILE

FILE has a JSON object a line: prompt, prompt_id, source, completion_tokens, finish_reason. Complete answers
go through the outcome log as a gateway writes it, `mico predictor update` learns from it, and the artifact is
scored before and after on answers to other prompts, on all of which nothing was trained. Before, the model
is unknown: alone, and mixed from known models after some of the answers, as a gateway does. Prints its
conditions and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
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
from predictor.forecast import Forecast
from predictor.onnx_forecaster import Features, OnnxForecaster
from predictor.outcome_log import OutcomeLog
from predictor.unseen_models import UnseenModelForecaster
from predictor.update.update import update

FRESH_PERCENT = dataset.HELD_OUT_PERCENT + dataset.CALIBRATION_PERCENT
"""Prompts that training keeps aside: no encoder and no head has seen them."""
MIXED_ANSWERS = 300
"""Seen by the mixture of known models, which forgets as many."""
FIGURES = ("rows", "spearman", "mae", "mae_p50", "p50_coverage", "p90_coverage", "p99_coverage", "log_loss")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--model", default="smollm2", help="its name for the gateway")
    parser.add_argument(
        "--artifact", type=Path, default=Path("small"), help="lexical, small, large or a folder"
    )
    parser.add_argument("--learn", type=int, default=2_000)
    parser.add_argument("--score", type=int, default=1_000)
    parser.add_argument("--elsewhere", type=Path, help="a corpus that the update rehearses")
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="learn only from prompts that nothing was trained on, as a site's are",
    )
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    answers = pd.read_json(options.answers, lines=True)
    complete = answers[answers.finish_reason == "stop"].sample(frac=1, random_state=options.seed)
    fresh = complete.prompt_id.map(dataset.prompt_percent) < FRESH_PERCENT
    scored = complete[fresh].head(options.score)
    others = complete[fresh].drop(scored.index) if options.fresh else complete[~fresh]
    learned = others.head(options.learn)
    with TemporaryDirectory() as folder:
        found = measure(Path(folder), learned, as_corpus(scored, options.model), options)
    conditions = {
        **vars(options),
        "answers": options.answers.name,
        "complete": len(complete),
        "cut": len(answers) - len(complete),
        "learned": len(learned),
        "load": os.getloadavg()[0],
    }
    print(json.dumps({"conditions": conditions, **found}, default=str))


def as_corpus(answers: pd.DataFrame, model: str) -> pd.DataFrame:
    columns = {"model": model, "turn": 1, "response_tokens": answers.completion_tokens}
    return answers[["source", "prompt_id", "prompt"]].assign(**columns).reset_index(drop=True)


def measure(
    folder: Path, learned: pd.DataFrame, scored: pd.DataFrame, options: argparse.Namespace
) -> dict[str, Any]:
    """Return figures before and after, with those of the update itself, or the reason of its refusal."""
    before = OnnxForecaster(resolve_folder(options.artifact))
    mixed = UnseenModelForecaster(before)
    outcome_log = OutcomeLog(folder / "outcomes")
    for number, row in enumerate(learned.itertuples()):
        query = Features(row.prompt, options.model)
        outcome_log.add(query, row.completion_tokens)
        if number < MIXED_ANSWERS:
            mixed.observe(query, row.completion_tokens)
    queries = [Features(row.prompt, row.model) for row in scored.itertuples()]
    found: dict[str, Any] = {
        "unknown": figures_of(before.forecast(queries), scored),
        "unknown, mixed": figures_of(mixed.forecast(queries), scored),
    }
    copytree(resolve_folder(options.artifact), folder / "artifact")
    try:
        found["update"] = update(folder / "artifact", folder / "outcomes", elsewhere=options.elsewhere)
    except RefusedUpdate as refusal:
        return {**found, "refused": str(refusal)}
    after = OnnxForecaster(folder / "artifact")
    return {**found, "updated": figures_of(after.forecast(queries), scored)}


def figures_of(forecasts: Sequence[Forecast], rows: pd.DataFrame) -> dict[str, Any]:
    """Return scores over all rows, and the coverage of the p90 on each source."""
    probabilities, edges = np.array([each.probabilities for each in forecasts]), forecasts[0].edges
    found = {**scores(rows, probabilities, edges), "rows": len(rows)}
    by_source = {
        str(source): [len(part), scores(part, probabilities[part.index], edges)["p90_coverage"]]
        for source, part in rows.groupby("source")
        if len(part) >= 50
    }
    return {**{name: found[name] for name in FIGURES}, "p90_coverage_by_source": by_source}


if __name__ == "__main__":
    main()
