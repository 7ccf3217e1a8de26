"""Load Triton's compiler and driver with one small launch, while other threads load weights."""

from __future__ import annotations

import torch

from site_engine.cuda.kernels import layer_kernels

WIDTH = 1024


def launch_first(device: torch.device, dtype: torch.dtype) -> None:
    """Launch a kernel. The first launch of a process takes 1 to 2 s, since Triton hashes all of its code."""
    gate = torch.zeros(1, WIDTH, dtype=dtype, device=device)
    out = torch.empty_like(gate)
    layer_kernels.silu_times[(1, 1)](
        gate, gate, out, WIDTH, gate.stride(0), gate.stride(0), BLOCK=WIDTH, num_warps=4
    )
