"""Train an encoder on the texts of answers, in addition to their lengths.

Before training on lengths: masked-language modelling of prompts with the beginnings of their answers. During
training on lengths: prediction of an answer's shape and first words. Requires torch. Used in training only.
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
class MaskedLMConfig:
    """Hyperparameters of masked-language modelling. The card of an artifact stores the fields by name."""

    epochs: int = 3
    batch_rows: int = 256
    rate: float = 3e-4
    """Maximum learning rate."""
    warm_share: float = 0.06
    """Share of the steps in which the learning rate increases."""
    share: float = 0.25
    """Share of the pieces that are masked."""
    seed: int = 1


def train_masked_lm(
    encoder: nn.Module, data: TrainingArrays, answers: Answers, config: MaskedLMConfig, device: str
) -> float:
    """Train a BERT-like encoder on masked pieces. Return the loss of the last batch in nats per piece."""
    torch.manual_seed(config.seed)
    width = encoder.config.hidden_size
    lm_head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)).to(device)
    table = encoder.to(device).train().embeddings.word_embeddings.weight
    rows = data.rows(TRAIN)
    rows = rows[answers.of_row[rows] >= 0]
    steps = config.epochs * -(-len(rows) // config.batch_rows)
    parameters = [*encoder.parameters(), *lm_head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=config.rate, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.rate, total_steps=steps + 1, pct_start=config.warm_share
    )
    mask, loss = data.vocabulary.index(MASK), torch.zeros(())
    for pieces, segment in _segment_pairs(data, answers, rows, config, device):
        masked = (torch.rand(pieces.shape, device=device) < config.share) & (pieces != 0)
        with torch.autocast(pieces.device.type, torch.bfloat16, enabled=pieces.is_cuda):
            inputs = pieces.masked_fill(masked, mask)
            states = encoder(inputs, (pieces != 0).long(), segment).last_hidden_state[masked]
            logits = lm_head(states) @ table.T
        loss = functional.cross_entropy(logits.float(), pieces[masked])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        scheduler.step()
    return float(loss.detach())


def _segment_pairs(
    data: TrainingArrays, answers: Answers, rows: NDArray[np.int64], config: MaskedLMConfig, device: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of prompts with their answers' first pieces, and the segment (0 or 1) of each piece."""
    random = np.random.default_rng(config.seed)
    for _ in range(config.epochs):
        shuffled = random.permutation(rows)
        for chosen in np.split(shuffled, range(config.batch_rows, len(rows), config.batch_rows)):
            prompts = data.pieces[data.prompt[chosen], :PROMPT_PIECES]
            prompts = prompts[:, : (prompts != 0).sum(1).max()]
            prefix = answers.prefix[answers.of_row[chosen]]
            segment = np.repeat([[0], [1]], (prompts.shape[1], prefix.shape[1])).reshape(1, -1)
            pieces = torch.tensor(np.concatenate([prompts, prefix], axis=1), device=device)
            yield pieces, torch.tensor(segment, device=device).expand(len(pieces), -1)


class AuxiliaryTask(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Base class of tasks that a net learns from the texts of answers, in addition to lengths."""

    def encode(
        self, net: LengthNet, pieces: Tensor, owner: Tensor, rows: Tensor, served: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the encoded prompts `[prompts, width]` and the loss of the task in nats.

        Row i has the prompt `pieces[owner[i]]`, the index `rows[i]` in all rows, and the model `served[i]`.
        """
        raise NotImplementedError


class AnswerTask(AuxiliaryTask):
    """Predict the shape and first words of an answer from the encoded prompt and the answering model."""

    def __init__(self, answers: Answers, width: int, models: int, vocabulary: int) -> None:
        super().__init__()
        self.models = nn.Embedding(models, MODEL_WIDTH)
        self.hidden = nn.Linear(width + MODEL_WIDTH, HIDDEN)
        self.shape = nn.Linear(HIDDEN, len(SHAPES) * OCTAVES)
        self.words = nn.Linear(HIDDEN, vocabulary)
        for name in ("of_row", "prefix", "shape"):
            self.register_buffer(f"answers_{name}", torch.tensor(getattr(answers, name)))

    def encode(
        self, net: LengthNet, pieces: Tensor, owner: Tensor, rows: Tensor, served: Tensor
    ) -> tuple[Tensor, Tensor]:
        encoded = net.encode(pieces)
        return encoded, self(encoded, owner, rows, served)

    def forward(self, encoded: Tensor, owner: Tensor, rows: Tensor, served: Tensor) -> Tensor:
        """Return the mean loss in nats over rows with a known answer. Row i has the prompt `owner[i]`."""
        answer = self.answers_of_row[rows]
        known = (answer >= 0).nonzero()[:, 0]
        if not len(known):
            return encoded.new_zeros(())
        inputs = torch.cat([encoded[owner[known]], self.models(served[known])], 1)
        hidden = torch.relu(self.hidden(inputs))
        shape, prefix = self.answers_shape[answer[known]], self.answers_prefix[answer[known]]
        shape_loss = functional.cross_entropy(self.shape(hidden).unflatten(1, (OCTAVES, -1)), shape)
        log_probabilities = torch.log_softmax(self.words(hidden), 1).gather(1, prefix)
        mask = prefix != 0
        loss: Tensor = shape_loss - (log_probabilities * mask).sum() / mask.sum().clamp_min(1)
        return loss
