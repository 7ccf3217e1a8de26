"""Learning from outcomes: an artifact's head is trained further, and takes its place only if it earned it.

What reads the text is not changed, so this takes a processor minutes, not a GPU. Needs the `train` extra.
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

from predictor import artifact as artifacts
from predictor.data import dataset, labels
from predictor.errors import DataError, RefusedUpdate
from predictor.evaluation import metrics
from predictor.training import calibrate, length_head, onnx_head
from predictor.update.head_training import Lesson, Outcomes, Weights, best_steps, calibrated

Progress = Callable[[str], None]
HELD_OUT_PERCENT, CALIBRATION_PERCENT = 20, 15
LEAST_LEARN_ROWS, LEAST_HELD_OUT_ROWS = 50, 20
MOST_ROWS = 20_000
REPLAY_ROWS_PER_ROW, LEAST_REPLAY_ROWS, MOST_REPLAY_ROWS = 4, 2_000, 20_000
ELSEWHERE_ROWS = 4_000
JUDGED_LENGTH = 1024
NEAREST_ROWS = 512


@dataclass(frozen=True, slots=True)
class Figures:
    """How good a head is on some rows."""

    rows: int
    log_loss: float
    mae_tokens: float
    accuracy: float
    p90_coverage: float

    def told(self) -> dict[str, Any]:
        names = ("rows", "log_loss", "mae_tokens", "accuracy", "p90_coverage")
        return {name: round(getattr(self, name), 4) for name in names}


@dataclass(frozen=True, slots=True)
class Served:
    """The artifact that serves now, and the models it will know."""

    card: artifacts.Card
    graph: bytes
    vocabulary: tuple[str, ...]
    models: tuple[str, ...]


def update(
    artifact: Path,
    outcomes: Path,
    *,
    out: Path | None = None,
    elsewhere: Path | None = None,
    margin: float = 0.009,
    steps: int = 400,
    seed: int = 7,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Trains on `outcomes` (the columns of a corpus) and writes the new artifact to `out`, else in place.

    `elsewhere` is a corpus of what else is served: it is rehearsed, and its accuracy may fall by at most
    `margin`. Without it only what the head knows of the outcomes' own models is changed. Returns the figures
    before and after; raises RefusedUpdate if the new artifact is not better, DataError if there is too little
    to learn from, ArtifactError if another update was faster.
    """
    digest = dataset.file_digest(outcomes)
    fresh = dataset.read(outcomes).tail(MOST_ROWS).reset_index(drop=True)
    served = _served(artifact, fresh)
    learn, calibration, held_out = _parts(fresh, outcomes)
    own = _read(served, fresh, progress)

    begin = _with_new_models(served, own.taken(learn))
    rehearsed, judged = _elsewhere(elsewhere, served, int(learn.sum()), seed, progress)
    lesson = Lesson(begin, rehearsed, served.card.edges, seed, progress)
    chosen = best_steps(lesson, (0, steps // 8, steps), own.taken(learn), own.taken(calibration))
    taught = own.taken(learn | calibration)
    end = calibrated(begin._replace(head=lesson.tuned(taught, chosen)), lesson, taught, chosen)

    now, aside = _serving(served), own.taken(held_out)
    before = figures(now, _as_known(aside, len(served.card.models)), served.card.edges)
    after = figures(end, aside, served.card.edges)
    report: dict[str, Any] = {"outcomes": {"before": before.told(), "after": after.told()}}
    _demand_better(before, after)
    if judged is not None:
        there = [figures(each, judged, served.card.edges) for each in (now, end)]
        report["elsewhere"] = {"before": there[0].told(), "after": there[1].told()}
        _demand_no_loss(there[0], there[1], margin)
    learned = {"file": outcomes.name, "sha256": digest, "figures": report}
    _write(artifact, out or artifact, served, end, learned)
    return report


def figures(weights: Weights, rows: Outcomes, edges: tuple[int, ...]) -> Figures:
    """What weights score on some rows."""
    logits = weights.logits(rows) * weights.sharpness[rows.model][:, None]
    reached = weights.reached(rows, weights.shift[rows.model].astype(np.float64))
    probabilities = calibrate.bent(softmax(logits, axis=1), reached)
    bucket = metrics.likeliest_bucket(probabilities, edges, JUDGED_LENGTH)
    return Figures(
        rows=len(rows.length),
        log_loss=calibrate.log_loss(logits, labels.range_index(rows.length, edges)),
        mae_tokens=metrics.mean_absolute_error(rows.length, metrics.quantile(probabilities, edges, 0.5)),
        accuracy=float((bucket == metrics.true_bucket(rows.length, JUDGED_LENGTH)).mean()),
        p90_coverage=metrics.coverage(rows.length, metrics.quantile(probabilities, edges, 0.9)),
    )


def _served(folder: Path, fresh: pd.DataFrame) -> Served:
    card, graph, vocabulary = artifacts.read(folder)
    known = {name.casefold() for name in (*card.models, *card.aliases)}
    new = {name.casefold(): name for name in sorted(set(fresh.model)) if name.casefold() not in known}
    return Served(card, graph, vocabulary, (*card.models, *new.values()))


def _parts(fresh: pd.DataFrame, path: Path) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """Which rows to learn from, to calibrate on and to judge by; all rows of a prompt are in one part."""
    percent = fresh.prompt_id.map(dataset.prompt_percent).to_numpy()
    held_out = percent < HELD_OUT_PERCENT
    calibration = ~held_out & (percent < HELD_OUT_PERCENT + CALIBRATION_PERCENT)
    learn = ~held_out & ~calibration
    if learn.sum() < LEAST_LEARN_ROWS or held_out.sum() < LEAST_HELD_OUT_ROWS:
        raise DataError(
            f"{path} has {learn.sum()} rows to learn from and {held_out.sum()} to judge by; "
            f"at least {LEAST_LEARN_ROWS} and {LEAST_HELD_OUT_ROWS} are needed"
        )
    return learn, calibration, held_out


def _read(served: Served, frame: pd.DataFrame, progress: Progress) -> Outcomes:
    prompts = frame.drop_duplicates("prompt_id")
    place = pd.Series(np.arange(len(prompts)), index=prompts.prompt_id)
    row = {name.casefold(): index for index, name in enumerate(served.models)}
    row |= {alias.casefold(): row[name.casefold()] for alias, name in served.card.aliases.items()}
    return Outcomes(
        onnx_head.inputs_of(served.graph, served.vocabulary, list(prompts.prompt), progress),
        frame.prompt_id.map(place).to_numpy(dtype=np.int64),
        frame.model.str.casefold().map(row).fillna(length_head.UNKNOWN_MODEL).to_numpy(dtype=np.int64),
        frame.response_tokens.to_numpy(dtype=np.int64),
    )


def _with_new_models(served: Served, rows: Outcomes) -> Weights:
    """What serves now, with a row for each new model: that of the known model whose forecasts fit it best."""
    head, sharpness, shift, kinds = _serving(served)
    known = len(served.card.models)
    nearest = [
        _nearest(head, sharpness, rows.taken(rows.model == new), served.card.edges)
        for new in range(known, len(served.models))
    ]
    picked = np.array([*range(known), *nearest])
    models = {"models.weight": head["models.weight"][picked]}
    return Weights({**head, **models}, sharpness[picked], shift[picked], kinds)


def _nearest(
    head: dict[str, onnx_head.Array], sharpness: onnx_head.Array, rows: Outcomes, edges: tuple[int, ...]
) -> int:
    """The known model with the least log loss on some rows of another."""
    chosen = slice(0, NEAREST_ROWS)
    if len(rows.length) == 0:
        return length_head.UNKNOWN_MODEL
    net, label = length_head.head_from(head), labels.range_index(rows.length[chosen], edges)
    losses = []
    for candidate, factor in enumerate(sharpness):
        served = np.full(len(label), candidate)
        logits = length_head.logits_of(net, rows.inputs, rows.prompt[chosen], served).astype(np.float64)
        losses.append(calibrate.log_loss(logits * factor, label))
    return int(np.argmin(losses))


def _elsewhere(
    path: Path | None, served: Served, learn_rows: int, seed: int, progress: Progress
) -> tuple[Outcomes | None, Outcomes | None]:
    """Rows to rehearse, and rows to judge by, of what else is served."""
    if path is None:
        return None, None
    parts = dataset.split(dataset.read(path))
    if not len(parts.train) or not len(parts.held_out):
        raise DataError(
            f"{path} has {len(parts.train)} rows to rehearse and {len(parts.held_out)} to judge by; "
            "at least one of each is needed"
        )
    wanted = min(MOST_REPLAY_ROWS, max(LEAST_REPLAY_ROWS, REPLAY_ROWS_PER_ROW * learn_rows))
    both = [
        part.sample(min(rows, len(part)), random_state=seed).reset_index(drop=True)
        for part, rows in ((parts.train, wanted), (parts.held_out, ELSEWHERE_ROWS))
    ]
    rehearsed, judged = (_read(served, part, progress) for part in both)
    return rehearsed, judged


def _serving(served: Served) -> Weights:
    graph = served.graph
    return Weights(
        onnx_head.head_of(graph),
        onnx_head.sharpness_of(graph),
        onnx_head.shift_of(graph),
        onnx_head.kinds_of(graph),
    )


def _as_known(rows: Outcomes, known: int) -> Outcomes:
    """The rows as the artifact in force sees them: to it a new model is an unknown one."""
    return replace(rows, model=np.where(rows.model < known, rows.model, length_head.UNKNOWN_MODEL))


def _demand_better(before: Figures, after: Figures) -> None:
    if after.log_loss >= before.log_loss:
        raise RefusedUpdate(
            f"the artifact stays: on {after.rows} outcomes that were kept aside its log loss is "
            f"{before.log_loss:.4f}, the new one's {after.log_loss:.4f}"
        )


def _demand_no_loss(before: Figures, after: Figures, margin: float) -> None:
    if after.accuracy < before.accuracy - margin:
        raise RefusedUpdate(
            f"the artifact stays: elsewhere the accuracy at {JUDGED_LENGTH} would fall from "
            f"{before.accuracy:.4f} to {after.accuracy:.4f}, more than the margin of {margin}"
        )


def _write(artifact: Path, out: Path, served: Served, weights: Weights, learned: dict[str, Any]) -> None:
    graph = onnx_head.with_head(served.graph, weights.head, weights.sharpness, weights.shift)
    before = served.card.trained_on
    card = replace(
        served.card,
        models=served.models,
        digest=artifacts.digest_of(graph),
        trained_on={**before, "updates": [*before.get("updates", []), learned]},
    )
    in_place = out.exists() and out.samefile(artifact)
    artifacts.write(out, graph, card, served.vocabulary, replacing=served.card if in_place else None)
