"""What an encoder learns from the texts of answers, besides lengths: to fill in masked pieces of prompts and
of how their answers begin, before; to tell an answer's shape and first words, meanwhile.

Needs torch; training only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from predictor.data.answer_texts import OCTAVES, SHAPES, Answers
from predictor.data.prepare import TRAIN, TrainingArrays
from predictor.training.networks import LengthNet

MASK = "[MASK]"
PROMPT_PIECES = 64
MODEL_WIDTH = 24
HIDDEN = 384


@dataclass(frozen=True, slots=True)
class Masked:
    """How an encoder reads prompts with the beginnings of their answers before it learns lengths."""

    epochs: int = 3
    batch_rows: int = 256
    rate: float = 3e-4
    warm_share: float = 0.06
    share: float = 0.25
    seed: int = 1


def read_masked(
    encoder: nn.Module, data: TrainingArrays, answers: Answers, config: Masked, device: str
) -> float:
    """Teaches a BERT-like encoder its trade on these texts; returns the last batch's loss in nats a piece."""
    torch.manual_seed(config.seed)
    width = encoder.config.hidden_size
    guess = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)).to(device)
    table = encoder.to(device).train().embeddings.word_embeddings.weight
    rows = data.rows(TRAIN)
    rows = rows[answers.of_row[rows] >= 0]
    steps = config.epochs * -(-len(rows) // config.batch_rows)
    learning = [*encoder.parameters(), *guess.parameters()]
    optimizer = torch.optim.AdamW(learning, lr=config.rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.rate, total_steps=steps + 1, pct_start=config.warm_share
    )
    mask, loss = data.vocabulary.index(MASK), torch.zeros(())
    for pieces, second in _pairs(data, answers, rows, config, device):
        hidden = (torch.rand(pieces.shape, device=device) < config.share) & (pieces != 0)
        with torch.autocast(pieces.device.type, torch.bfloat16, enabled=pieces.is_cuda):
            shown = pieces.masked_fill(hidden, mask)
            states = encoder(shown, (pieces != 0).long(), second).last_hidden_state[hidden]
            logits = guess(states) @ table.T
        loss = functional.cross_entropy(logits.float(), pieces[hidden])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
    return float(loss.detach())


def _pairs(
    data: TrainingArrays, answers: Answers, rows: NDArray[np.int64], config: Masked, device: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of a prompt's pieces and its answer's first ones, and which of them are the answer's."""
    random = np.random.default_rng(config.seed)
    for _ in range(config.epochs):
        shuffled = random.permutation(rows)
        for chosen in np.split(shuffled, range(config.batch_rows, len(rows), config.batch_rows)):
            prompts = data.pieces[data.prompt[chosen], :PROMPT_PIECES]
            prompts = prompts[:, : (prompts != 0).sum(1).max()]
            first = answers.prefix[answers.of_row[chosen]]
            second = np.repeat([[0], [1]], (prompts.shape[1], first.shape[1])).reshape(1, -1)
            pieces = np.concatenate([prompts, first], axis=1)
            both = torch.tensor(pieces, device=device)
            yield both, torch.tensor(second, device=device).expand(len(both), -1)


class Beside(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """What a net learns besides lengths."""

    def read(
        self, net: LengthNet, pieces: Tensor, owner: Tensor, rows: Tensor, served: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What the body reads of each prompt, and the loss in nats of telling more of some rows' answers.

        Row i is of prompt `owner[i]` in `pieces`, and `rows[i]` among all rows; `served[i]` answers it.
        """
        raise NotImplementedError


class AnswerTask(Beside):
    """How badly an answer's shape and first words are told from what the body reads and who answers."""

    def __init__(self, answers: Answers, width: int, models: int, vocabulary: int) -> None:
        super().__init__()
        self.models = nn.Embedding(models, MODEL_WIDTH)
        self.hidden = nn.Linear(width + MODEL_WIDTH, HIDDEN)
        self.shape = nn.Linear(HIDDEN, len(SHAPES) * OCTAVES)
        self.words = nn.Linear(HIDDEN, vocabulary)
        for name in ("of_row", "prefix", "shape"):
            self.register_buffer(f"answers_{name}", torch.tensor(getattr(answers, name)))

    def read(
        self, net: LengthNet, pieces: Tensor, owner: Tensor, rows: Tensor, served: Tensor
    ) -> tuple[Tensor, Tensor]:
        read = net.read(pieces)
        return read, self(read, owner, rows, served)

    def forward(self, read: Tensor, owner: Tensor, rows: Tensor, served: Tensor) -> Tensor:
        """Mean loss in nats of the rows whose answer is known; row i is of prompt `owner[i]` in `read`."""
        answer = self.answers_of_row[rows]
        known = (answer >= 0).nonzero()[:, 0]
        if not len(known):
            return read.new_zeros(())
        inputs = torch.cat([read[owner[known]], self.models(served[known])], 1)
        hidden = torch.relu(self.hidden(inputs))
        shape, first = self.answers_shape[answer[known]], self.answers_prefix[answer[known]]
        told = functional.cross_entropy(self.shape(hidden).unflatten(1, (OCTAVES, -1)), shape)
        words = torch.log_softmax(self.words(hidden), 1).gather(1, first)
        real = first != 0
        loss: Tensor = told - (words * real).sum() / real.sum().clamp_min(1)
        return loss
