"""The length head: a small network that maps the inputs of a prompt and the served model to length ranges.

The lexical model is this head on lexical scores and dense features only. The neural models add the output of
a text encoder to the inputs. Requires torch. Used in training only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

Progress = Callable[[str], None]
UNKNOWN_MODEL = 0
"""Row of the model table for models that were not trained on, the average of models."""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Sizes and training hyperparameters. The card of an artifact stores the fields by name."""

    model_width: int = 24
    hidden: int = 128
    epochs: int = 6
    batch_rows: int = 1024
    learning_rate: float = 3e-3
    weight_decay: float = 1e-2
    hidden_dropout: float = 0.1
    input_noise: float = 0.05
    """Standard deviation of the noise on inputs, in units of each input's standard deviation."""
    unknown_share: float = 0.1
    """Share of the rows whose model is replaced by UNKNOWN_MODEL."""
    spread_octaves: float = 0.25
    """Standard deviation of the soft targets over log2 length."""
    seed: int = 7


class LengthHead(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Compute logits `[rows, ranges]` from inputs `[rows, inputs]` and rows of the model table `[rows]`."""

    def __init__(self, config: HeadConfig, inputs: int, models: int, ranges: int) -> None:
        super().__init__()
        self.models = nn.Embedding(models, config.model_width)
        nn.init.normal_(self.models.weight, std=0.1)
        self.first = nn.Linear(inputs + config.model_width, config.hidden)
        self.second = nn.Linear(config.hidden + config.model_width, config.hidden)
        self.last = nn.Linear(config.hidden + config.model_width, ranges)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.register_buffer("mean", torch.zeros(inputs))
        self.register_buffer("scale", torch.ones(inputs))

    def forward(self, inputs: Tensor, model: Tensor) -> Tensor:
        embedding = self.models(model)
        standardised = ((inputs - self.mean) * self.scale).clamp(-5.0, 5.0)
        hidden = self.dropout(torch.relu(self.first(torch.cat([standardised, embedding], 1))))
        hidden = self.dropout(torch.relu(self.second(torch.cat([hidden, embedding], 1))))
        logits: Tensor = self.last(torch.cat([hidden, embedding], 1))
        return logits


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Training rows. `prompt` indexes the inputs, `target` is `[rows, ranges]`."""

    prompt: NDArray[np.int64]
    model: NDArray[np.int64]
    target: NDArray[np.float32]
    weight: NDArray[np.float32]


def fit(
    inputs: NDArray[np.float32],
    rows: HeadRows,
    models: int,
    config: HeadConfig,
    progress: Progress = lambda _: None,
) -> LengthHead:
    """Train a new head. Deterministic for a given seed."""
    torch.manual_seed(config.seed)
    head: LengthHead = LengthHead(config, inputs.shape[1], models, rows.target.shape[1])
    seen = torch.tensor(inputs[np.unique(rows.prompt)])
    head.mean.copy_(seen.mean(0))
    head.scale.copy_(1.0 / seen.std(0).clamp_min(0.02))
    return tune(head, inputs, rows, config, progress)


def load_head(state: Mapping[str, NDArray[np.float32]]) -> LengthHead:
    """Return a head with the weights of an artifact, in evaluation mode."""
    models, model_width = state["models.weight"].shape
    ranges, last = state["last.weight"].shape
    config = HeadConfig(model_width=model_width, hidden=last - model_width)
    head: LengthHead = LengthHead(config, len(state["mean"]), models, ranges)
    head.load_state_dict({name: torch.tensor(value) for name, value in state.items()})
    head.eval()
    return head


def head_state(head: LengthHead) -> dict[str, NDArray[np.float32]]:
    """Return the weights of a head by name."""
    return {name: value.detach().numpy().copy() for name, value in head.state_dict().items()}


def tune(
    head: LengthHead,
    inputs: NDArray[np.float32],
    rows: HeadRows,
    config: HeadConfig,
    progress: Progress = lambda _: None,
    *,
    only_models: bool = False,
) -> LengthHead:
    """Fine-tune a head, or only its model table if `only_models`, by cross-entropy on soft targets."""
    torch.manual_seed(config.seed)
    head.train()
    features = torch.tensor(inputs)
    noise = config.input_noise / head.scale
    steps = config.epochs * (len(rows.prompt) // config.batch_rows + 1) + 1
    parameters = [head.models.weight] if only_models else list(head.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.learning_rate, total_steps=steps)
    prompt, model, target, weight = map(torch.tensor, (rows.prompt, rows.model, rows.target, rows.weight))
    for epoch in range(config.epochs):
        total = 0.0
        for chosen in torch.randperm(len(prompt)).split(config.batch_rows):
            masked = torch.rand(len(chosen)) < config.unknown_share
            served = model[chosen].masked_fill(masked, UNKNOWN_MODEL)
            batch = features[prompt[chosen]]
            logits = head(batch + noise * torch.randn_like(batch), served)
            losses = functional.cross_entropy(logits, target[chosen], reduction="none")
            loss = (losses * weight[chosen]).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()
            total += loss.item() * len(chosen)
        progress(f"epoch {epoch + 1}/{config.epochs}: loss {total / len(prompt):.4f}")
    head.eval()
    return head


def predict_logits(
    head: LengthHead, inputs: NDArray[np.float32], prompt: NDArray[np.int64], model: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return logits `[rows, ranges]`, computed in batches. `prompt` indexes the inputs."""
    features = torch.tensor(inputs)
    batches = zip(torch.tensor(prompt).split(4096), torch.tensor(model).split(4096), strict=True)
    with torch.no_grad():
        return np.concatenate([head(features[prompts], models).numpy() for prompts, models in batches])
