"""Examples, jobs and chats for tests of training, on random models of a few thousand parameters."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from site_engine.core.training import AdapterShape, Recipe
from site_engine.training.adapter import Adapter, new_adapter
from site_engine.training.data import Dataset, Example
from site_engine.training.micro_batch import MicroBatch, run_micro_batch
from site_engine.training.packing import Packed
from site_engine.training.sliced_model import SlicedModel
from site_engine.training.trainer import Event, Trainer
from tests.support.engine_models import FAMILIES, VOCAB, family
from tests.support.model_families import random_model

ABOUT = {"base": "a base", "data": "some data"}
SMALL = Recipe(epochs=3, batch_size=4, learning_rate=3e-3, seed=5, shape=AdapterShape(4, 8.0))


def examples(count: int, seed: int = 0, longest: int = 40) -> Dataset:
    """Return sequences of random tokens and lengths, of each the end learned."""
    draw = Random(seed)
    made = []
    for _ in range(count):
        length = draw.randint(2, longest)
        ids = np.array([draw.randrange(VOCAB) for _ in range(length)], dtype=np.int64)
        made.append(Example(ids, np.arange(length) >= draw.randint(1, length - 1)))
    return Dataset(tuple(made))


def chats(count: int) -> list[bytes]:
    """Return lines of chats whose answers follow a rule that a small model can learn."""
    return [
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": f"what is {number}?"},
                    {"role": "assistant", "content": f"{number * 7 % 10}!"},
                ]
            }
        ).encode()
        for number in range(count)
    ]


def trainer(
    data: Dataset, recipe: Recipe = SMALL, model: Any = None, *, fused: bool | None = None, **settings: Any
) -> Trainer:
    """Return a trainer of a small Llama, with a clock that stands still unless another is given."""
    chosen: dict[str, Any] = {"about": ABOUT, "clock": lambda: 0.0, "train_tokens": 64} | settings
    sliced = SlicedModel(family("llama").plain if model is None else model, fused=fused)
    return Trainer(sliced, data, recipe, **chosen)


def run(job: Trainer, between: Callable[[Trainer, int], None] = lambda job, slices: None) -> list[Event]:
    """Run a job to its end and return its events; `between` is called before each slice."""
    slices, events = 0, list[Event]()
    while not job.ended:
        between(job, slices)
        job.run_slice()
        slices += 1
        events += job.take_events()
    return events


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether two adapters are the same, bit by bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def started(
    name: str, shape: AdapterShape = SMALL.shape
) -> tuple[SlicedModel, Adapter, list[list[str]], Any]:
    """Return a family in float64 with an adapter that changes it, and the plain model."""
    plain = random_model(FAMILIES[name]()).double()
    for module in plain.modules():
        if hasattr(module, "variance_epsilon"):  # transformers computes these norms in float32
            module.forward = partial(
                F.rms_norm,
                normalized_shape=module.weight.shape,
                weight=module.weight,
                eps=module.variance_epsilon,
            )
    model = SlicedModel(plain)
    adapter = new_adapter(model.targets(shape), shape, seed=1)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, up in adapter.factors.values():
            up.normal_(0.0, 0.05, generator=draw)
    return model, adapter, model.attach(adapter), plain


def computed(
    model: SlicedModel, adapter: Adapter, adapted: list[list[str]], packed: Packed, **how: Any
) -> MicroBatch:
    """Return what all slices of a micro-batch give."""
    slices = run_micro_batch(model, adapter, adapted, packed, packed.learned, **how)
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: MicroBatch = end.value
            return result
