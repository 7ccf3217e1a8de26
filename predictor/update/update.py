"""Update an artifact from outcomes: fine-tune its head, and replace the artifact if the result is better.

The text encoder is unchanged, so an update takes minutes on a CPU, without a GPU. Requires the `train` extra.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import softmax

from predictor import artifact as artifacts
from predictor.data import dataset, labels
from predictor.errors import DataError, RefusedUpdate
from predictor.evaluation import metrics
from predictor.training import calibrate, length_head, onnx_head
from predictor.update.head_training import HeadTrainer, Outcomes, Weights, best_steps, recalibrated

Progress = Callable[[str], None]
HELD_OUT_PERCENT, CALIBRATION_PERCENT = 20, 15
MIN_TRAIN_ROWS, MIN_HELD_OUT_ROWS = 50, 20
MAX_ROWS = 20_000
REPLAY_ROWS_PER_ROW, MIN_REPLAY_ROWS, MAX_REPLAY_ROWS = 4, 2_000, 20_000
MAX_ELSEWHERE_ROWS = 4_000
ACCURACY_MAX_LENGTH = 1024
NEAREST_ROWS = 512


@dataclass(frozen=True, slots=True)
class Figures:
    """The scores of a head on some rows."""

    rows: int
    log_loss: float
    mae_tokens: float
    accuracy: float
    p90_coverage: float

    def to_dict(self) -> dict[str, Any]:
        """Return the figures by name, rounded for a report."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class ServedArtifact:
    """The current artifact, and the models that it will know after the update."""

    card: artifacts.Card
    graph: bytes
    vocabulary: tuple[str, ...]
    models: tuple[str, ...]


class Parts(NamedTuple):
    """Masks of the training, calibration and held-out rows. All rows of a prompt are in one of them."""

    train: NDArray[np.bool_]
    calibration: NDArray[np.bool_]
    held_out: NDArray[np.bool_]


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
    """Train on `outcomes` (the columns of a corpus), and write the new artifact to `out`, default in place.

    `elsewhere` is a corpus of other served traffic. It is rehearsed, and accuracy on it may fall by at most
    `margin`. Without it, only the model table's rows of the outcomes' models change. Returns the figures
    before and after. Raises RefusedUpdate if the new artifact is not better, DataError if there are too few
    rows, and ArtifactError if another update wrote the artifact meanwhile.
    """
    digest = dataset.file_digest(outcomes)
    frame = dataset.read(outcomes, with_cut=True).tail(MAX_ROWS).reset_index(drop=True)
    served = _read_served(artifact, frame)
    parts, cut = _split(frame, outcomes), frame.cut.to_numpy(dtype=bool)
    known = _encode_rows(served, frame, progress)
    rows = _with_drawn_lengths(served, known, cut, seed)

    train, held_out, held_cut = rows.select(parts.train), known.select(parts.held_out), cut[parts.held_out]
    start = _with_new_models(served, train)
    rehearsed, judged = _elsewhere_rows(elsewhere, served, int(parts.train.sum()), seed, progress)
    trainer = HeadTrainer(start, rehearsed, served.card.edges, seed, progress)
    chosen = best_steps(trainer, (0, steps // 8, steps), train, rows.select(parts.calibration))
    both = rows.select(parts.train | parts.calibration)
    end = recalibrated(start._replace(head=trainer.train(both, chosen)), trainer, both, chosen)

    current = _read_weights(served.graph)
    before = figures(current, _with_known_models(served, held_out), served.card.edges, held_cut)
    after = figures(end, held_out, served.card.edges, held_cut)
    report: dict[str, Any] = {"outcomes": {"before": before.to_dict(), "after": after.to_dict()}}
    _require_improvement(before, after)
    if judged is not None:
        before = figures(current, _with_known_models(served, judged), served.card.edges)
        after = figures(end, judged, served.card.edges)
        report["elsewhere"] = {"before": before.to_dict(), "after": after.to_dict()}
        _require_no_loss(before, after, margin)
    entry = {"file": outcomes.name, "sha256": digest, "figures": report}
    _write(artifact, out or artifact, served, end, entry)
    return report


def figures(
    weights: Weights, rows: Outcomes, edges: tuple[int, ...], cut: NDArray[np.bool_] | None = None
) -> Figures:
    """Return the scores of weights on some rows. Answers that were `cut` short enter only the log loss, with
    the probability of a longer answer.
    """
    if cut is not None and cut.any():
        ended = figures(weights, rows.select(~cut), edges)
        beyond = _log_loss_beyond(weights, rows.select(cut), edges)
        return replace(
            ended, log_loss=float(np.average([ended.log_loss, beyond], weights=[ended.rows, cut.sum()]))
        )
    logits = weights.logits(rows) * weights.sharpness[rows.model][:, None]
    coverage = weights.expected_coverage(rows, weights.shift[rows.model].astype(np.float64))
    probabilities = calibrate.recalibrate(softmax(logits, axis=1), coverage)
    bucket = metrics.likeliest_bucket(probabilities, edges, ACCURACY_MAX_LENGTH)
    return Figures(
        rows=len(rows.length),
        log_loss=calibrate.log_loss(logits, labels.range_index(rows.length, edges)),
        mae_tokens=metrics.mean_absolute_error(rows.length, metrics.quantile(probabilities, edges, 0.5)),
        accuracy=float((bucket == metrics.true_bucket(rows.length, ACCURACY_MAX_LENGTH)).mean()),
        p90_coverage=metrics.coverage(rows.length, metrics.quantile(probabilities, edges, 0.9)),
    )


def _log_loss_beyond(weights: Weights, rows: Outcomes, edges: tuple[int, ...]) -> float:
    """Return the mean −log P(L > length) of the rows, in nats."""
    logits = weights.logits(rows) * weights.sharpness[rows.model][:, None]
    longer = np.clip((np.array(edges[1:]) - rows.length[:, None]) / np.diff(edges), 0.0, 1.0)
    beyond = (softmax(logits, axis=1) * longer).sum(axis=1)
    return float(-np.log(np.maximum(beyond, 1e-12)).mean())


def _read_served(folder: Path, frame: pd.DataFrame) -> ServedArtifact:
    """Read the artifact, and append the frame's new models to its models."""
    card, graph, vocabulary = artifacts.read(folder)
    known = {name.casefold() for name in (*card.models, *card.aliases)}
    new = {name.casefold(): name for name in sorted(set(frame.model)) if name.casefold() not in known}
    return ServedArtifact(card, graph, vocabulary, (*card.models, *new.values()))


def _split(frame: pd.DataFrame, path: Path) -> Parts:
    """Split rows by prompt. Raises DataError if there are too few complete answers."""
    percent = frame.prompt_id.map(dataset.prompt_percent).to_numpy()
    held_out = percent < HELD_OUT_PERCENT
    calibration = ~held_out & (percent < HELD_OUT_PERCENT + CALIBRATION_PERCENT)
    train = ~held_out & ~calibration
    ended = ~frame.cut.to_numpy(dtype=bool)
    to_learn, to_judge = (train & ended).sum(), (held_out & ended).sum()
    if to_learn < MIN_TRAIN_ROWS or to_judge < MIN_HELD_OUT_ROWS:
        raise DataError(
            f"{path} has {to_learn} rows to learn from and {to_judge} to judge by that no limit cut short; "
            f"at least {MIN_TRAIN_ROWS} and {MIN_HELD_OUT_ROWS} are needed"
        )
    return Parts(train, calibration, held_out)


def _encode_rows(served: ServedArtifact, frame: pd.DataFrame, progress: Progress) -> Outcomes:
    """Encode prompts with the served graph, and models as rows of its model table."""
    prompts = frame.drop_duplicates("prompt_id")
    prompt_index = pd.Series(np.arange(len(prompts)), index=prompts.prompt_id)
    model_row = {name.casefold(): index for index, name in enumerate(served.models)}
    model_row |= {alias.casefold(): model_row[name.casefold()] for alias, name in served.card.aliases.items()}
    model = frame.model.str.casefold().map(model_row).fillna(length_head.UNKNOWN_MODEL)
    return Outcomes(
        onnx_head.head_inputs(served.graph, served.vocabulary, list(prompts.prompt), progress),
        frame.prompt_id.map(prompt_index).to_numpy(dtype=np.int64),
        model.to_numpy(dtype=np.int64),
        frame.response_tokens.to_numpy(dtype=np.int64),
    )


def _with_drawn_lengths(
    served: ServedArtifact, rows: Outcomes, cut: NDArray[np.bool_], seed: int
) -> Outcomes:
    """Replace the lengths of answers that were cut short by samples from the current forecast beyond the cut.

    Without these rows, training would underestimate models whose clients limit answers.
    """
    if not cut.any():
        return rows
    weights, edges = _read_weights(served.graph), np.array(served.card.edges)
    known = _with_known_models(served, rows.select(cut))
    logits = weights.logits(known) * weights.sharpness[known.model][:, None]
    begins = np.maximum(edges[:-1][None, :], known.length[:, None])
    left = np.maximum(edges[1:][None, :] - begins, 0)  # tokens of each range beyond the cut
    chances = softmax(logits, axis=1) * left / np.diff(edges) + 1e-12 * left
    chances[:, -1] += 1e-12  # answers that were cut beyond the last range
    random, every = np.random.default_rng(seed), np.arange(len(known.length))
    summed = chances.cumsum(axis=1)
    place = (summed <= random.random(len(every))[:, None] * summed[:, -1:]).sum(axis=1)
    place = np.minimum(place, len(edges) - 2)
    length = rows.length.copy()
    length[cut] = begins[every, place] + 1 + random.integers(0, np.maximum(left[every, place], 1))
    return replace(rows, length=length)


def _with_new_models(served: ServedArtifact, rows: Outcomes) -> Weights:
    """Return the served weights with a row for each new model, copied from the nearest known model."""
    head, sharpness, shift, kinds = _read_weights(served.graph)
    known = len(served.card.models)
    nearest = [
        _nearest_model(head, sharpness, rows.select(rows.model == new), served.card.edges)
        for new in range(known, len(served.models))
    ]
    copied = np.array([*range(known), *nearest])
    models = {"models.weight": head["models.weight"][copied]}
    return Weights({**head, **models}, sharpness[copied], shift[copied], kinds)


def _with_known_models(served: ServedArtifact, rows: Outcomes) -> Outcomes:
    """Return the rows as inputs of the current artifact, with new models replaced by UNKNOWN_MODEL."""
    known = rows.model < len(served.card.models)
    return replace(rows, model=np.where(known, rows.model, length_head.UNKNOWN_MODEL))


def _nearest_model(
    head: dict[str, onnx_head.Array], sharpness: onnx_head.Array, rows: Outcomes, edges: tuple[int, ...]
) -> int:
    """Return the known model with the least log loss on the rows; UNKNOWN_MODEL without rows."""
    chosen = slice(0, NEAREST_ROWS)
    if len(rows.length) == 0:
        return length_head.UNKNOWN_MODEL
    net, label = length_head.load_head(head), labels.range_index(rows.length[chosen], edges)
    losses = []
    for candidate, factor in enumerate(sharpness):
        model = np.full(len(label), candidate)
        logits = length_head.predict_logits(net, rows.inputs, rows.prompt[chosen], model).astype(np.float64)
        losses.append(calibrate.log_loss(logits * factor, label))
    return int(np.argmin(losses))


def _elsewhere_rows(
    path: Path | None, served: ServedArtifact, train_rows: int, seed: int, progress: Progress
) -> tuple[Outcomes | None, Outcomes | None]:
    """Return rows of other served traffic: those to rehearse, and the held-out ones to evaluate on."""
    if path is None:
        return None, None
    parts = dataset.split(dataset.read(path))
    if not len(parts.train) or not len(parts.held_out):
        raise DataError(
            f"{path} has {len(parts.train)} rows to rehearse and {len(parts.held_out)} to judge by; "
            "at least one of each is needed"
        )
    wanted = min(MAX_REPLAY_ROWS, max(MIN_REPLAY_ROWS, REPLAY_ROWS_PER_ROW * train_rows))
    rehearsed, judged = (
        _encode_rows(
            served, part.sample(min(rows, len(part)), random_state=seed).reset_index(drop=True), progress
        )
        for part, rows in ((parts.train, wanted), (parts.held_out, MAX_ELSEWHERE_ROWS))
    )
    return rehearsed, judged


def _read_weights(graph: bytes) -> Weights:
    return Weights(
        onnx_head.read_head(graph),
        onnx_head.read_sharpness(graph),
        onnx_head.read_shift(graph),
        onnx_head.read_kinds(graph),
    )


def _require_improvement(before: Figures, after: Figures) -> None:
    """Raise RefusedUpdate unless the log loss on held-out outcomes decreased."""
    if after.log_loss >= before.log_loss:
        raise RefusedUpdate(
            f"the artifact stays: on {after.rows} outcomes that were kept aside its log loss is "
            f"{before.log_loss:.4f}, the new one's {after.log_loss:.4f}"
        )


def _require_no_loss(before: Figures, after: Figures, margin: float) -> None:
    """Raise RefusedUpdate if the accuracy elsewhere decreased by more than the margin."""
    if after.accuracy < before.accuracy - margin:
        raise RefusedUpdate(
            f"the artifact stays: elsewhere the accuracy at {ACCURACY_MAX_LENGTH} would fall from "
            f"{before.accuracy:.4f} to {after.accuracy:.4f}, more than the margin of {margin}"
        )


def _write(
    artifact: Path, out: Path, served: ServedArtifact, weights: Weights, entry: dict[str, Any]
) -> None:
    graph = onnx_head.with_head(served.graph, weights.head, weights.sharpness, weights.shift)
    before = served.card.trained_on
    card = replace(
        served.card,
        models=served.models,
        digest=artifacts.digest_of(graph),
        trained_on={**before, "updates": [*before.get("updates", []), entry]},
    )
    in_place = out.exists() and out.samefile(artifact)
    artifacts.write(out, graph, card, served.vocabulary, replacing=served.card if in_place else None)
