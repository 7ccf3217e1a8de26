"""What several teachers say together: with shares, and factors that sharpen or soften each, that do best on
prompts none of them was trained on.

Needs torch; training only.
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

LEAST_ROWS = 400
"""A served model with fewer on the calibration prompts shares its shares with the others of the kind."""
STEPS, RATE = 300, 0.03
PRIOR = 0.002
"""How strongly shares stay even and factors 1 where the outcomes say little."""
CHUNK_ROWS = 1 << 16
TINY = 1e-6


@dataclass(frozen=True, slots=True)
class Mixture:
    """For each teacher and group of served models, the logit of its share and the log of its factor."""

    share: Tensor
    factor: Tensor
    group: Tensor
    """Of each model `[models]`."""

    def of(self, said: Tensor, model: Tensor, among: Tensor | None = None) -> Tensor:
        """Probabilities `[rows, ranges]` from those of each teacher `[teachers, rows, ranges]`.

        `among` `[teachers, rows]` says which of them count for a row; where none does, the row is even.
        """
        group = self.group[model]
        sharpened = torch.softmax((said.float() + TINY).log() * self.factor[:, group, None].exp(), 2)
        share = self.share[:, group]
        if among is not None:
            share = share.masked_fill(~among, -1e9)
        return (sharpened * torch.softmax(share, 0)[..., None]).sum(0)

    def shares(self) -> list[list[float]]:
        """Of each teacher, in each group `[groups, teachers]`."""
        share = torch.softmax(self.share, 0).T
        return [[round(each, 3) for each in group] for group in share.tolist()]


def fit(
    said: Sequence[NDArray[np.float16]], data: TrainingArrays, edges: tuple[int, ...], device: str = "cpu"
) -> Mixture:
    """Shares and factors of least log loss on the calibration prompts; even ones where there are none."""
    rows, teachers = data.rows(CALIBRATION), len(said)
    group = _groups(data.model[rows], len(data.models))
    shape = (teachers, int(group.max()) + 1)
    share, factor = (torch.zeros(shape, device=device, requires_grad=True) for _ in range(2))
    mixture = Mixture(share, factor, torch.tensor(group, device=device))
    if teachers > 1 and len(rows):
        counts = np.bincount(data.prompt[rows])[data.prompt[rows]]
        weight = torch.tensor(1 / np.sqrt(counts), device=device, dtype=torch.float32)
        label = torch.tensor(range_index(data.length[rows], edges), device=device)[:, None]
        known = torch.tensor(np.stack([each[rows] for each in said]), device=device)
        model = torch.tensor(data.model[rows], device=device)
        optimizer = torch.optim.Adam([share, factor], lr=RATE)
        for _ in range(STEPS):
            right = mixture.of(known, model).gather(1, label)[:, 0]
            loss = -((right + TINY).log() * weight).sum() / weight.sum()
            loss = loss + PRIOR * ((share**2).mean() + (factor**2).mean())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return Mixture(share.detach(), factor.detach(), mixture.group)


def targets(
    mixture: Mixture,
    said: Sequence[NDArray[np.float16]],
    data: TrainingArrays,
    unread: Sequence[NDArray[np.bool_]],
    unread_share: float,
) -> NDArray[np.float16]:
    """What all rows are forecast as `[rows, ranges]`.

    Those of a training prompt that some teachers left out are, by `unread_share`, what only these say.
    """
    found = np.empty_like(said[0])
    device = mixture.share.device
    left_out = np.stack(unread)
    for rows in np.split(np.arange(len(found)), range(CHUNK_ROWS, len(found), CHUNK_ROWS)):
        known = torch.tensor(np.stack([each[rows] for each in said]), device=device)
        model = torch.tensor(data.model[rows], device=device)
        among = torch.tensor(left_out[:, data.prompt[rows]] & (data.part[rows] == TRAIN), device=device)
        share = unread_share * among.any(0).float()[:, None]
        both = share * mixture.of(known, model, among) + (1.0 - share) * mixture.of(known, model)
        found[rows] = both.half().cpu().numpy()
    return found


def _groups(model: NDArray[np.int64], models: int) -> NDArray[np.int64]:
    """The group of each model: one for those with few answers together, one for each of the others."""
    many = np.bincount(model, minlength=models) >= LEAST_ROWS
    groups: NDArray[np.int64] = np.where(many, np.cumsum(many), 0)
    return groups
