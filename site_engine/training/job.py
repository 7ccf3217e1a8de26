"""Open a training job: read its files with the model's tokenizer and build its trainer. May take seconds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import numpy as np

from site_engine.core.loader_turns import released
from site_engine.core.slack import SliceCosts
from site_engine.core.training import AdapterShape, Failed, Recipe, TrainingOrder
from site_engine.errors import TrainingRefused
from site_engine.model.loader import LoadedModel
from site_engine.training import snapshot
from site_engine.training.data import Dataset, Example, RowEncoder
from site_engine.training.sliced_model import SlicedModel
from site_engine.training.trainer import SNAPSHOT_INTERVAL_S, Trainer

SLICE_S = 0.005
"""Maximum seconds of a layer slice, which a new request may have to wait for. Micro-batches of half the size
leave a GPU waiting for launches: an H200 trained a third of the tokens per second at 8B, a seventh at 0.5B.
"""
MAX_TRAIN_TOKENS = 16384
"""Maximum tokens of a micro-batch on a GPU. With more, the kept inputs of layers take gigabytes."""
SIZES_ON_CPU = (512, 256, 128, 64)
SLICE_FLOP = 8e8
"""Maximum FLOP of a slice on a CPU: about SLICE_S seconds of one core."""


def open_job(
    model: LoadedModel,
    order: TrainingOrder,
    clock: Callable[[], float],
    *,
    snapshot_interval_s: float = SNAPSHOT_INTERVAL_S,
    train_tokens: int | None = None,
    costs: SliceCosts | None = None,
) -> Trainer:
    """Return the warmed-up trainer of a job. Raises TrainingRefused; for invalid data it names the lines.

    `train_tokens` is the size of a micro-batch. None: measured now on a GPU, which gives too small a size
    while requests are served; on a CPU, `tokens_on_cpu`.
    """
    if model.tokenizer is None:
        raise TrainingRefused("this engine has no tokenizer")
    if not order.data:
        raise TrainingRefused("the training file is empty")
    encoder = RowEncoder(model.tokenizer, model.eos_token_ids, model.context_tokens)
    data = _read("training_file", encoder, order.data)
    valid = _read("validation_file", encoder, order.valid) if order.valid else None
    with released():
        hashes = [hashlib.sha256(each).hexdigest() for each in (order.data, order.valid)]
    about = {"base": model.revision, "data": hashes[0], "valid": hashes[1]}
    on_gpu = model.device.type == "cuda"
    sliced = SlicedModel(model.model)
    trainer = Trainer(
        sliced,
        data,
        order.recipe,
        about=about,
        clock=clock,
        valid=valid,
        resumed=snapshot.decode(order.snapshot) if order.snapshot else None,
        train_tokens=train_tokens or (MAX_TRAIN_TOKENS if on_gpu else tokens_on_cpu(sliced)),
        slice_s=SLICE_S if on_gpu and train_tokens is None else None,
        padded=on_gpu,
        costs=costs,
        snapshot_interval_s=snapshot_interval_s,
    )
    trainer.warm_up()
    return trainer


def warm_up(model: LoadedModel, shape: AdapterShape, clock: Callable[[], float], costs: SliceCosts) -> int:
    """Warm up a synthetic job before a site joins, and return the size of its micro-batches in tokens.

    Jobs of the same shape that start while requests are served then find their kernels compiled, memory
    allocated and the slice durations in `costs`. Raises TrainingRefused.
    """
    draw = np.random.RandomState(0)
    lengths = [min(8 * number, model.context_tokens) for number in range(1, 65)]
    made_up = Dataset(
        tuple(
            Example(draw.randint(0, model.vocab_size, length), np.arange(length) >= length // 2)
            for length in lengths
        )
    )
    trainer = Trainer(
        SlicedModel(model.model),
        made_up,
        Recipe(batch_size=len(lengths), shape=shape),
        about={},
        clock=clock,
        train_tokens=MAX_TRAIN_TOKENS,
        slice_s=SLICE_S,
        padded=True,
        costs=costs,
    )
    trainer.warm_up()
    for event in trainer.take_events():
        if isinstance(event, Failed):
            raise TrainingRefused(event.reason)
    return trainer.train_tokens


def tokens_on_cpu(model: SlicedModel) -> int:
    """Return the tokens of a micro-batch on a CPU. The result depends on the weights' size, not on measured
    durations, so that repeating a job gives a bit-identical adapter.
    """
    weights = sum(each.numel() for each in model.layers[0][1].parameters())
    return next((size for size in SIZES_ON_CPU if 6 * weights * size <= SLICE_FLOP), SIZES_ON_CPU[-1])


def _read(name: str, encoder: RowEncoder, data: bytes) -> Dataset:
    dataset = encoder.dataset(_lines(data))
    if dataset.faults:
        raise TrainingRefused("\n".join(f"{name}: {fault}" for fault in dataset.faults))
    return dataset


def _lines(data: bytes) -> Iterator[bytes]:
    """Yield the lines of a file, with or without a line feed at its end.

    Splitting a large file in one call would block the interpreter for the serving threads.
    """
    begin, end = 0, len(data) - data.endswith(b"\n")
    while (at := data.find(b"\n", begin, end)) >= 0:
        yield data[begin:at]
        begin = at + 1
    yield data[begin:end]
