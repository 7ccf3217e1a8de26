"""Find the version of a weight that a row has: the base's, or one that its variant owns.

A table [slots, layers, parts] says where versions lie, in units of 16 bytes from the base's.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def versions_of(own, slots, own_stride):
    """Return where the versions of slots lie; that of no slot is the base's, at 0."""
    return tl.load(own + slots.to(tl.int64) * own_stride, mask=slots >= 0, other=0)


@triton.jit
def at_version(weight, version):
    """Return the address of a version of a weight."""
    return weight + version * (16 // (weight.dtype.element_ty.primitive_bitwidth // 8))


@triton.jit
def version_of_row(weight, own, slots, own_stride, OWN: tl.constexpr):
    """Return the address of the version that this program's row has, the base's unless OWN."""
    if OWN:
        weight = at_version(weight, versions_of(own, tl.load(slots + tl.program_id(0)), own_stride))
    return weight
