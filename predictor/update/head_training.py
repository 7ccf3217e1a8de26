"""What one update learns: how long, from which rows, and how sure to be of what it learned.

Pure but for its progress. Needs the `train` extra.
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
OWN_SHARPNESS_ROWS = 25
FOLDS = 3
BATCH_ROWS = 64
HEAD_RATE, MODELS_RATE = 1e-3, 2e-2


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Rows ready for a head: inputs of each prompt, and per row its prompt, model and length."""

    inputs: NDArray[np.float32]
    prompt: NDArray[np.int64]
    model: NDArray[np.int64]
    length: NDArray[np.int64]

    def taken(self, rows: NDArray[np.bool_]) -> Outcomes:
        return replace(self, prompt=self.prompt[rows], model=self.model[rows], length=self.length[rows])


class Weights(NamedTuple):
    """What of an artifact may change: its head, and a factor and a shift for each model; and its kinds."""

    head: dict[str, onnx_head.Array]
    sharpness: onnx_head.Array
    shift: onnx_head.Array
    kinds: calibrate.Kinds

    def logits(self, rows: Outcomes) -> NDArray[np.float64]:
        """Before they are sharpened `[rows, ranges]`."""
        net = length_head.head_from(self.head)
        return length_head.logits_of(net, rows.inputs, rows.prompt, rows.model).astype(np.float64)

    def reached(self, rows: Outcomes, shift: calibrate.Floats | float = 0.0) -> NDArray[np.float64]:
        """What share the p90 of each row is thought to reach before it is bent."""
        seen = onnx_head.standardised(self.head, rows.inputs)[rows.prompt]
        return self.kinds.reached_by(seen, shift)


@dataclass(frozen=True, slots=True)
class Lesson:
    """What every tuning of one update has in common."""

    begin: Weights
    rehearsed: Outcomes | None
    edges: tuple[int, ...]
    seed: int
    progress: Progress

    def tuned(self, own: Outcomes, steps: int) -> dict[str, onnx_head.Array]:
        """The head after learning from some outcomes.

        What is rehearsed keeps the forecasts it had; without a rehearsal only the rows of the outcomes'
        models may change.
        """
        if steps == 0:
            return self.begin.head
        both = own if self.rehearsed is None else joined(own, self.rehearsed)
        config = length_head.HeadConfig(
            epochs=max(1, steps * BATCH_ROWS // len(both.prompt)),
            batch_rows=BATCH_ROWS,
            learning_rate=MODELS_RATE if self.rehearsed is None else HEAD_RATE,
            unknown_share=0.0,
            seed=self.seed,
        )
        target = labels.soft_targets(own.length, self.edges, config.spread_octaves)
        if self.rehearsed is not None:
            target = np.concatenate([target, softmax(self.begin.logits(self.rehearsed), axis=1)])
        weight = np.ones(len(both.prompt), dtype=np.float32)
        rows = length_head.Rows(both.prompt, both.model, target.astype(np.float32), weight)
        net, alone = length_head.head_from(self.begin.head), self.rehearsed is None
        tuned = length_head.tune(net, both.inputs, rows, config, self.progress, only_models=alone)
        return self._kept(length_head.state_of(tuned), own)

    def _kept(self, tuned: dict[str, onnx_head.Array], own: Outcomes) -> dict[str, onnx_head.Array]:
        """Without a rehearsal nothing keeps the other models where they were, so they are put back."""
        if self.rehearsed is None:
            before = self.begin.head["models.weight"]
            changed = np.isin(np.arange(len(before)), own.model)[:, None]
            tuned["models.weight"] = np.where(changed, tuned["models.weight"], before)
        return tuned


def best_steps(lesson: Lesson, among: tuple[int, ...], learn: Outcomes, others: Outcomes) -> int:
    """How long to learn for the least log loss on outcomes that were not learned from."""
    if len(others.length) == 0:
        return among[-1]
    weights = (lesson.begin._replace(head=lesson.tuned(learn, steps)) for steps in among)
    label = labels.range_index(others.length, lesson.edges)
    losses = [
        calibrate.log_loss(each.logits(others) * each.sharpness[others.model][:, None], label)
        for each in weights
    ]
    return among[int(np.argmin(losses))]


def calibrated(end: Weights, lesson: Lesson, rows: Outcomes, steps: int) -> Weights:
    """Factor and shift of the outcomes' models, fitted on what is forecast of a prompt by the others."""
    logits, edges = _crossed(lesson, rows, steps), lesson.edges
    factors, shifts = end.sharpness.copy(), end.shift.copy()
    reached = end.reached(rows)
    for model in np.unique(rows.model):
        own = np.flatnonzero(rows.model == model)
        if len(own) < OWN_SHARPNESS_ROWS:
            continue
        factors[model] = calibrate.sharpness(logits[own], rows.length[own], edges, reached[own])
        found = softmax(logits[own] * factors[model], axis=1)
        shifts[model] = calibrate.shift_of(found, rows.length[own], edges, reached[own])
    return end._replace(sharpness=factors, shift=shifts)


def _crossed(lesson: Lesson, rows: Outcomes, steps: int) -> NDArray[np.float64]:
    """Logits of each row by a head that learned from the other prompts' rows."""
    if steps == 0:
        return lesson.begin.logits(rows)
    logits = np.empty((len(rows.length), len(lesson.edges) - 1))
    for fold in range(FOLDS):
        own = rows.prompt % FOLDS == fold
        head = lesson.tuned(rows.taken(~own), steps)
        logits[own] = lesson.begin._replace(head=head).logits(rows.taken(own))
    return logits


def joined(first: Outcomes, second: Outcomes) -> Outcomes:
    return Outcomes(
        np.concatenate([first.inputs, second.inputs]),
        np.concatenate([first.prompt, second.prompt + len(first.inputs)]),
        np.concatenate([first.model, second.model]),
        np.concatenate([first.length, second.length]),
    )
