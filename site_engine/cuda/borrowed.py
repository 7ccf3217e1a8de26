"""Make tensors on device memory that something else keeps."""

from __future__ import annotations


class BorrowedMemory:
    """Device memory that belongs to somebody else, for `torch.as_tensor`."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
