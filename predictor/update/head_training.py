"""Train the head of an artifact on outcomes: select the number of steps, train, and recalibrate.

No side effects except for progress messages. Requires the `train` extra.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from predictor.data import labels
from predictor.training import calibrate, length_head, onnx_head

Progress = Callable[[str], None]
MIN_CALIBRATION_ROWS = 25
"""A model with fewer rows keeps its sharpness and shift."""
FOLDS = 3
BATCH_ROWS = 64
HEAD_LEARNING_RATE, MODELS_LEARNING_RATE = 1e-3, 2e-2


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Encoded rows: head inputs `[prompts, inputs]`; prompt, model and length of each row `[rows]`."""

    inputs: NDArray[np.float32]
    prompt: NDArray[np.int64]
    model: NDArray[np.int64]
    length: NDArray[np.int64]

    def select(self, rows: NDArray[np.bool_]) -> Outcomes:
        """Return the selected rows, with the same inputs."""
        return replace(self, prompt=self.prompt[rows], model=self.model[rows], length=self.length[rows])


class Weights(NamedTuple):
    """The weights of an artifact: head, sharpness and shift of each model, and the fixed prompt kinds."""

    head: dict[str, onnx_head.Array]
    sharpness: onnx_head.Array
    shift: onnx_head.Array
    kinds: calibrate.PromptKinds

    def logits(self, rows: Outcomes) -> NDArray[np.float64]:
        """Return logits `[rows, ranges]`, before sharpness is applied."""
        head = length_head.load_head(self.head)
        return length_head.predict_logits(head, rows.inputs, rows.prompt, rows.model).astype(np.float64)

    def expected_coverage(self, rows: Outcomes, shift: calibrate.Floats | float = 0.0) -> NDArray[np.float64]:
        """Return the expected coverage of each row's raw p90 `[rows]`."""
        standardised = onnx_head.standardise(self.head, rows.inputs)[rows.prompt]
        return self.kinds.expected_coverage(standardised, shift)


@dataclass(frozen=True, slots=True)
class HeadTrainer:
    """Train the heads of one update. All start from the same weights."""

    start: Weights
    rehearsed: Outcomes | None
    """Rows on which the forecasts of the start are the targets."""
    edges: tuple[int, ...]
    seed: int
    progress: Progress

    def train(self, outcomes: Outcomes, steps: int) -> dict[str, onnx_head.Array]:
        """Return the head after training on `outcomes`, or the start's head if weights become non-finite.

        Rehearsed rows have the start's forecasts as targets. Without them, only the model table's rows of the
        outcomes' models change.
        """
        if steps == 0 or not len(outcomes.length):
            return self.start.head
        rows = outcomes if self.rehearsed is None else concatenate(outcomes, self.rehearsed)
        config = length_head.HeadConfig(
            epochs=max(1, steps * BATCH_ROWS // len(rows.prompt)),
            batch_rows=BATCH_ROWS,
            learning_rate=MODELS_LEARNING_RATE if self.rehearsed is None else HEAD_LEARNING_RATE,
            unknown_share=0.0,
            seed=self.seed,
        )
        target = labels.soft_targets(outcomes.length, self.edges, config.spread_octaves)
        if self.rehearsed is not None:
            target = np.concatenate([target, softmax(self.start.logits(self.rehearsed), axis=1)])
        weight = np.ones(len(rows.prompt), dtype=np.float32)
        training_rows = length_head.HeadRows(rows.prompt, rows.model, target.astype(np.float32), weight)
        only_models = self.rehearsed is None
        tuned = length_head.head_state(
            length_head.tune(
                length_head.load_head(self.start.head),
                rows.inputs,
                training_rows,
                config,
                self.progress,
                only_models=only_models,
            )
        )
        if not all(np.isfinite(weights).all() for weights in tuned.values()):
            self.progress("training ended in no finite numbers: the head stays as it was")
            return self.start.head
        if only_models:  # weight decay changes the rows of other models as well: restore them
            before = self.start.head["models.weight"]
            changed = np.isin(np.arange(len(before)), outcomes.model)[:, None]
            tuned["models.weight"] = np.where(changed, tuned["models.weight"], before)
        return tuned


def best_steps(trainer: HeadTrainer, choices: tuple[int, ...], train: Outcomes, validation: Outcomes) -> int:
    """Return the number of steps with the least validation log loss; the last choice without rows."""
    if len(validation.length) == 0:
        return choices[-1]
    candidates = (trainer.start._replace(head=trainer.train(train, steps)) for steps in choices)
    label = labels.range_index(validation.length, trainer.edges)
    losses = [
        calibrate.log_loss(each.logits(validation) * each.sharpness[validation.model][:, None], label)
        for each in candidates
    ]
    return choices[int(np.argmin(losses))]


def recalibrated(weights: Weights, trainer: HeadTrainer, rows: Outcomes, steps: int) -> Weights:
    """Return the weights with the rows' models' sharpness and shift fitted on cross-validated forecasts."""
    logits, edges = _cross_validated_logits(trainer, rows, steps), trainer.edges
    sharpness, shift = weights.sharpness.copy(), weights.shift.copy()
    coverage = weights.expected_coverage(rows)
    for model in np.unique(rows.model):
        own = np.flatnonzero(rows.model == model)
        if len(own) < MIN_CALIBRATION_ROWS:
            continue
        sharpness[model] = calibrate.fit_sharpness(logits[own], rows.length[own], edges, coverage[own])
        probabilities = softmax(logits[own] * sharpness[model], axis=1)
        shift[model] = calibrate.fit_shift(probabilities, rows.length[own], edges, coverage[own])
    return weights._replace(sharpness=sharpness, shift=shift)


def _cross_validated_logits(trainer: HeadTrainer, rows: Outcomes, steps: int) -> NDArray[np.float64]:
    """Return the logits of each row from a head trained without the fold of the row's prompt."""
    if steps == 0:
        return trainer.start.logits(rows)
    logits = np.empty((len(rows.length), len(trainer.edges) - 1))
    for fold in range(FOLDS):
        test = rows.prompt % FOLDS == fold
        head = trainer.train(rows.select(~test), steps)
        logits[test] = trainer.start._replace(head=head).logits(rows.select(test))
    return logits


def concatenate(first: Outcomes, second: Outcomes) -> Outcomes:
    """Concatenate two sets of rows. The prompts of the second follow those of the first."""
    return Outcomes(
        np.concatenate([first.inputs, second.inputs]),
        np.concatenate([first.prompt, second.prompt + len(first.inputs)]),
        np.concatenate([first.model, second.model]),
        np.concatenate([first.length, second.length]),
    )
