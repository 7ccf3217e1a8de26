"""Import before anything that holds Triton kernels: without a GPU they run in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip(
    "triton", reason="Triton has no build for this platform: the GPU's kernels go untested here"
)
