"""Import where kernels are tested: they run on a GPU, or interpreted (see conftest.py), or not at all."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip(
    "triton", reason="Triton has no build for this platform: the GPU's kernels go untested here"
)

# isort: split

import triton.language as tl
from triton.runtime import interpreter

_patch = interpreter._patch_lang


def _patch_once(kernel: Any) -> Any:
    """Give Triton's language its interpreted functions, but not anew for each function that a kernel calls.

    Triton looks through the whole language each time, which is a fifth of an interpreted kernel's time.
    """
    languages = [each for each in kernel.__globals__.values() if each is tl or each is tl.core]
    if languages and all(each.static_print is print for each in languages):
        return interpreter._LangPatchScope()
    return _patch(kernel)


interpreter._patch_lang = _patch_once
