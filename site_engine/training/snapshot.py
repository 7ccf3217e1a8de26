"""A job between two steps, as one file: from it a site goes on as if nothing had happened.

The order of examples follows from the seed and the step, and nothing else is random, so that the state is the
adapter, the optimizer's moments and the number of steps.
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
    """What a file says of a snapshot, beside its tensors."""

    step: int
    about: dict[str, Any]


class Snapshot(NamedTuple):
    """`about` is what it may go on with: digests of base and data, the recipe.

    `tensors` are copies on the device that trains, which makes them in no time; `encode` waits for the host.
    """

    step: int
    about: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]

    @property
    def adapter(self) -> dict[str, torch.Tensor]:
        """The factors of the adapter by their names in a file of peft, without the moments."""
        return {name: each for name, each in self.tensors.items() if name.startswith(PREFIX)}

    def saved(self, *, last: bool) -> Saved:
        """Return the snapshot as the bytes of a file."""
        return Saved(self.step, last, encode(self))


def encode(snapshot: Snapshot) -> bytes:
    note, file = json.dumps({"step": snapshot.step, "about": snapshot.about}), BytesIO()
    write_tensors(file, snapshot.tensors, {ABOUT: note})
    return file.getvalue()


def decode(data: bytes) -> Snapshot:
    """Read a snapshot. Raises TrainingRefused for data that is none."""
    try:
        tensors, metadata = read_tensors(data)
        note = msgspec.json.decode(metadata[ABOUT], type=Note)
        return Snapshot(note.step, note.about, tensors)
    except (ValueError, KeyError, msgspec.DecodeError, RecursionError) as error:
        raise TrainingRefused(f"the snapshot can't be read: {error}") from error
