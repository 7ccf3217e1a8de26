"""Import where kernels are tested: they run on a GPU, or interpreted (see conftest.py), or not at all."""

from __future__ import annotations

import pytest

pytest.importorskip(
    "triton", reason="Triton has no build for this platform: the GPU's kernels go untested here"
)
