"""A job between two steps, as one file: from it a site goes on as if nothing had happened.

The order of examples follows from the seed and the step, and nothing else is random, so that the state is the
adapter, the optimizer's moments and the number of steps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from site_engine.errors import TrainingRefused

ABOUT = "mico"


class Snapshot(NamedTuple):
    """`about` is what it may go on with: digests of base and data, the recipe. `tensors` are on the host."""

    step: int
    about: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]


def save(snapshot: Snapshot, path: Path) -> None:
    """Write a snapshot; a process that is killed meanwhile leaves the one before. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_suffix(".new")
    note = json.dumps({"step": snapshot.step, "about": snapshot.about})
    save_file(dict(snapshot.tensors), staging, metadata={ABOUT: note})
    for place, replaced in ((staging, path), (path.parent, None)):
        descriptor = os.open(place, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if replaced is not None:
            place.replace(replaced)


def load(path: Path) -> Snapshot:
    """Read a snapshot. Raises TrainingRefused for a file that is none."""
    try:
        with safe_open(str(path), framework="pt") as file:
            names: Any = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
            note = json.loads(file.metadata()[ABOUT])
        return Snapshot(int(note["step"]), note["about"], tensors)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise TrainingRefused(f"{path} is no snapshot that can be read: {error}") from error
