"""Import where kernels are tested: they run interpreted, or compiled on a GPU (see conftest.py), or not.

Half of an interpreted kernel's time is in what Triton computes anew for each of its operations, from few
shapes and types: kept here, with the same results.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip(
    "triton", reason="Triton has no build for this platform: the GPU's kernels go untested here"
)

# isort: split

import triton
import triton.language as tl
from triton.runtime import interpreter

_patch = interpreter._patch_lang
_init_block_type, _init_tensor = tl.block_type.__init__, tl.tensor.__init__
_NO_SHAPE, _ONE = tl.core.tuple([]), tl.constexpr(1)
_np_dtype_of_scalar = cache(interpreter._get_np_dtype)


class _Shape(NamedTuple):
    """What types and tensors of one shape have alike."""

    of_types: tl.core.tuple
    of_tensors: tl.core.tuple
    numel: int
    numel_of_tensors: tl.constexpr


@cache
def _shape(sizes: tuple[Any, ...]) -> _Shape:
    kind, tensor = object.__new__(tl.block_type), object.__new__(tl.tensor)
    _init_block_type(kind, tl.int1, list(sizes))
    _init_tensor(tensor, None, kind)
    return _Shape(kind.shape, tensor.shape, kind.numel, tensor.numel)


def _init_block_type_once(self: Any, element_ty: tl.dtype, shape: Any) -> None:
    self.element_ty = element_ty
    self.shape, _, self.numel, _ = _shape(tuple(shape))
    self.name = f"<{self.shape}, {element_ty}>"


def _init_tensor_once(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - Triton's name
    self.handle, self.type, self.dtype = handle, type, type.scalar
    if type.is_block():
        _, self.shape, _, self.numel = _shape(tuple(type.shape.values))
    else:
        self.shape, self.numel = _NO_SHAPE, _ONE


def _np_dtype(dtype: tl.dtype) -> Any:
    scalar = dtype.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else _np_dtype_of_scalar(scalar)


def _patch_once(kernel: Any) -> Any:
    """Give Triton's language its interpreted functions, but not anew for each function a kernel calls."""
    languages = [each for each in kernel.__globals__.values() if each is tl or each is tl.core]
    if languages and all(each.static_print is print for each in languages):
        return interpreter._LangPatchScope()
    return _patch(kernel)


if triton.knobs.runtime.interpret:
    tl.block_type.__init__, tl.tensor.__init__ = _init_block_type_once, _init_tensor_once
    interpreter._get_np_dtype = _np_dtype
    interpreter._patch_lang = _patch_once
    # Without debugging no assertion is made of the checks for overflow, which are computed all the same.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
