"""Give file descriptors, which stand for memory, to other processes of this host and user. Linux only."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
from contextlib import suppress
from typing import Protocol

WITHIN_S = 60.0
PREFIX = "\0mico-"
"""Of names that are no place in the file system."""
CREDENTIALS = struct.Struct("3i")
"""Process, user and group at the other end of a socket."""


class GivenDescriptor:
    """A descriptor that others can take by a random name until this object is closed."""

    def __init__(self, descriptor: int) -> None:
        self.name = secrets.token_hex(16)
        self._descriptor = descriptor
        self._given = threading.Semaphore(0)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(PREFIX + self.name)
        self._listener.listen()
        threading.Thread(target=self._give, name="descriptors", daemon=True).start()

    def wait(self, times: int) -> None:
        """Wait until the descriptor was taken so many times more. Raises TimeoutError."""
        for _ in range(times):
            if not self._given.acquire(timeout=WITHIN_S):
                raise TimeoutError("the other processes did not take what they were given")

    def close(self) -> None:
        """Stop giving the descriptor, which itself stays open."""
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes the socket

    def _give(self) -> None:
        with self._listener as listener:
            while True:
                try:
                    other, _ = listener.accept()
                except OSError:
                    return
                with other:
                    if is_own_user(other):
                        with suppress(OSError):  # the other process has disconnected
                            socket.send_fds(other, [b"\0"], [self._descriptor])
                            self._given.release()


def is_own_user(other: socket.socket) -> bool:
    """Return whether a process of this user is at the other end."""
    found = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    _, user, _ = CREDENTIALS.unpack(found)
    return bool(user == os.getuid())


def taken(name: str) -> int:
    """Return the descriptor that another process gives under a name. Raises OSError."""
    with socket.socket(socket.AF_UNIX) as other:
        other.settimeout(WITHIN_S)
        other.connect(PREFIX + name)
        _, found, _, _ = socket.recv_fds(other, 1, 1)
    if not found:
        raise ConnectionRefusedError(f"no descriptor was given by the name {name}")
    return found[0]


def is_given(name: str) -> bool:
    """Return whether a process gives a descriptor under a name."""
    try:
        os.close(taken(name))
    except OSError:
        return False
    return True


class Store(Protocol):
    """The part of `torch.distributed.Store` by which ranks find each other."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes:
        """Return a value, once a rank has set it."""


class DescriptorExchange:
    """Gives every rank of a group the descriptors of the others."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._turn = 0

    def __call__(self, descriptor: int) -> list[int]:
        """Give a descriptor to all other ranks; return the descriptors of all ranks in rank order.

        All ranks have to call as often. Raises OSError.
        """
        self._turn += 1
        given = GivenDescriptor(descriptor)
        try:
            self._store.set(self._key(self._rank), given.name)
            found = [
                descriptor if rank == self._rank else taken(self._store.get(self._key(rank)).decode())
                for rank in range(self._size)
            ]
            given.wait(self._size - 1)
        finally:
            given.close()
        return found

    def _key(self, rank: int) -> str:
        return f"descriptor {self._turn} of rank {rank}"
