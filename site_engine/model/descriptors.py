"""Give every rank of a group the file descriptors of the others, which stand for memory that they share."""

from __future__ import annotations

import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

WITHIN_S = 60.0


class Store(Protocol):
    """What ranks know each other by: `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes:
        """Return a value, once a rank has set it."""


class DescriptorExchange:
    """Linux only: through sockets that have random names and no place in the file system."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._turn = 0

    def __call__(self, descriptor: int) -> list[int]:
        """Give a descriptor to all others; return those of all ranks, in their order, own included.

        To be called by all ranks, as often by each. Raises OSError.
        """
        self._turn += 1
        with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as giving:
            name = "\0mico-" + secrets.token_hex(16)
            listener.bind(name)
            listener.listen(self._size)
            listener.settimeout(WITHIN_S)
            given = giving.submit(self._give, listener, descriptor)
            self._store.set(self._key(self._rank), name.removeprefix("\0"))
            found = [descriptor if rank == self._rank else self._take(rank) for rank in range(self._size)]
            given.result()
        return found

    def _give(self, listener: socket.socket, descriptor: int) -> None:
        for _ in range(self._size - 1):
            other, _ = listener.accept()
            with other:
                socket.send_fds(other, [b"\0"], [descriptor])

    def _take(self, rank: int) -> int:
        name = "\0" + self._store.get(self._key(rank)).decode()
        with socket.socket(socket.AF_UNIX) as other:
            other.settimeout(WITHIN_S)
            other.connect(name)
            _, (found,), _, _ = socket.recv_fds(other, 1, 1)
        return found

    def _key(self, rank: int) -> str:
        return f"descriptor {self._turn} of rank {rank}"
