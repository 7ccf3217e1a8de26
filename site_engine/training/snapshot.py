"""The state of a job between two steps, as one file. A site can resume the job from it with the same result.

The order of examples follows from the seed and the step, and nothing else is random. The state therefore
consists of the adapter, the optimizer's moments and the number of steps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import BytesIO
from typing import Any, NamedTuple

import msgspec
import torch

from site_engine.core.training import Saved
from site_engine.errors import TrainingRefused
from site_engine.training.tensor_bytes import read_tensors, write_tensors
from site_engine.variants.peft_folder import PREFIX

ABOUT = "mico"


class Note(msgspec.Struct):
    """The metadata of a snapshot file."""

    step: int
    about: dict[str, Any]


class Snapshot(NamedTuple):
    """The state of a job after `step` steps.

    `about` identifies the job that may resume it: digests of base model and data, and the recipe. `tensors`
    are copies on the training device, which are cheap to make; `encode` copies them to the host.
    """

    step: int
    about: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]

    @property
    def adapter(self) -> dict[str, torch.Tensor]:
        """The factors of the adapter, by their names in a peft file, without the moments."""
        return {name: each for name, each in self.tensors.items() if name.startswith(PREFIX)}

    def saved(self, *, last: bool) -> Saved:
        """Return the snapshot encoded as the bytes of a file."""
        return Saved(self.step, last, encode(self))


def encode(snapshot: Snapshot) -> bytes:
    note, file = json.dumps({"step": snapshot.step, "about": snapshot.about}), BytesIO()
    write_tensors(file, snapshot.tensors, {ABOUT: note})
    return file.getvalue()


def decode(data: bytes) -> Snapshot:
    """Decode a snapshot. Raises TrainingRefused for invalid data."""
    try:
        tensors, metadata = read_tensors(data)
        note = msgspec.json.decode(metadata[ABOUT], type=Note)
        return Snapshot(note.step, note.about, tensors)
    except (ValueError, KeyError, msgspec.DecodeError, RecursionError) as error:
        raise TrainingRefused(f"the snapshot can't be read: {error}") from error
