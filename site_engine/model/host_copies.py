"""Copy numbers of the host to a device without waiting for what the device has to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def to_device(numbers: np.ndarray[Any, np.dtype[Any]], device: torch.device) -> torch.Tensor:
    """Queue a copy of an array to a device; neither the host nor its other cores wait.

    The copy to pinned memory is numpy's: torch would wake a thread on every core for it.
    """
    if device.type != "cuda":
        return torch.from_numpy(numbers)
    pinned = torch.from_numpy(numbers[:0]).new_empty(numbers.shape, pin_memory=True)
    np.copyto(pinned.numpy(), numbers)
    return pinned.to(device, non_blocking=True)
