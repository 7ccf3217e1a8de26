"""The training loop: fit a text encoder with a head to outcomes, to teachers' forecasts, or to both.

A batch consists of prompts, each with some of its rows. Requires torch. Used in training only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from predictor.data.labels import soft_targets
from predictor.data.prepare import TrainingArrays
from predictor.training.auxiliary_tasks import AuxiliaryTask
from predictor.training.length_head import UNKNOWN_MODEL
from predictor.training.networks import LengthNet
from predictor.wordpiece import MAX_PIECES, PAD_MULTIPLE, UNKNOWN

Progress = Callable[[str], None]
AVERAGED_FROM = 0.3
"""Averaging of the weights starts after this share of the steps."""
BATCHES_PER_SORT = 32
"""The number of shuffled batches that are sorted by length together, which reduces padding."""


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Hyperparameters of a training run. The card of an artifact stores the fields by name."""

    epochs: int
    batch_prompts: int
    body_rate: float
    """Maximum learning rate of the encoder."""
    head_rate: float
    """Maximum learning rate of the head and of auxiliary tasks."""
    rows_per_prompt: int = 6
    visits: int = 1
    """How often an epoch draws an answered prompt. Unanswered prompts are drawn once."""
    weight_decay: float = 0.01
    warm_share: float = 0.06
    """Share of the steps in which the learning rate increases."""
    spread_octaves: float = 0.25
    """Standard deviation of the soft targets over log2 length."""
    unknown_share: float = 0.1
    """Share of the rows whose model is replaced by UNKNOWN_MODEL."""
    side_noise: float = 0.05
    """Standard deviation of the noise on side features, in units of each feature's standard deviation."""
    piece_dropout: float = 0.0
    """Share of the pieces that are replaced by the unknown piece."""
    teacher_share: float = 0.0
    """Share of the teachers in the target of an answered row. The target of an unanswered row is theirs."""
    match: float = 0.0
    """Weight of the feature-matching loss, of predicting the teachers' features from the encoder's output."""
    beside: float = 0.1
    """Weight of the loss of the auxiliary task, if there is one."""
    moved_share: float = 0.0
    """Share of the batches that are shifted by a few positions, which changes the merged neighbours."""
    averaged: float = 0.0
    """Decay per step of the running mean of the weights. 0 disables averaging."""
    seed: int = 7


class TeacherTargets(NamedTuple):
    """The teachers' forecast of every row `[rows, ranges]`, and standardised features of every prompt."""

    probabilities: NDArray[np.float16]
    features: NDArray[np.float16]


class Batch(NamedTuple):
    """Prompts, some of their rows, and for each row the index of its prompt in the batch and its weight."""

    prompts: NDArray[np.int64]
    rows: NDArray[np.int64]
    owner: NDArray[np.int64]
    weight: NDArray[np.float32]
    longest: int
    """The number of pieces of the longest prompt."""


class BatchSampler:
    """Draw batches of prompts with up to `rows_per_prompt` rows each."""

    def __init__(
        self,
        pieces: NDArray[np.int64],
        prompt: NDArray[np.int64],
        rows: NDArray[np.int64],
        config: TrainConfig,
        visits: NDArray[np.int64] | int = 1,
    ) -> None:
        """Draw from `rows`. `pieces` is `[prompts, width]`, `prompt` `[all rows]` the prompt of each row, and
        `visits` `[all rows]` the number of times an epoch draws that prompt.
        """
        self._order = rows[np.argsort(prompt[rows], kind="stable")]
        self.prompts, self._starts, self._counts = np.unique(
            prompt[self._order], return_index=True, return_counts=True
        )
        self._lengths = (pieces[self.prompts] != 0).sum(1)
        repeats = np.broadcast_to(visits, prompt.shape)[self._order[self._starts]]
        self._visited = np.repeat(np.arange(len(self.prompts)), repeats)
        self._config = config
        self._random = np.random.default_rng(config.seed)

    @property
    def batches(self) -> int:
        """The number of batches per epoch."""
        return -(-len(self._visited) // self._config.batch_prompts)

    def epoch(self) -> Iterator[Batch]:
        """Yield the batches of one epoch, in random order."""
        size = self._config.batch_prompts
        shuffled = self._random.permutation(self._visited)
        chunks = np.split(shuffled, range(size * BATCHES_PER_SORT, len(shuffled), size * BATCHES_PER_SORT))
        batches = []
        for chunk in chunks:
            by_length = chunk[np.argsort(self._lengths[chunk], kind="stable")]
            batches += np.split(by_length, range(size, len(by_length), size))
        for index in self._random.permutation(len(batches)):
            yield self._sample_rows(batches[index])

    def _sample_rows(self, chosen: NDArray[np.int64]) -> Batch:
        limit = self._config.rows_per_prompt
        counts = self._counts[chosen][:, None]
        any_row = self._random.integers(0, counts, (len(chosen), limit))
        offset = np.where(counts > limit, any_row, np.arange(limit)[None, :])
        owner, column = np.nonzero(np.arange(limit)[None, :] < counts)
        rows = self._order[self._starts[chosen][owner] + offset[owner, column]]
        weight = 1.0 / np.sqrt(np.minimum(counts[owner, 0], limit))
        longest = int(self._lengths[chosen].max())
        return Batch(self.prompts[chosen], rows, owner, weight.astype(np.float32), longest)


class ScheduledOptimizer:
    """AdamW with gradient clipping and a one-cycle learning rate over all epochs of a run."""

    def __init__(
        self,
        groups: Sequence[tuple[list[torch.Tensor], float]],
        batches: int,
        config: TrainConfig,
        clipped: Iterable[torch.Tensor],
    ) -> None:
        """`groups` pairs weights with their maximum rate. The gradient norm of `clipped` is limited to 1."""
        self._clipped = list(clipped)
        fused = self._clipped[0].is_cuda
        parameters = [{"params": weights, "lr": rate} for weights, rate in groups]
        self._optimizer = torch.optim.AdamW(parameters, weight_decay=config.weight_decay, fused=fused)
        self._scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self._optimizer,
            [rate for _, rate in groups],
            total_steps=config.epochs * batches + 1,
            pct_start=config.warm_share,
        )

    def step(self, loss: torch.Tensor) -> torch.Tensor:
        """Take an optimizer step. Return the loss, detached from its graph."""
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self._clipped, 1.0)
        self._optimizer.step()
        self._scheduler.step()
        return loss.detach()


def fit(
    net: LengthNet,
    data: TrainingArrays,
    rows: NDArray[np.int64],
    edges: tuple[int, ...],
    config: TrainConfig,
    *,
    teachers: TeacherTargets | None = None,
    auxiliary: AuxiliaryTask | None = None,
    device: str = "cpu",
    progress: Progress = lambda _: None,
) -> LengthNet:
    """Train a net on `rows`, with the forecasts and features of `teachers` as further targets if given."""
    torch.manual_seed(config.seed)
    net.to(device).train()
    visits = np.where(data.length > 0, config.visits, 1)
    sampler = BatchSampler(data.pieces, data.prompt, rows, config, visits)
    matching = None
    if teachers is not None and config.match:
        matching = _FeatureMatching(net.body.width, teachers.features, device)
    tasks = [task.to(device) for task in (matching, auxiliary) if task is not None]
    optimizer = _optimizer(net, tasks, sampler.batches, config)
    pieces, side, model = (torch.tensor(each, device=device) for each in (data.pieces, data.side, data.model))
    unknown_piece = data.vocabulary.index(UNKNOWN) if config.piece_dropout else 0
    noise = config.side_noise / net.head.scale[net.body.width :]
    target = _targets(data, edges, config, None if teachers is None else teachers.probabilities, device)
    average = _WeightAverage(net, config.averaged, int(AVERAGED_FROM * config.epochs * sampler.batches))
    for epoch in range(config.epochs):
        total = torch.zeros((), device=device)
        for batch in sampler.epoch():
            prompts, chosen, owner, weight = (
                torch.from_numpy(each).to(device, non_blocking=True) for each in batch[:4]
            )
            features = side[prompts] + noise * torch.randn(len(prompts), side.shape[1], device=device)
            masked = torch.rand(len(chosen), device=device) < config.unknown_share
            served = model[chosen].masked_fill(masked, UNKNOWN_MODEL)
            text = _augment(pieces[prompts, : batch.longest], unknown_piece, config)
            encoded, auxiliary_loss = _encode(net, auxiliary, text, owner, chosen, served)
            logits = net.predict(encoded, features, owner, served)
            losses = functional.cross_entropy(logits, target[chosen].float(), reduction="none")
            loss = (losses * weight).sum() / weight.sum() + config.beside * auxiliary_loss
            if matching is not None:
                loss = loss + config.match * matching(encoded, prompts)
            total += optimizer.step(loss)
            average.step()
        progress(f"epoch {epoch + 1}/{config.epochs}: loss {total.item() / sampler.batches:.4f}")
    average.apply()
    net.eval()
    return net


def _optimizer(
    net: LengthNet, tasks: Sequence[nn.Module], batches: int, config: TrainConfig
) -> ScheduledOptimizer:
    """Return an optimizer with one rate for the encoder, and one for the head and the auxiliary tasks."""
    head = [weight for part in (net.head, *tasks) for weight in part.parameters()]
    groups = [(list(net.body.parameters()), config.body_rate), (head, config.head_rate)]
    return ScheduledOptimizer(groups, batches, config, net.parameters())


def _encode(  # noqa: PLR0917 - private, and called once
    net: LengthNet,
    auxiliary: AuxiliaryTask | None,
    text: torch.Tensor,
    owner: torch.Tensor,
    rows: torch.Tensor,
    served: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the encoded prompts and the loss of the auxiliary task, 0 without one."""
    if auxiliary is None:
        return net.encode(text), torch.zeros((), device=text.device)
    return auxiliary.encode(net, text, owner, rows, served)


class _WeightAverage:
    """Running mean of the weights of a net over the later steps, more accurate than the last weights."""

    def __init__(self, net: LengthNet, decay: float, after: int) -> None:
        self._weights, self._decay, self._wait = list(net.parameters()), decay, after
        self._mean: list[torch.Tensor] = []

    def step(self) -> None:
        self._wait -= 1
        if self._decay == 0.0 or self._wait > 0:
            return
        with torch.no_grad():
            if not self._mean:
                self._mean = [each.detach().clone() for each in self._weights]
            torch._foreach_lerp_(self._mean, self._weights, 1.0 - self._decay)

    def apply(self) -> None:
        """Replace the weights by their mean."""
        with torch.no_grad():
            for weight, mean in zip(self._weights, self._mean, strict=False):
                weight.copy_(mean)


class _FeatureMatching(nn.Module):  # type: ignore[misc]
    """Mean squared error of the linear prediction of the teachers' standardised features."""

    def __init__(self, width: int, features: NDArray[np.float16], device: str) -> None:
        super().__init__()
        self.predict = nn.Linear(width, features.shape[1]).to(device)
        self.features = torch.tensor(features, device=device)

    def forward(self, encoded: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.predict(encoded), self.features[prompts].float())


def _augment(text: torch.Tensor, unknown_piece: int, config: TrainConfig) -> torch.Tensor:
    """Replace random pieces by the unknown piece, and shift random batches by a few positions.

    Padding is not replaced.
    """
    if config.piece_dropout:
        dropped = (torch.rand(text.shape, device=text.device) < config.piece_dropout) & (text != 0)
        text = text.masked_fill(dropped, unknown_piece)
    if config.moved_share and torch.rand(()).item() < config.moved_share:
        places = int(torch.randint(1, PAD_MULTIPLE, ()).item())
        text = functional.pad(text, (places, 0))[:, :MAX_PIECES]
    return text


def _targets(
    data: TrainingArrays,
    edges: tuple[int, ...],
    config: TrainConfig,
    teachers: NDArray[np.float16] | None,
    device: str,
) -> torch.Tensor:
    """Return the target distribution of each row `[rows, ranges]`."""
    answered = np.flatnonzero(data.length > 0)
    outcomes = soft_targets(data.length[answered], edges, config.spread_octaves)
    if teachers is None:
        target = np.zeros((len(data.length), len(edges) - 1), dtype=np.float16)
        target[answered] = outcomes
    else:
        target = teachers.copy()
        share = config.teacher_share
        target[answered] = ((1.0 - share) * outcomes + share * teachers[answered]).astype(np.float16)
    return torch.tensor(target, device=device)


def head_inputs(
    net: LengthNet,
    data: TrainingArrays,
    prompt: NDArray[np.int64],
    *,
    device: str = "cpu",
    batch_prompts: int = 512,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the head inputs of distinct prompts `[distinct, inputs]`, and the row of each prompt in them."""
    net.to(device).eval()
    prompts, owner = np.unique(prompt, return_inverse=True)
    lengths = (data.pieces[prompts] != 0).sum(1)
    encoded = np.zeros((len(prompts), net.body.width), dtype=np.float32)
    by_length = np.argsort(lengths, kind="stable")
    with torch.no_grad():
        for chunk in np.split(by_length, range(batch_prompts, len(by_length), batch_prompts)):
            pieces = torch.tensor(data.pieces[prompts[chunk], : lengths[chunk].max()], device=device)
            encoded[chunk] = net.encode(pieces).cpu().numpy()
    return np.concatenate([encoded, data.side[prompts]], axis=1), owner


def predict_logits(
    net: LengthNet, data: TrainingArrays, rows: NDArray[np.int64], *, device: str = "cpu"
) -> NDArray[np.float32]:
    """Return logits `[rows, ranges]`. Encodes each prompt once."""
    inputs, owner = head_inputs(net, data, data.prompt[rows], device=device)
    features, model = torch.tensor(inputs, device=device), data.model[rows]
    logits = np.zeros((len(rows), net.head.last.out_features), dtype=np.float32)
    with torch.no_grad():
        for part in np.split(np.arange(len(rows)), range(8192, len(rows), 8192)):
            prompts, models = (torch.tensor(each[part], device=device) for each in (owner, model))
            logits[part] = net.head(features[prompts], models).cpu().numpy()
    return logits
