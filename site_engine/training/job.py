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

TRAIN_TOKENS = {"cpu": 512, "cuda": 4096}
"""Tokens of a micro-batch by device; on a GPU of the first, which shows how many take SLICE_S."""
SLICE_S = 0.01
"""So long a newcomer waits at most. Slices of half the time leave a GPU waiting for their launches: an H200
trained a third of the tokens a second at 8B and a seventh at 0.5B.
"""


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
    trainer = Trainer(
        SlicedModel(model.model),
        data,
        order.recipe,
        about=about,
        clock=clock,
        valid=valid,
        resumed=snapshot.decode(order.snapshot) if order.snapshot else None,
        train_tokens=TRAIN_TOKENS.get(model.device.type, TRAIN_TOKENS["cpu"]),
        slice_s=SLICE_S if on_gpu else None,
        snapshot_interval_s=snapshot_interval_s,
    )
    if on_gpu:
        trainer.warm_up()
    return trainer


def _read(name: str, encoder: RowEncoder, data: bytes) -> Dataset:
    """Encode a file; a line feed ends its last line or separates none."""
    dataset = encoder.dataset(data.removesuffix(b"\n").split(b"\n"))
    if dataset.faults:
        raise TrainingRefused("\n".join(f"{name}: {fault}" for fault in dataset.faults))
    return dataset
