"""A job between two steps, as one file: from it a site goes on as if nothing had happened.

The order of examples follows from the seed and the step, and nothing else is random, so that the state is the
adapter, the optimizer's moments and the number of steps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import safetensors
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from site_engine.core.training import Saved
from site_engine.errors import TrainingRefused
from site_engine.variants.peft_folder import PREFIX

ABOUT = "mico"


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
    note = json.dumps({"step": snapshot.step, "about": snapshot.about})
    tensors = {name: each.cpu() for name, each in snapshot.tensors.items()}
    return bytes(save_tensors(tensors, metadata={ABOUT: note}))


def decode(data: bytes) -> Snapshot:
    """Read a snapshot. Raises TrainingRefused for data that is none."""
    try:
        tensors = load_tensors(data)
        size = int.from_bytes(data[:8], "little")
        note = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][ABOUT])
        return Snapshot(int(note["step"]), note["about"], tensors)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise TrainingRefused(f"the snapshot can't be read: {error}") from error
