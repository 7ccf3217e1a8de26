"""Begin a job: read its files with the model's tokenizer, and build what trains it. May take seconds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from site_engine.core.training import TrainingOrder
from site_engine.errors import TrainingRefused
from site_engine.model.loader import LoadedModel
from site_engine.training import snapshot
from site_engine.training.data import Dataset, RowEncoder
from site_engine.training.sliced_model import SlicedModel
from site_engine.training.trainer import SNAPSHOT_INTERVAL_S, Trainer

SLICE_S = 0.01
"""So long a newcomer waits at most. Slices of half the time leave a GPU waiting for their launches: an H200
trained a third of the tokens a second at 8B and a seventh at 0.5B.
"""
MAX_TRAIN_TOKENS = 16384
"""Of a micro-batch on a GPU: of more the kept inputs of layers take gigabytes."""
SIZES_ON_CPU = (512, 256, 128, 64)
SLICE_FLOP = 8e8
"""Of a slice on a CPU: about SLICE_S of one core."""


def open_job(
    model: LoadedModel,
    order: TrainingOrder,
    clock: Callable[[], float],
    *,
    snapshot_interval_s: float = SNAPSHOT_INTERVAL_S,
) -> Trainer:
    """Return the trainer of a job. Raises TrainingRefused, also for bad data, which is named by line."""
    if model.tokenizer is None:
        raise TrainingRefused("this engine has no tokenizer")
    if not order.data:
        raise TrainingRefused("the training file is empty")
    encoder = RowEncoder(model.tokenizer, model.eos_token_ids, model.context_tokens)
    data = _read("training_file", encoder, order.data)
    valid = _read("validation_file", encoder, order.valid) if order.valid else None
    about = {
        "base": model.revision,
        "data": hashlib.sha256(order.data).hexdigest(),
        "valid": hashlib.sha256(order.valid).hexdigest(),
    }
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
        train_tokens=MAX_TRAIN_TOKENS if on_gpu else tokens_on_cpu(sliced),
        slice_s=SLICE_S if on_gpu else None,
        padded=on_gpu,
        snapshot_interval_s=snapshot_interval_s,
    )
    trainer.warm_up()
    return trainer


def tokens_on_cpu(model: SlicedModel) -> int:
    """Return the tokens of a micro-batch on a CPU: not by what slices take, so that a job that is trained
    again gives the same adapter, bit by bit.
    """
    weights = sum(each.numel() for each in model.layers[0][1].parameters())
    return next((size for size in SIZES_ON_CPU if 6 * weights * size <= SLICE_FLOP), SIZES_ON_CPU[-1])


def _read(name: str, encoder: RowEncoder, data: bytes) -> Dataset:
    """Encode a file; a line feed ends its last line or separates none."""
    dataset = encoder.dataset(data.removesuffix(b"\n").split(b"\n"))
    if dataset.faults:
        raise TrainingRefused("\n".join(f"{name}: {fault}" for fault in dataset.faults))
    return dataset
