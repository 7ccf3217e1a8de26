"""Combine the forecasts of several teachers as a mixture. The weight and temperature of each teacher are
fitted on prompts that no teacher was trained on.

Requires torch. Used in training only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from predictor.data.labels import range_index
from predictor.data.prepare import CALIBRATION, TRAIN, TrainingArrays

MIN_GROUP_ROWS = 400
"""Served models with fewer calibration rows share one group of mixture weights."""
STEPS, LEARNING_RATE = 300, 0.03
PENALTY = 0.002
"""Weight of the L2 penalty that shrinks towards equal weights and factors of 1."""
CHUNK_ROWS = 1 << 16
EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class TeacherMixture:
    """Logits of the mixture weights and logarithms of sharpness factors, each `[teachers, groups]`."""

    weight_logits: Tensor
    log_factors: Tensor
    group: Tensor
    """Group index of each model `[models]`."""

    def combine(self, forecasts: Tensor, model: Tensor, included: Tensor | None = None) -> Tensor:
        """Return probabilities `[rows, ranges]` from those of each teacher `[teachers, rows, ranges]`.

        `included` `[teachers, rows]` selects the teachers of each row. A row without any gets equal weights.
        """
        group = self.group[model]
        logits = (forecasts.float() + EPSILON).log() * self.log_factors[:, group, None].exp()
        weight_logits = self.weight_logits[:, group]
        if included is not None:
            weight_logits = weight_logits.masked_fill(~included, -1e9)
        return (torch.softmax(logits, 2) * torch.softmax(weight_logits, 0)[..., None]).sum(0)

    def weights(self) -> list[list[float]]:
        """Return the weight of each teacher in each group `[groups, teachers]`, rounded."""
        weights = torch.softmax(self.weight_logits, 0).T
        return [[round(each, 3) for each in group] for group in weights.tolist()]


def fit(
    forecasts: Sequence[NDArray[np.float16]],
    data: TrainingArrays,
    edges: tuple[int, ...],
    device: str = "cpu",
) -> TeacherMixture:
    """Fit the mixture with the least log loss on calibration prompts. Without prompts, weights are equal."""
    rows, teachers = data.rows(CALIBRATION), len(forecasts)
    group = _groups(data.model[rows], len(data.models))
    shape = (teachers, int(group.max()) + 1)
    weight_logits, log_factors = (torch.zeros(shape, device=device, requires_grad=True) for _ in range(2))
    mixture = TeacherMixture(weight_logits, log_factors, torch.tensor(group, device=device))
    if teachers > 1 and len(rows):
        counts = np.bincount(data.prompt[rows])[data.prompt[rows]]
        weight = torch.tensor(1 / np.sqrt(counts), device=device, dtype=torch.float32)
        label = torch.tensor(range_index(data.length[rows], edges), device=device)[:, None]
        stacked = torch.tensor(np.stack([each[rows] for each in forecasts]), device=device)
        model = torch.tensor(data.model[rows], device=device)
        optimizer = torch.optim.Adam([weight_logits, log_factors], lr=LEARNING_RATE)
        for _ in range(STEPS):
            likelihood = mixture.combine(stacked, model).gather(1, label)[:, 0]
            loss = -((likelihood + EPSILON).log() * weight).sum() / weight.sum()
            loss = loss + PENALTY * ((weight_logits**2).mean() + (log_factors**2).mean())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return TeacherMixture(weight_logits.detach(), log_factors.detach(), mixture.group)


def distillation_targets(
    mixture: TeacherMixture,
    forecasts: Sequence[NDArray[np.float16]],
    data: TrainingArrays,
    held_out: Sequence[NDArray[np.bool_]],
    held_out_share: float,
) -> NDArray[np.float16]:
    """Return the mixture's forecast of all rows `[rows, ranges]`.

    `held_out` has a mask `[prompts]` per teacher. For training prompts that some teachers held out, the
    mixture of these teachers has the share `held_out_share` of the forecast.
    """
    targets = np.empty_like(forecasts[0])
    device = mixture.weight_logits.device
    masks = np.stack(held_out)
    for rows in np.split(np.arange(len(targets)), range(CHUNK_ROWS, len(targets), CHUNK_ROWS)):
        stacked = torch.tensor(np.stack([each[rows] for each in forecasts]), device=device)
        model = torch.tensor(data.model[rows], device=device)
        included = torch.tensor(masks[:, data.prompt[rows]] & (data.part[rows] == TRAIN), device=device)
        share = held_out_share * included.any(0).float()[:, None]
        combined = share * mixture.combine(stacked, model, included)
        combined += (1.0 - share) * mixture.combine(stacked, model)
        targets[rows] = combined.half().cpu().numpy()
    return targets


def _groups(model: NDArray[np.int64], models: int) -> NDArray[np.int64]:
    """Return the group of each model: 0 for models with few rows, a separate one for each other model."""
    many = np.bincount(model, minlength=models) >= MIN_GROUP_ROWS
    groups: NDArray[np.int64] = np.where(many, np.cumsum(many), 0)
    return groups
