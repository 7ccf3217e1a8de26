"""The lexical model: a small network from lexical scores, counts and the served model to ranges of length.

Needs torch; training only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

Progress = Callable[[str], None]
UNKNOWN_MODEL = 0
"""Row of the model table for a name that was not trained on: what models do on average."""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Sizes and the training recipe."""

    model_width: int = 24
    hidden: int = 128
    epochs: int = 6
    batch_rows: int = 1024
    learning_rate: float = 3e-3
    weight_decay: float = 1e-2
    hidden_dropout: float = 0.1
    input_noise: float = 0.05
    unknown_share: float = 0.1
    spread_octaves: float = 0.25
    seed: int = 7


class Head(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Logits over ranges of length from a prompt's inputs and a row of the model table."""

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
        served = self.models(model)
        known = ((inputs - self.mean) * self.scale).clamp(-5.0, 5.0)
        hidden = self.dropout(torch.relu(self.first(torch.cat([known, served], 1))))
        hidden = self.dropout(torch.relu(self.second(torch.cat([hidden, served], 1))))
        logits: Tensor = self.last(torch.cat([hidden, served], 1))
        return logits


@dataclass(frozen=True, slots=True)
class Rows:
    """What is learned from: `prompt` is a row's place among the inputs; target `[rows, ranges]`."""

    prompt: NDArray[np.int64]
    model: NDArray[np.int64]
    target: NDArray[np.float32]
    weight: NDArray[np.float32]


def fit(
    inputs: NDArray[np.float32],
    rows: Rows,
    models: int,
    config: HeadConfig,
    progress: Progress = lambda _: None,
) -> Head:
    """Trains a head from nothing; the same seed gives the same head."""
    torch.manual_seed(config.seed)
    net: Head = Head(config, inputs.shape[1], models, rows.target.shape[1])
    own = torch.tensor(inputs[np.unique(rows.prompt)])
    net.mean.copy_(own.mean(0))
    net.scale.copy_(1.0 / own.std(0).clamp_min(0.02))
    return tune(net, inputs, rows, config, progress)


def head_from(state: dict[str, NDArray[np.float32]]) -> Head:
    """A head with weights that were trained before, as they are kept in an artifact."""
    models, model_width = state["models.weight"].shape
    ranges, last = state["last.weight"].shape
    config = HeadConfig(model_width=model_width, hidden=last - model_width)
    net: Head = Head(config, len(state["mean"]), models, ranges)
    net.load_state_dict({name: torch.tensor(value) for name, value in state.items()})
    net.eval()
    return net


def state_of(net: Head) -> dict[str, NDArray[np.float32]]:
    """A head's weights by name."""
    return {name: value.detach().numpy().copy() for name, value in net.state_dict().items()}


def tune(
    net: Head,
    inputs: NDArray[np.float32],
    rows: Rows,
    config: HeadConfig,
    progress: Progress = lambda _: None,
    *,
    only_models: bool = False,
) -> Head:
    """Trains a head further, by cross-entropy on soft targets; or only its model table."""
    torch.manual_seed(config.seed)
    net.train()
    known = torch.tensor(inputs)
    noise = config.input_noise / net.scale
    steps = config.epochs * (len(rows.prompt) // config.batch_rows + 1) + 1
    learning = [net.models.weight] if only_models else list(net.parameters())
    optimizer = torch.optim.AdamW(learning, lr=config.learning_rate, weight_decay=config.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.learning_rate, total_steps=steps)
    prompt, model, target, weight = map(torch.tensor, (rows.prompt, rows.model, rows.target, rows.weight))
    for epoch in range(config.epochs):
        total = 0.0
        for chosen in torch.randperm(len(prompt)).split(config.batch_rows):
            served = model[chosen].masked_fill(torch.rand(len(chosen)) < config.unknown_share, UNKNOWN_MODEL)
            shown = known[prompt[chosen]]
            logits = net(shown + noise * torch.randn_like(shown), served)
            losses = functional.cross_entropy(logits, target[chosen], reduction="none")
            loss = (losses * weight[chosen]).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item() * len(chosen)
        progress(f"epoch {epoch + 1}/{config.epochs}: loss {total / len(prompt):.4f}")
    net.eval()
    return net


def logits_of(
    net: Head, inputs: NDArray[np.float32], prompt: NDArray[np.int64], model: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Logits `[rows, ranges]`, in batches."""
    known = torch.tensor(inputs)
    pairs = zip(torch.tensor(prompt).split(4096), torch.tensor(model).split(4096), strict=True)
    with torch.no_grad():
        return np.concatenate([net(known[where], served).numpy() for where, served in pairs])
