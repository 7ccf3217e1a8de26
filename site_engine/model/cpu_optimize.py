"""Speed a model up on a CPU without changing what it computes: weight layout and fused norms."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own convention


def optimize_for_cpu(model: Any) -> Any:
    """Change float32 modules on a CPU in place; leave all others as they are."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.device.type == "cpu" and weight.dtype is torch.float32:
            if isinstance(module, torch.nn.Linear):
                # column-major weights are read in order by products with few rows: 1.6 times as fast for one
                # row (docs/decisions/engine-cpu.md), with the same numbers
                module.weight.data = module.weight.data.t().contiguous().t()
            elif _is_plain_norm(module, weight):
                module.forward = partial(
                    F.rms_norm, normalized_shape=weight.shape, weight=weight, eps=module.variance_epsilon
                )
    return model


def _is_plain_norm(module: Any, weight: torch.Tensor) -> bool:
    """Return whether a module is an RMS norm times its weight, which one fused call can compute."""
    if not type(module).__name__.endswith("RMSNorm") or not hasattr(module, "variance_epsilon"):
        return False
    with torch.no_grad():
        sample = torch.linspace(-3.0, 2.0, 2 * weight.numel()).view(2, *weight.shape)
        fused = F.rms_norm(sample, weight.shape, weight, module.variance_epsilon)
        return bool(torch.allclose(module(sample), fused, rtol=1e-5, atol=1e-6))
