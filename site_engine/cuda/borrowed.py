"""Create tensors on device memory owned by another object."""

from __future__ import annotations


class BorrowedMemory:
    """Device memory owned by another object, as an argument for `torch.as_tensor`."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
