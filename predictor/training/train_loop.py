"""Learning: batches of prompts with some of their rows, from outcomes, from a teacher, or from both.

Needs torch; training only.
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
from predictor.training.auxiliary_tasks import Beside
from predictor.training.length_head import UNKNOWN_MODEL
from predictor.training.networks import LengthNet
from predictor.wordpiece import MAX_PIECES, PAD_MULTIPLE, UNKNOWN

Progress = Callable[[str], None]
AVERAGED_FROM = 0.3
SORTED_BATCHES = 32
"""So many batches are shuffled together, then sorted by length, so that little of a batch is padding."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a net learns."""

    epochs: int
    batch_prompts: int
    body_rate: float
    head_rate: float
    rows_per_prompt: int = 6
    visits: int = 1
    """How often an epoch comes to a prompt that was answered; to one that nobody answered it comes once."""
    weight_decay: float = 0.01
    warm_share: float = 0.06
    spread_octaves: float = 0.25
    unknown_share: float = 0.1
    side_noise: float = 0.05
    piece_dropout: float = 0.0
    """Share of the pieces that are shown as unknown."""
    teacher_share: float = 0.0
    """Of the target of a row that was answered; a row that nobody answered is all the teacher's."""
    match: float = 0.0
    """What it weighs to be able to tell, from what the body reads, what the teachers' bodies read."""
    beside: float = 0.1
    """What it weighs to tell more of an answer, where their texts are known."""
    moved_share: float = 0.0
    """Share of the batches whose texts begin a few places later, so that other neighbours are merged."""
    averaged: float = 0.0
    """How much of the running mean of the weights stays at each step; 0 takes the last weights."""
    seed: int = 7


class Taught(NamedTuple):
    """What teachers say of every row `[rows, ranges]`, and what they read of every prompt, standardised."""

    probabilities: NDArray[np.float16]
    reads: NDArray[np.float16]


class Drawn(NamedTuple):
    """One batch: prompts, its rows (places in the chosen rows), the prompt of each row and its weight."""

    prompts: NDArray[np.int64]
    rows: NDArray[np.int64]
    owner: NDArray[np.int64]
    weight: NDArray[np.float32]
    longest: int


class Draw:
    """Draws batches of prompts and up to so many rows of each."""

    def __init__(
        self,
        pieces: NDArray[np.int64],
        prompt: NDArray[np.int64],
        rows: NDArray[np.int64],
        recipe: Recipe,
        visits: NDArray[np.int64] | int = 1,
    ) -> None:
        """`pieces` are of prompts, `prompt` and `visits` (times that an epoch draws its prompt) of rows."""
        self._order = rows[np.argsort(prompt[rows], kind="stable")]
        self.prompts, self._starts, self._counts = np.unique(
            prompt[self._order], return_index=True, return_counts=True
        )
        self._lengths = (pieces[self.prompts] != 0).sum(1)
        often = np.broadcast_to(visits, prompt.shape)[self._order[self._starts]]
        self._visited = np.repeat(np.arange(len(self.prompts)), often)
        self._recipe = recipe
        self._random = np.random.default_rng(recipe.seed)

    @property
    def batches(self) -> int:
        return -(-len(self._visited) // self._recipe.batch_prompts)

    def epoch(self) -> Iterator[Drawn]:
        size = self._recipe.batch_prompts
        shuffled = self._random.permutation(self._visited)
        chunks = np.split(shuffled, range(size * SORTED_BATCHES, len(shuffled), size * SORTED_BATCHES))
        batches = []
        for chunk in chunks:
            by_length = chunk[np.argsort(self._lengths[chunk], kind="stable")]
            batches += np.split(by_length, range(size, len(by_length), size))
        for index in self._random.permutation(len(batches)):
            yield self._drawn(batches[index])

    def _drawn(self, chosen: NDArray[np.int64]) -> Drawn:
        most = self._recipe.rows_per_prompt
        counts = self._counts[chosen][:, None]
        any_row = self._random.integers(0, counts, (len(chosen), most))
        offset = np.where(counts > most, any_row, np.arange(most)[None, :])
        owner, column = np.nonzero(np.arange(most)[None, :] < counts)
        rows = self._order[self._starts[chosen][owner] + offset[owner, column]]
        weight = 1.0 / np.sqrt(np.minimum(counts[owner, 0], most))
        longest = int(self._lengths[chosen].max())
        return Drawn(self.prompts[chosen], rows, owner, weight.astype(np.float32), longest)


class Descent:
    """Follows the clipped gradient of a loss, at rates that rise and fall once over a recipe's epochs."""

    def __init__(
        self,
        groups: Sequence[tuple[list[torch.Tensor], float]],
        batches: int,
        recipe: Recipe,
        clipped: Iterable[torch.Tensor],
    ) -> None:
        """`groups` of weights with their highest rates; `clipped` are those whose gradient is kept short."""
        self._clipped = list(clipped)
        rated = [{"params": weights, "lr": rate} for weights, rate in groups]
        fused = self._clipped[0].is_cuda
        self._optimizer = torch.optim.AdamW(rated, weight_decay=recipe.weight_decay, fused=fused)
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(
            self._optimizer,
            [rate for _, rate in groups],
            total_steps=recipe.epochs * batches + 1,
            pct_start=recipe.warm_share,
        )

    def step(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss without what led to it."""
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self._clipped, 1.0)
        self._optimizer.step()
        self._schedule.step()
        return loss.detach()


def fit(
    net: LengthNet,
    data: TrainingArrays,
    rows: NDArray[np.int64],
    edges: tuple[int, ...],
    recipe: Recipe,
    *,
    taught: Taught | None = None,
    beside: Beside | None = None,
    device: str = "cpu",
    progress: Progress = lambda _: None,
) -> LengthNet:
    """Trains a net on some rows, and to do as its teachers did where there are any."""
    torch.manual_seed(recipe.seed)
    net.to(device).train()
    visits = np.where(data.length > 0, recipe.visits, 1)
    draw = Draw(data.pieces, data.prompt, rows, recipe, visits)
    matching = None if taught is None or not recipe.match else _Matching(net.body.width, taught.reads, device)
    tasks = [task.to(device) for task in (matching, beside) if task is not None]
    head = [weight for part in (net.head, *tasks) for weight in part.parameters()]
    groups = [(list(net.body.parameters()), recipe.body_rate), (head, recipe.head_rate)]
    descent = Descent(groups, draw.batches, recipe, net.parameters())
    pieces = torch.tensor(data.pieces, device=device)
    unknown_piece = data.vocabulary.index(UNKNOWN) if recipe.piece_dropout else 0
    side = torch.tensor(data.side, device=device)
    noise = recipe.side_noise / net.head.scale[net.body.width :]
    model = torch.tensor(data.model, device=device)
    target = _targets(data, edges, recipe, None if taught is None else taught.probabilities, device)
    mean = _RunningMean(net, recipe.averaged, int(AVERAGED_FROM * recipe.epochs * draw.batches))
    for epoch in range(recipe.epochs):
        total = torch.zeros((), device=device)
        for drawn in draw.epoch():
            prompts, chosen, owner, weight = (
                torch.from_numpy(each).to(device, non_blocking=True) for each in drawn[:4]
            )
            shown = side[prompts] + noise * torch.randn(len(prompts), side.shape[1], device=device)
            forget = torch.rand(len(chosen), device=device) < recipe.unknown_share
            served = model[chosen].masked_fill(forget, UNKNOWN_MODEL)
            text = _blotted(pieces[prompts, : drawn.longest], unknown_piece, recipe.piece_dropout)
            text = _moved(text, recipe.moved_share)
            if beside is None:
                read, more = net.read(text), torch.zeros((), device=device)
            else:
                read, more = beside.read(net, text, owner, chosen, served)
            logits = net.told(read, shown, owner, served)
            losses = functional.cross_entropy(logits, target[chosen].float(), reduction="none")
            loss = (losses * weight).sum() / weight.sum() + recipe.beside * more
            if matching is not None:
                loss = loss + recipe.match * matching(read, prompts)
            total += descent.step(loss)
            mean.step()
        progress(f"epoch {epoch + 1}/{recipe.epochs}: loss {total.item() / draw.batches:.4f}")
    mean.take()
    net.eval()
    return net


class _RunningMean:
    """The mean of a net's weights over the later steps, which forecasts better than the last of them."""

    def __init__(self, net: LengthNet, kept: float, after: int) -> None:
        self._weights, self._kept, self._wait = list(net.parameters()), kept, after
        self._mean: list[torch.Tensor] = []

    def step(self) -> None:
        self._wait -= 1
        if self._kept == 0.0 or self._wait > 0:
            return
        with torch.no_grad():
            if not self._mean:
                self._mean = [each.detach().clone() for each in self._weights]
            torch._foreach_lerp_(self._mean, self._weights, 1.0 - self._kept)

    def take(self) -> None:
        """Puts the mean in the place of the weights."""
        with torch.no_grad():
            for weight, mean in zip(self._weights, self._mean, strict=False):
                weight.copy_(mean)


class _Matching(nn.Module):  # type: ignore[misc]
    """How far off a linear guess of what the teachers read is, in squared standard deviations."""

    def __init__(self, width: int, reads: NDArray[np.float16], device: str) -> None:
        super().__init__()
        self.guess = nn.Linear(width, reads.shape[1]).to(device)
        self.reads = torch.tensor(reads, device=device)

    def forward(self, read: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.guess(read), self.reads[prompts].float())


def _moved(text: torch.Tensor, share: float) -> torch.Tensor:
    """Sometimes a batch whose texts begin a few places later."""
    if share == 0.0 or torch.rand(()).item() >= share:
        return text
    places = int(torch.randint(1, PAD_MULTIPLE, ()).item())
    return functional.pad(text, (places, 0))[:, :MAX_PIECES]


def _blotted(pieces: torch.Tensor, unknown: int, share: float) -> torch.Tensor:
    """Some of the pieces made unknown; padding stays padding."""
    if share == 0.0:
        return pieces
    lost = (torch.rand(pieces.shape, device=pieces.device) < share) & (pieces != 0)
    return pieces.masked_fill(lost, unknown)


def _targets(
    data: TrainingArrays,
    edges: tuple[int, ...],
    recipe: Recipe,
    taught: NDArray[np.float16] | None,
    device: str,
) -> torch.Tensor:
    """What each row of the data is to be forecast as `[rows, ranges]`."""
    answered = np.flatnonzero(data.length > 0)
    own = soft_targets(data.length[answered], edges, recipe.spread_octaves)
    if taught is None:
        target = np.zeros((len(data.length), len(edges) - 1), dtype=np.float16)
        target[answered] = own
    else:
        target = taught.copy()
        share = recipe.teacher_share
        target[answered] = ((1.0 - share) * own + share * taught[answered]).astype(np.float16)
    return torch.tensor(target, device=device)


def inputs_of(
    net: LengthNet,
    data: TrainingArrays,
    prompt: NDArray[np.int64],
    *,
    device: str = "cpu",
    batch_prompts: int = 512,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """(what the head sees of each distinct prompt `[distinct, inputs]`, which of them each prompt is)."""
    net.to(device).eval()
    prompts, owner = np.unique(prompt, return_inverse=True)
    lengths = (data.pieces[prompts] != 0).sum(1)
    read = np.zeros((len(prompts), net.body.width), dtype=np.float32)
    by_length = np.argsort(lengths, kind="stable")
    with torch.no_grad():
        for chunk in np.split(by_length, range(batch_prompts, len(by_length), batch_prompts)):
            shown = torch.tensor(data.pieces[prompts[chunk], : lengths[chunk].max()], device=device)
            with torch.autocast(shown.device.type, torch.bfloat16, enabled=shown.is_cuda):
                read[chunk] = net.body(shown).float().cpu().numpy()
    return np.concatenate([read, data.side[prompts]], axis=1), owner


def logits_of(
    net: LengthNet, data: TrainingArrays, rows: NDArray[np.int64], *, device: str = "cpu"
) -> NDArray[np.float32]:
    """Logits `[rows, ranges]`; each prompt is read once."""
    inputs, owner = inputs_of(net, data, data.prompt[rows], device=device)
    known, model = torch.tensor(inputs, device=device), data.model[rows]
    logits = np.zeros((len(rows), net.head.last.out_features), dtype=np.float32)
    with torch.no_grad():
        for part in np.split(np.arange(len(rows)), range(8192, len(rows), 8192)):
            where, served = (torch.tensor(each[part], device=device) for each in (owner, model))
            logits[part] = net.head(known[where], served).cpu().numpy()
    return logits
